"""Test `eagle3 export --plan`: presets, and options that override them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eagle3 import cli
from eagle3.export import exporter as build
from eagle3.export.commands import export_command as commands
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.plans.commands.build_command import why_not_here
from eagle3.plans.plan import Plan
from eagle3.plans.preset import load_preset
from eagle3.plans.tensorrt import plan_file_text
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle import describe
from eagle3.runtime.errors import PlanError


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words))


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[ExportRequest]:
    """The requests that `eagle3 export` makes. Nothing is exported or built."""
    requests: list[ExportRequest] = []

    def fake(request: ExportRequest, report: Any) -> Any:
        requests.append(request)
        bundle = SimpleNamespace(manifest=SimpleNamespace(plan=request.plan), root=request.output)
        return bundle, SimpleNamespace(warnings=[])

    monkeypatch.setattr(build, "export_bundle", fake)
    monkeypatch.setattr(describe, "export_lines", lambda _: [])
    monkeypatch.setattr(commands, "build_exported", lambda root: [f"built {root}"])
    monkeypatch.setattr(plan_file_text, "plan_file_lines", lambda files: files)
    monkeypatch.setattr(commands, "why_not_here", lambda plan: None)
    return requests


EXPORT = ("export", "--target", "org/t", "--draft", "none", "-o", "out")


def test_export_takes_a_preset(exported: list[ExportRequest]) -> None:
    result = call(*EXPORT, "--plan", "jetson-thor")
    assert result.exit_code == 0 and "built out" in result.stdout
    assert exported[0].plan == load_preset("jetson-thor").plan


def test_plan_files_that_cannot_be_built_here_are_said_before_the_export(
    exported: list[ExportRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual way is to export on a workstation and to build on the device."""
    said: list[int] = []

    def no_library(plan: Plan) -> str:
        said.append(len(exported))
        return f"no library for {plan.backend}"

    monkeypatch.setattr(commands, "why_not_here", no_library)
    result = call(*EXPORT, "--plan", "jetson-thor")
    assert result.exit_code == 0 and said == [0]
    assert "no plan files will be built on this machine: no library for tensorrt" in result.stderr
    assert "no plan files yet: run `eagle3 build out`" in result.stdout
    assert "built out" not in result.stdout


def test_a_machine_without_what_a_plan_needs_says_why() -> None:
    """`tensorrt` is not installed here, and TensorRT-RTX does not support this old GPU."""
    assert "tensorrt" in str(why_not_here(load_preset("h200").plan))
    unknown = Plan(backend="tensorrt-rtx", lowering="portable", compute_capability="5.0")
    assert why_not_here(unknown) is not None


def test_options_override_a_preset_even_with_their_defaults(
    exported: list[ExportRequest],
) -> None:
    words = (*EXPORT, "--plan", "l4", "--dtype", "float32", "--draft-depth", "3")
    assert call(*words, "--max-seq-len", "1024").exit_code == 0
    preset = load_preset("l4").plan
    plan = exported[0].plan
    assert (plan.dtype, plan.max_seq_len) == ("float32", 1024)
    assert plan.tree == TreePlan(preset.tree.draft_top_k, 3, preset.tree.num_draft_tokens)
    assert (plan.backend, plan.verify_widths) == (preset.backend, preset.verify_widths)
    assert call(*exported[0].command.split()[1:]).exit_code == 0  # the same request again
    assert exported[1].plan == plan


def test_an_option_that_contradicts_a_preset_is_refused() -> None:
    refused(call(*EXPORT, "--plan", "l4", "--lowering", "ort"), "lowering ort", "tensorrt")
    refused(
        call(*EXPORT, "--plan", "cpu", "--dtype", "bfloat16"),
        "dtype bfloat16 is not supported by backend ort-cpu",
    )


def test_what_nothing_builds_is_refused_before_any_work() -> None:
    plan = Plan(batch=2, draft_weights="int8")
    with pytest.raises(PlanError, match="batch is 2, but every backend drafts for one"):
        export_bundle(ExportRequest("no/target", (), Path("out"), plan))
