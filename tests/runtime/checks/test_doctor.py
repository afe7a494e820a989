"""Test `doctor` on simulated machines with missing packages, drivers or GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.runtime.checks import doctor
from eagle3.runtime.errors import EngineMissing
from eagle3.runtime.ort import ort_library


def pretend(monkeypatch: pytest.MonkeyPatch, packages: set[str], gpu: str | None = None) -> None:
    """Simulate a machine on which only `packages` are installed and nvidia-smi prints `gpu`."""
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0" if name in packages else None)
    monkeypatch.setattr(doctor, "nvidia_smi", lambda: gpu)

    def import_onnxruntime() -> Any:
        if not packages & {"onnxruntime", "onnxruntime-gpu"}:
            raise EngineMissing("no engine package is installed: pip install 'eagle3[cpu]'")
        return SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])

    monkeypatch.setattr(ort_library, "import_onnxruntime", import_onnxruntime)


def advice(found: doctor.Diagnosis, name: str) -> str:
    return next(each.advice or "" for each in found.findings if each.name == name)


def test_this_machine_can_run_and_export() -> None:
    found = doctor.diagnose()
    assert found.can_run and found.can_export
    assert found.lines()[-1] == "this machine can run bundles and export"


def test_without_an_engine_package_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"numpy"})
    found = doctor.diagnose()
    assert not found.can_run and not found.can_export
    assert "eagle3[cpu]" in advice(found, "onnxruntime")
    assert "eagle3[export]" in advice(found, "export")
    assert "neither" in found.conclusion


def test_a_runtime_only_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"numpy", "onnxruntime"})
    found = doctor.diagnose()
    assert found.can_run and not found.can_export
    assert found.conclusion == "this machine can run bundles"


def test_both_onnxruntimes_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"onnxruntime", "onnxruntime-gpu"})
    assert "overwrite each other" in advice(doctor.diagnose(), "onnxruntime")


def test_an_unused_gpu_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"onnxruntime"}, gpu="NVIDIA H200, 143771 MiB, 570.1")
    monkeypatch.setattr(doctor, "cuda_driver", lambda: ("NVIDIA driver for CUDA 13.0, 1 GPU", True))
    found = doctor.diagnose()
    assert "eagle3[tensorrt]" in advice(found, "device cuda")
    assert any("H200" in line for line in found.lines())


def test_a_tensorrt_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"onnxruntime", "tensorrt"})
    assert any("tensorrt 1.0" in line for line in doctor.diagnose().lines())


def test_json_has_the_findings() -> None:
    data = doctor.diagnose().to_json()
    assert {each["name"] for each in data["findings"]} >= {"python", "onnxruntime", "gpu", "cores"}


GPU_PACKAGES = {"onnxruntime", "tensorrt", "cuda-bindings", "nvidia-cuda-nvrtc"}


@pytest.mark.parametrize(
    ("packages", "driver", "says", "advised"),
    [
        (GPU_PACKAGES, True, "yes: a driver; installed: tensorrt 1.0, cuda-bindings 1.0", ""),
        (GPU_PACKAGES, False, "no: a driver; installed: tensorrt 1.0", ""),
        (GPU_PACKAGES - {"nvidia-cuda-nvrtc"}, True, "missing: NVRTC", "NVRTC: pip install"),
        (
            {"onnxruntime-gpu", "cuda-bindings", "nvidia-cuda-nvrtc"},
            True,
            "yes: a driver; installed: onnxruntime-gpu 1.0, cuda-bindings 1.0",
            "",
        ),
        (
            {"onnxruntime"},
            True,
            "missing: TensorRT or onnxruntime-gpu, cuda-bindings, NVRTC",
            "pip install 'eagle3[gpu]', or 'eagle3[tensorrt]'",
        ),
    ],
)
def test_what_the_gpu_path_lacks(
    monkeypatch: pytest.MonkeyPatch, packages: set[str], driver: bool, says: str, advised: str
) -> None:
    pretend(monkeypatch, packages)
    monkeypatch.setattr(doctor, "cuda_driver", lambda: ("a driver", driver))
    (found,) = (each for each in doctor.diagnose().findings if each.name == "device cuda")
    assert says in found.value
    assert advised in (found.advice or "") and bool(advised) == bool(found.advice)


def test_the_driver_is_asked_itself() -> None:
    said, starts = doctor.cuda_driver()
    assert said.startswith(("NVIDIA driver for CUDA ", "NVIDIA driver not found"))
    assert not starts or "GPU" in said
