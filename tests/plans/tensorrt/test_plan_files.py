"""Tests of the plan files in a bundle: their JSON, and which are usable. TensorRT is not needed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.plans.tensorrt.build_request import BuildRequest, profiles
from eagle3.plans.tensorrt.plan_file_text import plan_files_json, plan_files_text
from eagle3.plans.tensorrt.plan_files import (
    LayerCounts,
    PlanFile,
    file_key,
    foreign_files,
    plan_files,
    read_note,
    rebuild_command,
    set_folder,
    usable_plan_files,
    write_note,
)
from eagle3.runtime.bundle.describe import describe, description_lines
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BuildError

LIBRARY, VERSION, CAPABILITY = "tensorrt-rtx", "1.7.1.116", "8.9"
REQUEST = BuildRequest(backend=LIBRARY, compute_capability=CAPABILITY)


def plan_file(bundle: Bundle, engine: str, **changes: Any) -> PlanFile:
    """Write a plan file of `engine` as a build would, with placeholder content."""
    name = bundle.manifest.engines[engine].file
    content = f"plan of {engine}".encode()
    made = PlanFile(
        path=set_folder(bundle.root, LIBRARY, CAPABILITY) / f"{engine}.plan",
        engine=engine,
        library=LIBRARY,
        library_version=VERSION,
        compute_capability=CAPABILITY,
        key="0" * 64,
        request=REQUEST,
        profiles=profiles(bundle.manifest, engine, REQUEST),
        aliases={"present_k.0": "past_k.0"},
        sources={name: bundle.manifest.files[name].sha256},
        counts=LayerCounts(cache_updates=2, attentions=1, fused_attentions=1),
        size=len(content),
        sha256="1" * 64,
        build_seconds=1.25,
    )
    made = replace(made, **changes)
    made.path.parent.mkdir(parents=True, exist_ok=True)
    made.path.write_bytes(content)
    write_note(made)
    return made


@pytest.fixture
def built(bundle: Bundle, tmp_path: Path) -> Bundle:
    """A copy of `bundle` with a plan file for each engine."""
    shutil.copytree(bundle.root, tmp_path / "bundle")
    copy = Bundle.open(tmp_path / "bundle")
    for engine in copy.manifest.engines:
        plan_file(copy, engine)
    return copy


def usable(bundle: Bundle, version: str = VERSION, capability: str = CAPABILITY) -> Any:
    return usable_plan_files(bundle, LIBRARY, version, capability)


def test_a_bundle_with_plan_files_opens_and_moves(built: Bundle, tmp_path: Path) -> None:
    moved = Bundle.open(shutil.move(built.root, tmp_path / "moved"))
    moved.verify_hashes()
    found = usable(moved)
    assert list(found) == list(moved.manifest.engines)
    for engine, each in found.items():
        assert each.path == tmp_path / f"moved/plans/tensorrt-rtx-sm89/{engine}.plan"
        assert each.path.read_bytes() == f"plan of {engine}".encode()


def test_json_round_trip(built: Bundle) -> None:
    written = plan_file(built, "target")
    assert read_note(written.note_path) == written
    assert [each.engine for each in plan_files(built.root)] == [
        "eagle3.draft",
        "eagle3.draft_fuse",
        "eagle3.draft_tree",
        "target",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"sources": {"target.onnx": "2" * 64}},
            r"is stale: it was built from another target.onnx",
        ),
        ({"library_version": "1.6.0.1"}, r"was built by tensorrt-rtx 1.6.0.1"),
        ({"size": 999}, r"has 14 bytes, expected 999 from target.json"),
        (
            {"request": replace(REQUEST, batch=4)},
            r"was built for other sizes than the other plan files",
        ),
    ],
    ids=["stale", "version", "size", "sizes"],
)
def test_what_may_not_be_used_is_refused_with_the_command(
    built: Bundle, changes: dict[str, Any], reason: str
) -> None:
    changed = plan_file(built, "target", **changes)
    command = f"eagle3 build {built.root} --backend tensorrt-rtx --compute-capability 8.9"
    with pytest.raises(BuildError, match=rf"{changed.path} {reason}.*run `{command}`"):
        usable(built)


def test_one_for_another_gpu_is_refused_with_the_command(built: Bundle) -> None:
    with pytest.raises(
        BuildError,
        match=r"no plan files of target, eagle3.draft_fuse, eagle3.draft, eagle3.draft_tree for"
        r" tensorrt-rtx 1.7.1.116 on a GPU of"
        r" compute capability 8.6 \(it has plan files for tensorrt-rtx on compute capability 8.9\):"
        r" run `eagle3 build"
        rf" {built.root} --backend tensorrt-rtx --compute-capability 8.6`",
    ):
        usable(built, capability="8.6")


def test_one_that_is_missing_is_named(built: Bundle) -> None:
    (set_folder(built.root, LIBRARY, CAPABILITY) / "eagle3.draft.json").unlink()
    with pytest.raises(BuildError, match=r"has no plan files of eagle3.draft for"):
        usable(built)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, r"version 2, expected 'eagle3-plan-file' version 1"),
        ({"format": "x"}, r"has format 'x' version 1, expected"),
        ({"counts": {"attentions": 1}}, r"cannot be read \(TypeError"),
        ({"unknown": 1}, r"cannot be read \(TypeError"),
        ({"profiles": 3}, r"cannot be read \(TypeError"),
    ],
)
def test_a_json_that_is_not_understood_is_refused(
    built: Bundle, change: dict[str, Any], message: str
) -> None:
    path = plan_file(built, "target").note_path
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BuildError, match=rf"target.json .*{message}.*eagle3 build"):
        plan_files(built.root)


def test_the_key_is_of_everything_that_shapes_a_file(bundle: Bundle) -> None:
    shapes = profiles(bundle.manifest, "target", REQUEST)
    other = profiles(bundle.manifest, "target", replace(REQUEST, batch=2))
    sources, library = {"target.onnx": "a"}, (LIBRARY, VERSION)
    keys = [
        file_key(sources, shapes, None, library, "8.9"),
        file_key({"target.onnx": "b"}, shapes, None, library, "8.9"),
        file_key({**sources, "target.onnx.data": "c"}, shapes, None, library, "8.9"),
        file_key(sources, other, None, library, "8.9"),
        file_key(sources, shapes, 1 << 30, library, "8.9"),
        file_key(sources, shapes, None, ("tensorrt", VERSION), "8.9"),
        file_key(sources, shapes, None, (LIBRARY, "1.8"), "8.9"),
        file_key(sources, shapes, None, library, "8.6"),
    ]
    assert len(set(keys)) == len(keys)
    assert file_key(dict(sources), shapes, None, library, "8.9") == keys[0]


def test_the_command_repeats_what_was_asked(bundle: Bundle) -> None:
    """Options that equal the bundle's plan, here the prefill_chunk of 16, are left out."""
    asked = {"batch": 2, "verify_widths": (1, 8, 65), "workspace_bytes": 1 << 20}
    request = BuildRequest(prefill_chunk=16, **asked)
    spaced = replace(bundle, root=Path("/my bundle"))
    assert rebuild_command(spaced, request, "tensorrt", "8.7") == (
        "eagle3 build '/my bundle' --backend tensorrt --compute-capability 8.7 --batch 2"
        " --verify-widths 1,8,65 --workspace-bytes 1048576"
    )


def test_what_no_build_wrote_is_seen(built: Bundle) -> None:
    folder = built.root / "plans"
    assert foreign_files(folder) == []
    (folder / "tensorrt-rtx-sm89" / "notes.txt").write_text("mine")
    assert foreign_files(folder) == ["tensorrt-rtx-sm89/notes.txt"]


def test_inspect_shows_them(built: Bundle) -> None:
    plan_file(built, "eagle3.draft", sources={"eagle3.draft.onnx": "2" * 64})
    lines = [
        line
        for line in description_lines(built, plan_files_text(built))
        if line.startswith("plan file")
    ]
    assert len(lines) == 4
    assert (
        "target: 14 bytes for compute capability 8.9 (tensorrt-rtx 1.7.1.116, built in 1.2 s);"
        " verify 1-33 rows, prefill 1-16 rows; 2 cache updates in place, 1 of 1 attention layers"
        " fused"
    ) in lines[3]
    assert "STALE, built from another eagle3.draft.onnx: build it again" in lines[0]
    files = json.loads(json.dumps(describe(built, plan_files_json(built))))["plan_files"]
    assert [each["stale"] for each in files] == [True, False, False, False]
    assert files[3]["path"].endswith("target.plan") and files[3]["aliases"]
