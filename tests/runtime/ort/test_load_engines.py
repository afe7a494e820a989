"""Engines that do not fit their manifest: refused by name, before a buffer is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import BUILT_IN_DRAFTERS, DRAFT_ENGINES, HEAD_METHODS
from eagle3.runtime.drafters.registry import DRAFTERS
from eagle3.runtime.errors import BundleError, EngineError
from eagle3.runtime.ort import candidates, session
from eagle3.runtime.ort import draft_engine as draft
from eagle3.runtime.ort import target_engine as target
from eagle3.runtime.ort.kv_cache import Buffer
from eagle3.runtime.ort.session import Session, load_session
from eagle3.runtime.ort.signature import Bound
from eagle3.runtime.stats import Clock

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.root, tmp_path / "bundle"))


@pytest.fixture
def no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever allocates a cache or a buffer fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("something was allocated")

    for module in (target, candidates):
        monkeypatch.setattr(module, "KvCache", refuse)
    for module in (target, candidates, draft):
        monkeypatch.setattr(module, "Buffer", refuse)


def put(dotted: str, value: Any) -> Edit:
    """Sets one field of a manifest; list items by number."""
    *parents, last = [int(key) if key.isdigit() else key for key in dotted.split("/")]

    def change(data: Any) -> None:
        for key in parents:
            data = data[key]
        data[last] = value

    return change


def edit(folder: Path, *changes: Edit) -> Path:
    data = json.loads((folder / "manifest.json").read_text())
    for change in changes:
        change(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        eagle3.load(folder, threads=1)
    return str(caught.value)


def test_every_method_has_a_drafter_and_knows_its_engines() -> None:
    assert set(DRAFTERS) == {*BUILT_IN_DRAFTERS, *DRAFT_ENGINES}
    assert set(HEAD_METHODS) < set(DRAFT_ENGINES)


@pytest.mark.parametrize(
    ("field", "value", "asked", "found"),
    [
        ("plan/max_seq_len", 256, "past_k.0 float32 [B, 2, 257, 8]", "[B, 2, 129, 8]"),
        ("plan/dtype", "float16", "past_k.0 float16", "past_k.0 float32"),
        ("target/vocab_size", 1000, "logits float32 [B, M, 1000]", "[B, M, 64]"),
        ("target/vocab_size", 10**12, "logits float32 [B, M, 1000000000000]", "[B, M, 64]"),
        ("target/num_layers", 10**12, "past_k.8", "none of that name"),
        ("target/num_layers", 7, "past_k.7", "is not expected by"),
        ("target/num_kv_heads", 4, "past_k.0 float32 [B, 4, 129, 8]", "[B, 2, 129, 8]"),
        ("target/head_dim", 4, "past_k.0 float32 [B, 2, 129, 4]", "[B, 2, 129, 8]"),
        ("engines/target/inputs/0/name", "ids", "ids int64 [B, N]", "none of that name"),
        ("engines/target/inputs/0/dtype", "int32", "input_ids int32", "input_ids int64"),
        ("engines/target/inputs/0/shape", ["B", 5], "input_ids int64 [B, 5]", "int64 [B, N]"),
        ("engines/target/inputs/0/shape", ["B"], "input_ids int64 [B]", "int64 [B, N]"),
        ("engines/target/inputs", [], "input_ids int64 [B, N]", "is not expected by its manifest"),
        (
            "engines/target/outputs",
            [],
            "logits float32 [B, M, 64]",
            "is not expected by its manifest",
        ),
        ("engines/target/file", "eagle3.draft.onnx", "[B, 2, 129, 8]", "[B, 2, 256, 8]"),
    ],
)
@pytest.mark.usefixtures("no_buffers")
def test_a_target_that_is_not_the_manifests(
    copy: Path, field: str, value: Any, asked: str, found: str
) -> None:
    message = refusal(edit(copy, put(field, value)))
    assert "engine 'target'" in message and asked in message and found in message
    assert "export the bundle again" in message


@pytest.mark.usefixtures("no_buffers")
def test_features_of_another_width(copy: Path) -> None:
    wide = (put("target/hidden_size", 40), put("target/feature_size", 120))
    message = refusal(edit(copy, *wide))
    assert "features float32 [B, N, 120]" in message and "[B, N, 96]" in message


@pytest.mark.parametrize(
    ("field", "value", "engine", "asked", "found"),
    [
        ("plan/max_draft_tokens", 16, "eagle3.draft", "[B, 2, 192, 8]", "[B, 2, 256, 8]"),
        (
            "drafts/eagle3/hidden_size",
            7,
            "eagle3.draft_fuse",
            "hidden float32 [B, N, 7]",
            "[B, N, 32]",
        ),
        ("drafts/eagle3/num_kv_heads", 9, "eagle3.draft", "[B, 9, 256, 8]", "[B, 2, 256, 8]"),
        ("drafts/eagle3/head_dim", 10**12, "eagle3.draft", "1000000000000]", "[B, 2, 256, 8]"),
        ("engines/eagle3.draft/file", "target.onnx", "eagle3.draft", "none of that name", "hidden"),
        (
            "engines/eagle3.draft_fuse/file",
            "eagle3.draft.onnx",
            "eagle3.draft_fuse",
            "features",
            "none of that",
        ),
    ],
)
def test_a_draft_that_is_not_the_manifests(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: Any,
    engine: str,
    asked: str,
    found: str,
) -> None:
    monkeypatch.setattr(candidates, "KvCache", lambda *_: pytest.fail("a cache was allocated"))
    message = refusal(edit(copy, put(field, value)))
    assert f"engine '{engine}'" in message and asked in message and found in message


def test_a_draft_vocabulary_of_another_size(bundle: Bundle, copy: Path) -> None:
    """The ids agree with the manifest; the graph tells."""
    opened = Bundle.open(copy)
    info = opened.manifest.draft
    assert info is not None
    smaller = {"eagle3": replace(info, draft_vocab_size=39)}
    manifest = replace(opened.manifest, drafts=smaller)
    with pytest.raises(BundleError, match=r"logits float32 \[B, M, 39\] .* \[B, M, 40\]"):
        draft.DraftEngine(Bundle(copy, manifest), 1, Clock())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("no_buffers")
def test_a_bundle_for_another_backend(copy: Path, dtype: str) -> None:
    other = [put("plan/backend", "ort-cuda"), put("plan/lowering", "portable")]
    message = refusal(edit(copy, *other, put("plan/dtype", dtype)))
    assert f"built for backend ort-cuda in {dtype}" in message and "--dtype float32" in message


@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize("engine", ["target", "eagle3.draft_fuse", "eagle3.draft"])
def test_weights_that_were_cut_before_they_were_described(
    bundle: Bundle, tmp_path: Path, engine: str, kept: int
) -> None:
    name = f"{engine}.onnx.data"
    content = bundle.path(name).read_bytes()[:kept]
    edited = tiny.edited_bundle(bundle, tmp_path / "bundle", {name: content})
    assert f"engine '{engine}'" in refusal(edited.root)


@pytest.mark.parametrize("content", [b"", b"x" * 1000])
def test_a_graph_that_is_none(bundle: Bundle, tmp_path: Path, content: bytes) -> None:
    edited = tiny.edited_bundle(bundle, tmp_path / "bundle", {"target.onnx": content})
    assert "engine 'target'" in refusal(edited.root)


def fuse_session(bundle: Bundle) -> Session:
    info = bundle.manifest.engines["eagle3.draft_fuse"]
    return load_session(bundle, "eagle3.draft_fuse", Bound(info.inputs, info.outputs), 1, Clock())


def fuse_values(count: int, name: str = "features") -> session.OrtValues:
    features, hidden = Buffer(count * 96, "float32"), Buffer(count * 32, "float32")
    return {name: features.value(1, count, 96)}, {"hidden": hidden.value(1, count, 32)}


def test_a_binding_that_fails_is_an_engine_error(bundle: Bundle) -> None:
    fuse = fuse_session(bundle)
    for _ in range(2):  # it is not kept either
        with pytest.raises(EngineError, match="engine 'eagle3.draft_fuse' failed"):
            fuse.run(1, lambda: fuse_values(1, "no_such"))
    fuse.run(1, lambda: fuse_values(1))


def test_the_oldest_bindings_are_dropped(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MAX_BINDINGS", 2)
    fuse = fuse_session(bundle)
    bound: list[int] = []

    def run(count: int) -> None:
        def values() -> session.OrtValues:
            bound.append(count)
            return fuse_values(count)

        fuse.run(count, values)

    for count in (1, 2, 1, 3, 2, 1):
        run(count)
    assert bound == [1, 2, 3, 1]
    assert len(fuse._bindings) == 2
