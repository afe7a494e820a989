"""bench/gpu_check.py: what it measures, on the stand-in; and that it is content without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_on_host import COMPILER, compile_for_host
from numpy_kernels import NumpyKernels
from on_device import OnDevice
from stand_in import Memory, RuleBroken, StandInDriver

from eagle3.runtime.gpu.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "bench" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(SCRIPT.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_succeeds(script: Any) -> None:
    if script.find_gpu() is None:
        pytest.skip("a GPU is here: run bench/gpu_check.py itself")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "no/such/bundle"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no GPU here (")


def test_what_it_finds_on_the_stand_in(script: Any, device: OnDevice) -> None:
    engine, prompts = device.engine, ["t5 t6 t7", "t9"]
    row = script.Row("portable", "tensorrt")
    options = {"max_new_tokens": 12}
    row.equality = [script.check(engine, prompts, rule, options) for rule in script.RULES]
    for each in row.equality:
        assert (each.equal, each.texts, each.margins) == (2, 2, [])
        assert 0 <= each.noise < 1e-4
    script.measure(engine, prompts, row, options)
    row.draft_half_ms = engine.device.half_ms(None)
    row.target_half_ms = {w: engine.device.half_ms(w, 2) for w in engine.device.widths}
    assert row.acceptance_length >= 1 and row.round_ms > 0
    assert 1 < row.replays <= 2 and 1 < row.waits < 2
    text = "\n".join(script.lines(row))
    assert "greedy: 2/2 texts equal, margins of divergences: none" in text
    again = engine.generate("t5 t6", max_new_tokens=9, drafter="eagle3").token_ids
    assert again == engine.generate("t5 t6", max_new_tokens=9, drafter="none").token_ids


@pytest.mark.parametrize("compiled", [False, True])
def test_random_rounds_without_a_model(script: Any, tmp_path: Path, compiled: bool) -> None:
    """The check that a GPU gets first; here of the numpy kernels and of the CUDA source."""
    from gpu_kernels import KernelCheck

    if compiled and COMPILER is None:
        pytest.skip("needs a C++ compiler")
    kernels = (lambda _: compile_for_host(tmp_path)) if compiled else None
    check = KernelCheck(StandInDriver(kernels=kernels), b"")
    assert check.run(12 if compiled else 60) > 12


@pytest.mark.parametrize("name", KERNELS[:3] + ("feed_draft", "advance"))
def test_it_finds_a_kernel_that_does_nothing(script: Any, name: str) -> None:
    from gpu_kernels import KernelCheck

    def without(memory: Memory) -> dict[str, Any]:
        own = NumpyKernels(memory)
        found = {each: getattr(own, each, None) for each in KERNELS}
        return {**found, name: lambda *_: None}

    with pytest.raises((AssertionError, RuleBroken, IndexError)):
        KernelCheck(StandInDriver(kernels=without), b"").run(20)


@pytest.mark.parametrize(
    ("one", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)]
)
def test_first_difference(script: Any, one: list[int], other: list[int], at: int | None) -> None:
    assert script.first_difference(one, other) == at
