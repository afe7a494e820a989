"""Test how `eagle3 export` turns its options into a request, and how it reports wrong options."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call, failed

from eagle3.export import add_draft as add
from eagle3.export import exporter as build
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.plans.plan import Plan
from eagle3.plans.tree_paths import STATIC_TREES, TreePaths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.registry import DRAFTERS
from eagle3.runtime.errors import ExportError


@pytest.fixture
def requests(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[build.ExportRequest]:
    """The requests that the exporter receives; a stand-in returns `bundle` for each of them."""
    asked: list[build.ExportRequest] = []

    def fake(request: build.ExportRequest, report: Any) -> Any:
        asked.append(request)
        return bundle, type("Check", (), {"warnings": []})

    monkeypatch.setattr(build, "export_bundle", fake)
    return asked


def test_export_options_become_a_request(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests: list[build.ExportRequest] = []

    def fake(request: build.ExportRequest, report: Any) -> Any:
        requests.append(request)
        report("working")
        return bundle, type("Check", (), {"warnings": ["it is near zero"]})

    monkeypatch.setattr(build, "export_bundle", fake)
    target = tmp_path / "models" / "my target"
    given = [
        *("export", "--target", target, "--draft", "org/head", "-o", tmp_path / "out"),
        *("--lowering", "portable", "--dtype", "float16", "--draft-weights", "int8"),
        *("--max-seq-len", "512", "--prefill-chunk", "32", "--max-draft-tokens", "16"),
        *("--draft-top-k", "4", "--draft-depth", "3", "--num-draft-tokens", "8"),
        *("--aux-layers", "2,15,27", "--trust-remote-code", "--force"),
    ]
    result = call(*given)
    assert result.exit_code == 0, result.output
    assert result.stderr == "working\n"
    assert str(bundle.root) in result.stdout and "warning: it is near zero" in result.stdout
    assert "first draft token accepted" in result.stdout
    request = requests[0]
    assert request.target == str(target) and request.drafts == (DraftSource("org/head"),)
    assert request.plan == Plan(
        512, 32, 16, TreePlan(4, 3, 8), "float16", "int8", "portable", "ort-cpu"
    )
    assert request.aux_layer_ids == (2, 15, 27)
    assert request.trust_remote_code and request.force
    # The recorded command can be run again, and contains no folder of this machine.
    assert str(tmp_path) not in request.command
    call(*shlex.split(request.command)[1:])
    assert requests[1].plan == request.plan
    assert requests[1].target == "my target" and requests[1].output == Path("out")
    assert requests[1].command == request.command


@pytest.mark.parametrize(
    ("flags", "backend", "lowering"),
    [
        (("--dtype", "bfloat16"), "ort-cuda", "portable"),
        (("--backend", "ort-cuda"), "ort-cuda", "portable"),
        (("--backend", "tensorrt", "--dtype", "bfloat16"), "tensorrt", "portable"),
        (("--dtype", "float16"), "ort-cpu", "ort"),
    ],
)
def test_what_follows_from_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], backend: str, lowering: str
) -> None:
    """GPU backends require the portable lowering, and bfloat16 requires a GPU backend."""
    asked: list[Any] = []

    def stop(request: Any, report: Any) -> Any:
        asked.append(request.plan)
        raise ExportError("enough")

    monkeypatch.setattr(build, "export_bundle", stop)
    assert call("export", "--target", "t", "-o", "o", "--draft", "none", *flags).exit_code == 1
    assert (asked[0].backend, asked[0].lowering) == (backend, lowering)


def test_export_defaults_are_the_plans(requests: list[build.ExportRequest]) -> None:
    assert call("export", "--target", "org/t", "--draft", "none", "-o", "out").exit_code == 0
    assert requests[0].plan == Plan() and requests[0].drafts == ()
    assert requests[0].command == "eagle3 export --target org/t --draft none --output out"


def test_several_drafts_keep_their_order_and_names(
    requests: list[build.ExportRequest], tmp_path: Path
) -> None:
    drafts = ("--draft", tmp_path / "head", "--draft", f"mine={tmp_path / 'lm.gguf'}")
    result = call("export", "--target", "org/t", *drafts, "-o", "out")
    assert result.exit_code == 0, result.output
    assert requests[0].drafts == (
        DraftSource(str(tmp_path / "head")),
        DraftSource(str(tmp_path / "lm.gguf"), "mine"),
    )
    assert requests[0].command.endswith("--draft head --draft mine=lm.gguf --output out")


def test_a_draft_is_added(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[add.AddRequest] = []

    def fake(request: add.AddRequest, report: Any) -> Any:
        requests.append(request)
        return bundle, type("Check", (), {"warnings": []})

    monkeypatch.setattr(add, "add_draft", fake)
    words = ("export", "--target", "org/t", "--add-draft", f"mine={tmp_path / 'lm'}", "-o", "out")
    result = call(*words, "--draft-weights", "int8", "--draft-top-k", "2")
    assert result.exit_code == 0, result.output
    assert str(bundle.root) in result.stdout
    command = "eagle3 export --target org/t --add-draft mine=lm --output out"
    assert requests == [
        add.AddRequest(
            target="org/t",
            draft=DraftSource(str(tmp_path / "lm"), "mine"),
            output=Path("out"),
            tree=TreePlan(2, 3, 3),
            draft_weights="int8",
            command=f"{command} --draft-weights int8 --draft-top-k 2",
        )
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give either --draft"),
        (["--draft", "a", "--add-draft", "b"], "give either --draft"),
        (["--draft", "a", "--draft", "none"], "--draft none cannot be combined"),
        (["--add-draft", "a", "--dtype", "float16"], "--dtype is set by the bundle"),
        (["--add-draft", "a", "--max-seq-len", "2048"], "--max-seq-len is set by the bundle"),
    ],
)
def test_drafts_that_are_wrong_usage(words: list[str], says: str) -> None:
    failed(call("export", "--target", "x", "-o", "y", *words), 2, says)


def test_a_name_that_no_draft_can_have() -> None:
    words = ("export", "--target", "x", "-o", "y", "--draft", "none=a")
    failed(call(*words), 1, "error: a drafter cannot be named 'none'")


def test_help_names_the_drafters() -> None:
    text = " ".join(call("run", "--help").stdout.split())
    assert all(name in text for name in DRAFTERS)


def test_export_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    result = call("export", "--target", "x", "--draft", "none", "-o", "y")
    failed(result, 1, "error: export needs torch", "pip install 'eagle3[export]'")


def test_a_tree_that_does_not_fit_the_plan() -> None:
    words = ("export", "--target", "x", "--draft", "none", "-o", "y")
    failed(call(*words, "--num-draft-tokens", "99"), 1, "max_draft_tokens is 64")


def test_export_for_real(llama_folder: Path, tmp_path: Path) -> None:
    words = ("export", "--target", llama_folder, "--draft", "none", "-o", tmp_path / "out")
    sizes = ("--max-seq-len", "64", "--prefill-chunk", "16", "--max-draft-tokens", "8")
    result = call(*words, *sizes)
    assert result.exit_code == 0, result.output
    assert "loading target" in result.stderr
    command = Bundle.open(tmp_path / "out").manifest.command
    assert command.startswith(f"eagle3 export --target {llama_folder.name} --draft none")
    again = call(*words, *sizes)
    failed(again, 1, "error: ", "exists", "--force")
    # A bundle without a draft has no features, but the lookup drafter does not need any.
    prompt = (tmp_path / "out", "t3 t4 t5 t3 t4", "--max-new-tokens", "30", "--threads", "1")
    compared = call("run", *prompt, "--drafter", "lookup", "--compare", "--json")
    assert compared.exit_code == 0, compared.output
    data = json.loads(compared.stdout)
    assert data["compare"]["token_equal"] and data["stats"]["drafter"] == "lookup"
    assert data["stats"]["proposed_by_position"]


def test_export_keeps_a_static_tree(requests: list[build.ExportRequest], tmp_path: Path) -> None:
    words = ("export", "--target", "t", "--draft", "h", "-o", "out", "--tree")
    file = tmp_path / "my tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    for more in (["eagle1"], ["eagle1", "--draft-depth", "3"], [file], ["dynamic"]):
        assert call(*words, *more).exit_code == 0
    small = TreePaths(((0,), (1,), (0, 0)))
    assert [each.plan.tree for each in requests] == [
        TreePlan(4, 5, 25, STATIC_TREES["eagle1"]),
        TreePlan(4, 3, 25, STATIC_TREES["eagle1"]),
        TreePlan(2, 2, 3, small),
        Plan().tree,
    ]
    assert requests[2].command.endswith("--tree 'my tree.json'")
    failed(call(*words, "medusa"), 1, "tree 'medusa' not found: use one of")


@pytest.mark.parametrize("words", [("--accept-quality",), ("--calibration", __file__)])
def test_options_of_int8_targets_need_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    place = tmp_path / "bundle"
    done = call("export", "--target", "x", "--draft", "none", "-o", place, *words)
    assert done.exit_code == 2
    assert f"{words[0]} applies to int8 targets only: add --weights int8" in done.output
