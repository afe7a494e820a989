"""What an export leaves on disk: the whole new bundle, or everything as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.export.graphs.attention import KeyWindow
from eagle3.export.publish import publish
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import ExportError, SelfCheckFailed


def request_of(target: Path, output: Path, **options: Any) -> ExportRequest:
    fields: dict[str, Any] = {"drafts": (), "plan": tiny.tiny_plan(), **options}
    return ExportRequest(target=str(target), output=output, **fields)


def test_an_interrupted_export_leaves_everything_as_it_was(
    shallow_folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the engines are written: nothing new, no temporary folder, the old bundle."""
    output = tmp_path / "out"
    shutil.copytree(bundle.root, output)
    before = tiny.snapshot(tmp_path)

    def interrupt(_: Any, folder: Path) -> Any:
        assert (folder / "target.onnx.data").stat().st_size > 0
        assert folder.parent == tmp_path and folder != output
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3.export.exporter.write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(request_of(shallow_folder, output, force=True))
    assert tiny.snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_self_check_writes_nothing(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 22: a graph in which rows see their siblings."""
    honest = KeyWindow.bias

    def everything(self: KeyWindow, rule: Any, dtype: Any) -> Any:
        seen = self.key_positions <= self.query_positions
        return honest(KeyWindow(seen, self.key_positions, self.query_positions), rule, dtype)

    monkeypatch.setattr(KeyWindow, "bias", everything)
    with pytest.raises(SelfCheckFailed, match="tree_logits") as caught:
        export_bundle(request_of(shallow_folder, tmp_path / "out"))
    assert "tolerance" in str(caught.value) and not list(tmp_path.iterdir())


def test_force_replaces_a_bundle(shallow_folder: Path, bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.root, tmp_path / "out")
    new, _ = export_bundle(request_of(shallow_folder, tmp_path / "out", force=True))
    assert new.manifest.draft is None and bundle.manifest.draft is not None
    assert {p.name for p in new.root.iterdir()} == {*new.manifest.files, "manifest.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Path, Path]:
    """A new bundle that waits to be renamed to `out`, where an old one stands."""
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    return tmp_path / "new", tmp_path / "out"


def failing_renames(monkeypatch: pytest.MonkeyPatch, error: BaseException, *fails: bool) -> None:
    """Each rename fails or does not, in turn."""
    rename, turns = Path.rename, iter(fails)

    def failing(self: Path, to: Path) -> Path:
        if next(turns):
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)


@pytest.mark.parametrize("fails", [(True,), (False, True, False)])
@pytest.mark.parametrize(
    ("error", "raised"), [(OSError("full"), ExportError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_failed_rename_leaves_the_old_bundle(
    finished: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    fails: tuple[bool, ...],
    error: BaseException,
    raised: type[BaseException],
) -> None:
    before = tiny.snapshot(finished[1].parent)
    failing_renames(monkeypatch, error, *fails)
    with pytest.raises(raised):
        publish(*finished)
    assert tiny.snapshot(finished[1].parent) == before
    assert sorted(p.name for p in finished[1].parent.iterdir()) == ["new", "out"]


def test_an_old_bundle_that_cannot_be_moved_back_is_kept(
    finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_renames(monkeypatch, OSError("full"), False, True, True)
    with pytest.raises(ExportError, match=r"the old bundle is now (.*)") as caught:
        publish(*finished)
    kept = Path(str(caught.value).split("is now ")[1])
    assert (kept / "manifest.json").read_text() == "out"


def test_an_output_that_appears_during_the_export_is_kept(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(*_: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")

    monkeypatch.setattr("eagle3.export.exporter._write_engines", appear)
    monkeypatch.setattr("eagle3.export.exporter._finish", lambda *_: None)
    with pytest.raises(ExportError, match=r"thesis\.tex"):
        export_bundle(request_of(shallow_folder, tmp_path / "out", force=True))
    assert tiny.snapshot(tmp_path) == {"out/thesis.tex": b"years of work"}


def refuses_to_start(request: ExportRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def too_late(*_: Any, **__: Any) -> Any:
        raise AssertionError("the output is looked at before anything is loaded")

    monkeypatch.setattr("eagle3.export.exporter.load_target", too_late)
    with pytest.raises(ExportError) as caught:
        export_bundle(request)
    return str(caught.value)


def test_an_existing_output_needs_force(
    shallow_folder: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refuses_to_start(request_of(shallow_folder, bundle.root), monkeypatch)
    assert "--force" in message


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_needs_a_name(
    shallow_folder: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    request = request_of(shallow_folder, Path(output), force=True)
    assert "./bundle" in refuses_to_start(request, monkeypatch)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_bundle_is_never_replaced(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("text")
    before = tiny.snapshot(tmp_path)
    for name in ("home", "file"):
        request = request_of(shallow_folder, tmp_path / name, force=force)
        assert name in refuses_to_start(request, monkeypatch)
    inside = request_of(shallow_folder, tmp_path / "file" / "out")
    assert "file" in refuses_to_start(inside, monkeypatch)
    assert tiny.snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ('{"name": "a web app"}', "its manifest.json does not have the format 'eagle3-bundle'"),
        ("[1]", "its manifest.json does not have the format"),
        ("{", "no readable manifest.json"),
        ('{"format": "eagle3-bundle"}', "does not list app;"),
        ('{"format": "eagle3-bundle", "files": 3}', "does not list app;"),
    ],
)
def test_a_folder_with_another_manifest_is_never_replaced(
    shallow_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manifest: str,
    says: str,
) -> None:
    (tmp_path / "out" / "app").mkdir(parents=True)
    (tmp_path / "out" / "app" / "index.html").write_text("years of work")
    (tmp_path / "out" / "manifest.json").write_text(manifest)
    message = refuses_to_start(
        request_of(shallow_folder, tmp_path / "out", force=True), monkeypatch
    )
    assert says in message and "app" in message


def test_a_bundle_with_a_file_of_its_owner_is_never_replaced(
    shallow_folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bundle.root, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("what I measured")
    request = request_of(shallow_folder, tmp_path / "out", force=True)
    assert "does not list notes.txt;" in refuses_to_start(request, monkeypatch)


def test_a_parent_that_cannot_be_written_is_said_first(
    shallow_folder: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> str:
        raise PermissionError("read-only")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    request = request_of(shallow_folder, bundle.root, force=True)
    assert "cannot be written: read-only" in refuses_to_start(request, monkeypatch)


def test_a_draft_that_is_none_is_said_first(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for name, says in (("nowhere", "no such folder"), ("empty", "config.json not found")):
        request = request_of(
            shallow_folder, tmp_path / "out", drafts=(DraftSource(str(tmp_path / name)),)
        )
        assert says in refuses_to_start(request, monkeypatch)


def test_a_length_that_the_target_does_not_know_is_said_before_its_weights_are_read(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.export.targets.target.AutoModelForCausalLM", None)
    plan = tiny.tiny_plan(max_seq_len=513)
    with pytest.raises(ExportError, match=r"max_seq_len 513 .* max_position_embeddings 512"):
        export_bundle(request_of(shallow_folder, tmp_path / "out", plan=plan))
