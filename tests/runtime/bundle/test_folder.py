"""Bundle folders: a good one opens and round-trips; every kind of damage is refused by name."""

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle import folder as bundle_module
from eagle3.runtime.bundle.folder import Bundle, describe_files, write_manifest
from eagle3.runtime.bundle.manifest import (
    Convention,
    DraftInfo,
    EngineInfo,
    FileInfo,
    GenerationDefaults,
    Manifest,
    TargetInfo,
    TensorSpec,
    TokenizerInfo,
)
from eagle3.runtime.errors import BundleError


def npy(ids: Any) -> bytes:
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, np.asarray(ids), allow_pickle=True)
    return file.getvalue()


CONTENTS = {
    "target.onnx": b"graph",
    "eagle3.draft.onnx": b"graph",
    "eagle3.draft_fuse.onnx": b"graph",
    "eagle3.target_ids.npy": npy(np.arange(0, 64, 2)),
    "weights/target.bin": b"\x00\x01" * 50,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"",
}


def make_manifest(files: dict[str, FileInfo]) -> Manifest:
    ids = TensorSpec("input_ids", "int64", ("B", "N"))
    logits = TensorSpec("logits", "float32", ("B", "M", 64))
    return Manifest(
        created_by={"eagle3": "0.1.0"},
        command="eagle3 export --target x",
        plan=Plan(tree=TreePlan(4, 3, 8)),
        target=TargetInfo("LlamaForCausalLM", 64, 16, 8, 2, 8, 512, (2, 4, 5), 48, "random"),
        drafts={
            "eagle3": DraftInfo(
                method="eagle3",
                dialect="official",
                source="head",
                hidden_size=16,
                num_layers=1,
                num_kv_heads=2,
                head_dim=8,
                draft_vocab_size=32,
                aux_layer_ids=(2, 4, 5),
                weights="int8",
                tree=TreePlan(2, 2, 3),
                conventions={"norm_before_residual": Convention(False, "dialect default")},
                checks={"first_acceptance": 0.5},
                command="eagle3 export --draft head",
            )
        },
        engines={
            name: EngineInfo(f"{name}.onnx", (ids,), (logits,))
            for name in ("target", "eagle3.draft_fuse", "eagle3.draft")
        },
        files=files,
        tokenizer=TokenizerInfo(
            "tokenizer.json", "chat_template.jinja", (2, 3), None, {"eos_token": "</s>"}
        ),
        generation=GenerationDefaults(eos_token_ids=(2,), temperature=0.7),
        self_check={"max_error": 1e-4, "notes": [None, True]},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "bundle"
    for name, content in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    write_manifest(root, make_manifest(describe_files(root)))
    return root


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Another content of a file that the manifest then describes."""
    (folder / name).write_bytes(content)
    info = vars(describe_files(folder)[name])
    edit(folder, lambda data: data["files"].update({name: info}))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply `change` to the manifest's JSON in place."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def set_field(dotted: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = dotted.split("/")

    def change(data: Any) -> None:
        for key in parents:
            data = data[int(key)] if isinstance(data, list) else data[key]
        data[last] = value

    return change


def test_a_bundle_opens_as_it_was_written(folder: Path) -> None:
    bundle = Bundle.open(str(folder))
    assert bundle.manifest == make_manifest(describe_files(folder))
    assert bundle.path("weights/target.bin").read_bytes() == CONTENTS["weights/target.bin"]
    bundle.verify_hashes()
    assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest


def test_a_bundle_without_draft_or_template(folder: Path) -> None:
    manifest = Bundle.open(folder).manifest
    plain = replace(manifest, drafts={}, tokenizer=replace(manifest.tokenizer, chat_template=None))
    write_manifest(folder, plain)
    assert Bundle.open(folder).manifest == plain


def test_a_bundle_moves(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "else where")
    (tmp_path / "link").symlink_to(moved)
    assert Bundle.open(tmp_path / "link").root == moved
    Bundle.open(tmp_path / "link").verify_hashes()


def test_describe_files(folder: Path) -> None:
    (folder / "manifest.json.partial").touch()
    files = describe_files(folder)
    assert list(files) == sorted(CONTENTS)
    content = CONTENTS["weights/target.bin"]
    assert files["weights/target.bin"] == FileInfo(100, hashlib.sha256(content).hexdigest())


def test_describe_files_drops_nothing_in_silence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (folder / "linked").symlink_to(tmp_path / "shared")
    with pytest.raises(BundleError, match="linked links to .*outside the bundle"):
        describe_files(folder)


def test_unknown_file_name(folder: Path) -> None:
    with pytest.raises(BundleError, match="no file 'x.onnx'; it has"):
        Bundle.open(folder).path("x.onnx")


def test_what_is_no_bundle_says_so(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="gone does not exist: create a bundle with"):
        Bundle.open(tmp_path / "gone")
    with pytest.raises(BundleError, match="is not a bundle: manifest.json not found; create"):
        Bundle.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="file is a file, but a bundle is a folder"):
        Bundle.open(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"format": "eagle3-bundle"', "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[]", r"manifest is \[\], not a JSON object"),
        (b"{}", "format is None, not 'eagle3-bundle'"),
        (b'{"format": "other"}', "format is 'other', not 'eagle3-bundle'"),
        (b'{"format": "eagle3-bundle"}', "schema_version None, this eagle3 reads 2"),
        (b'{"format": "eagle3-bundle", "schema_version": true}', "schema_version True"),
        (b'{"format": "eagle3-bundle", "schema_version": 1, "x": 0}', "version 1, .* reads 2: ins"),
        (b'{"format": "eagle3-bundle", "schema_version": 3, "x": 0}', "version 3, .* reads 2: ins"),
    ],
)
def test_a_manifest_that_is_none(folder: Path, text: bytes, message: str) -> None:
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(BundleError, match=f"manifest.json: .*{message}"):
        Bundle.open(folder)


def test_a_huge_manifest_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (folder / "manifest.json").stat().st_size
    monkeypatch.setattr(bundle_module, "MAX_MANIFEST_BYTES", size)
    Bundle.open(folder)
    monkeypatch.setattr(bundle_module, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(BundleError, match=f"has {size} bytes, more than the limit of {size - 1}"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("surprise", 1, "surprise is not a field"),
        ("target/surprise", 1, "target.surprise is not a field"),
        ("target", None, "target is None, not a JSON object"),
        ("target/vocab_size", "64", "target.vocab_size is '64', not an integer"),
        ("target/vocab_size", 64.0, "target.vocab_size is 64.0, not an integer"),
        ("target/vocab_size", True, "target.vocab_size is True, not an integer"),
        ("target/vocab_size", 0, "target.vocab_size is 0, not at least 1"),
        ("target/aux_layer_ids", 2, "target.aux_layer_ids is 2, not a list"),
        ("target/aux_layer_ids", [2, -1], r"target.aux_layer_ids\[1\] is -1, not at least 0"),
        ("target/aux_layer_ids", [2, 9], r"hidden_states \[9\], but num_layers is 8"),
        ("target/source", "", "target.source is '', not a text of one or more"),
        ("target/feature_size", 47, "feature_size is 47, but 3 aux_layer_ids of .* 16 make 48"),
        ("target/hidden_size", 1, "feature_size is 48, but 3 aux_layer_ids of .* 1 make 3"),
        ("target/aux_layer_ids", [2, 4], "feature_size is 48, but 2 aux_layer_ids of .* make 32"),
        ("drafts/eagle3/method", "medusa", "eagle3.method is 'medusa', this eagle3 knows eagle3"),
        ("drafts/eagle3/method", "none", "drafts.eagle3.method is 'none'"),
        ("drafts/eagle3/method", "eagle", "reads 48 features, but a draft of method eagle .* 16"),
        ("drafts/eagle3/method", "model", r"aux_layer_ids is \[2, 4, 5\], but its method is model"),
        ("drafts/eagle3/aux_layer_ids", [2, 3], r"is \[2, 3\], but .* outputs .*\[2, 4, 5\]"),
        ("drafts/eagle3/aux_layer_ids", [], r"aux_layer_ids is \[\], but its method is eagle3"),
        ("drafts/eagle3/weights", "int3", "weights is 'int3', not one of same, int8"),
        ("drafts/eagle3/tree", {}, r"drafts.eagle3.tree: tree is missing the fields"),
        ("drafts/eagle3/tree/num_draft_tokens", 99, "eagle3.tree: .* max_draft_tokens is 64"),
        ("drafts/none", None, "drafts.none is None, not a JSON object"),
        ("generation/eos_token_ids", [2, 64], r"generation.eos_token_ids has \[64\], .* 64"),
        ("tokenizer/eos_token_ids", [99], r"tokenizer.eos_token_ids has \[99\], .* is 64"),
        ("drafts", [], r"drafts is \[\], not a JSON object"),
        ("drafts/eagle3/draft_vocab_size", 65, "is 65, more than target.vocab_size 64"),
        ("drafts/eagle3/conventions/x", 3, "eagle3.conventions.x is 3, not a JSON object"),
        ("drafts/eagle3/conventions/x", {"value": 3}, "eagle3.conventions.x.source is missing"),
        ("engines", [], r"engines is \[\], not a JSON object"),
        ("engines/target/inputs/0/dtype", "f32", r"engines.target.inputs\[0\].dtype is 'f32'"),
        ("engines/target/inputs/0/shape", ["B", None], r"inputs\[0\].shape\[1\] is None, not"),
        ("engines/target/inputs/0/shape", [-1], r"inputs\[0\].shape\[0\] is -1, not at least 0"),
        ("engines/target/inputs/0/shape", [""], r"inputs\[0\].shape\[0\] is ''"),
        ("engines/target/file", "else.onnx", "engines.target.file is 'else.onnx', which `files`"),
        ("tokenizer/file", "t.json", "tokenizer.file is 't.json', which `files` does not list"),
        ("tokenizer/chat_template", "t", "tokenizer.chat_template is 't', which `files`"),
        ("tokenizer/special_tokens", {"bos_token": 1}, "special_tokens.bos_token is 1, not a text"),
        ("tokenizer/bos_token_id", -1, "tokenizer.bos_token_id is -1, not at least 0"),
        ("generation/temperature", "hot", "generation.temperature is 'hot', not a finite number"),
        ("generation/temperature", False, "generation.temperature is False, not a finite number"),
        ("files/tokenizer.json/sha256", "00", "sha256 is '00', not 64 lower-case hex digits"),
        ("files/tokenizer.json/size", -1, "size is -1, not at least 0"),
        ("plan/max_seq_len", 0, "plan: max_seq_len must be from 2 to .*, got 0"),
        ("plan/tree/top_k", 0, r"plan: tree has unknown fields \['top_k'\]"),
        ("created_by", {"torch": 2.13}, "created_by.torch is 2.13, not a text"),
    ],
)
def test_a_wrong_field_is_named(folder: Path, field: str, value: Any, message: str) -> None:
    edit(folder, set_field(field, value))
    with pytest.raises(BundleError, match=f"manifest.json: .*{message}"):
        Bundle.open(folder)


def all_fields(data: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of the fields that are a dataclass's, not the keys of a free dict."""
    free = ("conventions", "checks", "created_by", "drafts", "engines", "files", "special_tokens")
    paths = []
    for key, value in data.items():
        paths.append((*above, key))
        if isinstance(value, dict) and key not in (*free, "self_check"):
            paths += all_fields(value, (*above, key))
        if key == "drafts":
            paths += all_fields(value["eagle3"], (*above, key, "eagle3"))
    return paths


def test_every_missing_field_is_named(folder: Path) -> None:
    data = Bundle.open(folder).manifest.to_json()
    paths = [path for path in all_fields(data) if path[-1] not in ("format", "schema_version")]
    assert len(paths) > 40
    for path in paths:
        copy = json.loads(json.dumps(data))
        parent = copy
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        with pytest.raises(BundleError, match=path[-1]):
            Manifest.from_json(copy)


def test_a_truncated_file_names_both_sizes(folder: Path) -> None:
    os.truncate(folder / "weights/target.bin", 99)
    with pytest.raises(BundleError, match="target.bin is truncated: it has 99 bytes, .* 100"):
        Bundle.open(folder)


def test_a_longer_file_is_altered(folder: Path) -> None:
    (folder / "target.onnx").write_bytes(b"graph and more")
    with pytest.raises(BundleError, match="target.onnx is altered: it has 14 bytes, .* 5"):
        Bundle.open(folder)


def test_a_missing_file(folder: Path) -> None:
    (folder / "target.onnx").unlink()
    with pytest.raises(BundleError, match="target.onnx is missing: copy the bundle"):
        Bundle.open(folder)


def test_an_altered_file_of_the_same_size_is_found_by_hash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = "target.onnx is not the exported file: its SHA-256"
    (folder / "target.onnx").write_bytes(b"Graph")
    with pytest.raises(BundleError, match=altered):
        Bundle.open(folder)
    monkeypatch.setattr(bundle_module, "MAX_SMALL_BYTES", 4)
    bundle = Bundle.open(folder)  # too large to be read whenever a bundle is opened
    with pytest.raises(BundleError, match=altered):
        bundle.verify_hashes()


def test_target_ids(folder: Path) -> None:
    ids = Bundle.open(folder).target_ids("eagle3")
    assert ids.dtype == np.int64 and np.array_equal(ids, np.arange(0, 64, 2))
    rewrite(folder, "eagle3.target_ids.npy", npy(np.arange(63, 31, -1)))
    assert np.array_equal(Bundle.open(folder).target_ids("eagle3"), np.arange(63, 31, -1))


HUGE = npy(np.arange(32)).replace(b"(32,), }" + b" " * 13, b"(1000000000000,), }  ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a .npy file of integers"),
        (b"x" * 400, "is not a .npy file of integers"),
        (npy(np.arange(32))[:-8], "is not a .npy file of integers"),
        (HUGE, "is not a .npy file of integers"),
        (npy(np.array([{}] * 32, object)), "is not a .npy file of integers"),
        (npy(np.arange(32.0)), r"holds float64 \[32\], .* requires int64 \[32\]"),
        (npy(np.arange(32, dtype=np.int32)), r"holds int32 \[32\]"),
        (npy(np.arange(32).reshape(1, 32)), r"holds int64 \[1, 32\]"),
        (npy(np.arange(31)), r"holds int64 \[31\], .* int64 \[32\]"),
        (npy(np.array(3)), r"holds int64 \[\]"),
        (npy(np.arange(32) - 1), "holds ids from -1 to 30"),
        (npy(np.arange(32) + 33), "holds ids from 33 to 64, .* below target.vocab_size 64"),
        (npy(np.arange(32) // 2), "holds .* 16 distinct of 32"),
    ],
)
def test_target_ids_that_are_none(folder: Path, content: bytes, message: str) -> None:
    assert b"1000000000000" in HUGE
    rewrite(folder, "eagle3.target_ids.npy", content)
    with pytest.raises(BundleError, match=f"target_ids.npy {message}"):
        Bundle.open(folder)


def test_a_template_that_is_not_utf8(folder: Path) -> None:
    assert Bundle.open(folder).chat_template() == ""
    rewrite(folder, "chat_template.jinja", b"\xff\xfe")
    with pytest.raises(BundleError, match="chat_template.jinja cannot be read as UTF-8"):
        Bundle.open(folder)


def test_weights_beside_an_engine_are_listed(folder: Path) -> None:
    (folder / "notes.data").touch()
    Bundle.open(folder)
    (folder / "eagle3.draft.onnx.data").write_bytes(b"weights")
    with pytest.raises(BundleError, match="eagle3.draft.onnx.data is not listed in `files`"):
        Bundle.open(folder)
    rewrite(folder, "eagle3.draft.onnx.data", b"weights")
    Bundle.open(folder)


@pytest.mark.parametrize("name", ["target", "eagle3.draft", "eagle3.draft_fuse"])
def test_an_engine_that_is_needed(folder: Path, name: str) -> None:
    edit(folder, lambda data: data["engines"].pop(name))
    with pytest.raises(BundleError, match=rf"engines has .* and lacks \['{name}'\]"):
        Bundle.open(folder)


def test_a_draft_needs_its_ids(folder: Path) -> None:
    edit(folder, lambda data: data["files"].pop("eagle3.target_ids.npy"))
    with pytest.raises(BundleError, match="'eagle3.target_ids.npy', which `files` does not list"):
        Bundle.open(folder)
    edit(folder, set_field("drafts", {}))
    Bundle.open(folder)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "a/../../secret", "./target.onnx", "a//b", "", ".", "..", "a/.."]
    + ["C:\\secret", "C:secret", "..\\secret", "a\0b", "target.onnx/"],
)
def test_a_path_that_is_not_plainly_inside(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes(b"graph")
    edit(folder, lambda data: data["files"].update({name: data["files"]["target.onnx"]}))
    with pytest.raises(BundleError, match="must be a path inside the bundle"):
        Bundle.open(folder)


def test_a_name_the_file_system_cannot_have(folder: Path) -> None:
    edit(folder, lambda data: data["files"].update({"\ud800": data["files"]["target.onnx"]}))
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle.open(folder)


def test_links(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes(CONTENTS["target.onnx"])
    graph = folder / "target.onnx"
    graph.rename(folder / "weights" / "graph")
    graph.symlink_to("weights/graph")
    Bundle.open(folder).verify_hashes()  # a link within the bundle is a file of it
    graph.unlink()
    graph.symlink_to(outside)
    with pytest.raises(BundleError, match="target.onnx links to .*outside the bundle"):
        Bundle.open(folder)
    graph.unlink()
    graph.symlink_to("target.onnx")
    with pytest.raises(BundleError, match=r"target.onnx cannot be read"):
        Bundle.open(folder)


def test_a_linked_folder_that_leads_outside(folder: Path) -> None:
    (folder / "weights").rename(folder.parent / "weights")
    (folder / "weights").symlink_to(folder.parent / "weights")
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["target.onnx", "manifest.json"])
def test_a_pipe_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(BundleError, match=f"{name} is not a regular file"):
        Bundle.open(folder)


def test_a_folder_is_no_file(folder: Path) -> None:
    (folder / "target.onnx").unlink()
    (folder / "target.onnx").mkdir()
    with pytest.raises(BundleError, match="target.onnx is not a regular file"):
        Bundle.open(folder)


def test_the_manifest_does_not_list_itself(folder: Path) -> None:
    edit(folder, lambda d: d["files"].update({"manifest.json": d["files"]["target.onnx"]}))
    with pytest.raises(BundleError, match="lists itself"):
        Bundle.open(folder)


def test_write_manifest_refuses_what_would_not_open(folder: Path) -> None:
    manifest = Bundle.open(folder).manifest
    (folder / "manifest.json").unlink()
    target = replace(manifest.target, vocab_size=0)
    with pytest.raises(BundleError, match="target.vocab_size is 0"):
        write_manifest(folder, replace(manifest, target=target))
    for value in (float("nan"), Path("x")):
        with pytest.raises(BundleError, match="a value that JSON cannot represent"):
            write_manifest(folder, replace(manifest, self_check={"max_error": value}))
    assert not (folder / "manifest.json").exists()
