"""Test the request that `eagle3 build --plan` makes from a preset and other options.

Nothing is built here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eagle3.cli import main
from eagle3.plans.tensorrt import plan_builder as tensorrt_build
from eagle3.plans.tensorrt.build_request import BuildRequest
from eagle3.runtime.bundle.folder import Bundle

_PLAN = """
device = "rtx-4090"
[plan]
backend = "tensorrt-rtx"
lowering = "portable"
max_seq_len = {max_seq_len}
prefill_chunk = 32
max_draft_tokens = 32
compute_capability = "8.9"
"""


def _build(bundle: Bundle, tmp_path: Path, *more: str, max_seq_len: int = 128) -> Any:
    file = tmp_path / "my.toml"
    file.write_text(_PLAN.format(max_seq_len=max_seq_len))
    return CliRunner().invoke(main, ["build", str(bundle.root), "--plan", str(file), *more])


def test_a_plan_and_what_overrides_it(
    windowed_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BuildRequest] = []

    def build(_: str, request: BuildRequest, **__: Any) -> list[Any]:
        asked.append(request)
        raise tensorrt_build.BuildError("not here")

    monkeypatch.setattr(tensorrt_build, "build_bundle", build)
    assert "error: not here" in _build(windowed_bundle, tmp_path).stderr
    _build(windowed_bundle, tmp_path, "--compute-capability", "12.0", "--verify-widths", "1,33")
    plan = BuildRequest("tensorrt-rtx", "8.9", 1, (), 32)
    assert asked == [plan, BuildRequest("tensorrt-rtx", "12.0", 1, (1, 33), 32)]


def test_a_plan_that_contradicts_the_bundle_is_refused(
    windowed_bundle: Bundle, tmp_path: Path
) -> None:
    result = _build(windowed_bundle, tmp_path, max_seq_len=256)
    assert result.exit_code == 1
    assert "the plan's max_seq_len is 256, but the bundle was exported with 128" in result.stderr
