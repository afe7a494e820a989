"""`eagle3 doctor`: report what this machine can run and what is missing.

Packages are looked up by their metadata. Only onnxruntime is imported, if it is installed, because
only the module itself can list its execution providers. The NVIDIA driver is queried through its
own library, libcuda.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle3.runtime.bundle.describe import int8_text
from eagle3.runtime.errors import EngineError, EngineMissing

EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "safetensors")
_TENSORRT_PACKAGES = ("tensorrt", "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-bindings")
_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_DRIVER = Path("/proc/driver/nvidia/version")
_SMI_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_SMI_TIMEOUT_S = 10


@dataclass(frozen=True)
class Finding:
    """The result of one check. advice: what to do about a problem; None if there is none."""

    name: str
    value: str
    advice: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and whether this machine can run and export bundles."""

    can_run: bool
    can_export: bool
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the findings as lines of text, followed by the conclusion."""
        width = max(len(each.name) for each in self.findings)
        lines = []
        for each in self.findings:
            lines.append(f"{each.name:{width}}  {each.value}")
            if each.advice is not None:
                lines.append(f"{'':{width}}  -> {each.advice}")
        return [*lines, self.conclusion]

    @property
    def conclusion(self) -> str:
        """One sentence about what this machine can do."""
        able = ["run bundles"] * self.can_run + ["export"] * self.can_export
        return f"this machine can {' and '.join(able) or 'neither run bundles nor export'}"


def diagnose() -> Diagnosis:
    """Examine this machine. A missing or broken component is a finding, not an exception."""
    engine, can_run = _onnxruntime()
    export, can_export = _export()
    return Diagnosis(
        can_run=can_run,
        can_export=can_export,
        findings=(
            Finding("eagle3", installed("eagle3") or "not installed, running from its folder"),
            Finding("python", platform.python_version()),
            Finding("numpy", installed("numpy") or "missing"),
            engine,
            *([_int8()] if can_run else []),
            export,
            _tensorrt(),
            _gpu(),
            _cuda(),
            Finding("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} available"),
            Finding("memory", _memory()),
        ),
    )


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def nvidia_smi() -> str | None:
    """Return name, memory and driver version of each GPU, as nvidia-smi prints them.

    Returns None if nvidia-smi is missing, fails or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *_SMI_QUERY], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(done.stdout.strip().splitlines()) if done.returncode == 0 else None


def _onnxruntime() -> tuple[Finding, bool]:
    """Check the onnxruntime package; the second value is True if it can be used."""
    from eagle3.runtime.ort.ort_library import import_onnxruntime

    names = ("onnxruntime", "onnxruntime-gpu")
    found = [f"{name} {number}" for name in names if (number := installed(name))]
    try:
        ort = import_onnxruntime()
    except EngineMissing as error:
        return Finding("onnxruntime", ", ".join(found) or "missing", str(error)), False
    providers = ", ".join(each.removesuffix("ExecutionProvider") for each in _providers(ort))
    value = f"{', '.join(found) or ort.__version__} (runs on: {providers})"
    advice = None
    if len(found) > 1:
        advice = (
            "onnxruntime and onnxruntime-gpu both install the module `onnxruntime` and overwrite "
            "each other: uninstall both, then install either 'eagle3[cpu]' or 'eagle3[gpu]'"
        )
    return Finding("onnxruntime", value, advice), True


def _int8() -> Finding:
    """Check how int8 targets run here. It loads two graphs of a few hundred bytes."""
    from eagle3.runtime.ort.int8_form import int8_form

    try:
        return Finding("int8", int8_text(int8_form()))
    except EngineError as error:
        return Finding("int8", "not exact", str(error))


def _providers(ort: Any) -> Sequence[str]:
    providers: Sequence[str] = ort.get_available_providers()
    return providers


def _export() -> tuple[Finding, bool]:
    found = {name: installed(name) for name in EXPORT_PACKAGES}
    missing = [name for name, number in found.items() if number is None]
    have = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if not missing:
        return Finding("export", have), True
    value = f"{have + '; ' if have else ''}missing: {', '.join(missing)}"
    return Finding("export", value, "to export bundles: pip install 'eagle3[export]'"), False


def _tensorrt() -> Finding:
    if name := _first_installed(_TENSORRT_PACKAGES):
        return Finding("tensorrt", f"{name} {installed(name)}")
    return Finding("tensorrt", "not installed (only required for TensorRT plan files)")


def _first_installed(names: Sequence[str]) -> str | None:
    return next((name for name in names if installed(name)), None)


def cuda_driver() -> tuple[str, bool]:
    """Describe the NVIDIA driver; the second value is True if it can use a GPU.

    libcuda is called directly, because a Jetson may not have nvidia-smi.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version, count = ctypes.c_int(0), ctypes.c_int(0)
        library.cuDriverGetVersion(ctypes.byref(version))
        code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return "NVIDIA driver not found (libcuda.so.1)", False
    name = f"NVIDIA driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if code != 0 or count.value == 0:
        return f"{name}, but no usable GPU (error {code})", False
    return f"{name}, {count.value} GPU{'s' * (count.value > 1)}", True


def _cuda() -> Finding:
    """Check what `--device cuda` requires.

    That is a driver with a GPU, a library that runs engines on it, cuda-bindings and NVRTC.
    """
    driver, starts = cuda_driver()
    names = {
        "TensorRT or onnxruntime-gpu": _first_installed((*_TENSORRT_PACKAGES, "onnxruntime-gpu")),
        "cuda-bindings": _first_installed(("cuda-bindings",)),
        "NVRTC": _first_installed(_NVRTC_PACKAGES),
    }
    have = [f"{name} {installed(name)}" for name in names.values() if name]
    missing = [what for what, name in names.items() if name is None]
    value = f"{driver}; installed: {', '.join(have)}" if have else driver
    if not starts:
        return Finding("device cuda", f"no: {value}")
    if missing:
        advice = (
            f"--device cuda requires {' and '.join(missing)}: pip install 'eagle3[gpu]', or"
            " 'eagle3[tensorrt]', or 'eagle3[tensorrt-rtx]' and then --no-deps tensorrt-rtx-cu13"
        )
        return Finding("device cuda", f"no: {value}; missing: {', '.join(missing)}", advice)
    return Finding("device cuda", f"yes: {value}")


def _gpu() -> Finding:
    if gpus := nvidia_smi():
        return Finding("gpu", gpus)
    if _DRIVER.is_file():
        return Finding("gpu", "none listed by nvidia-smi, but an NVIDIA driver is loaded")
    return Finding("gpu", "none (no NVIDIA driver)")


def _memory() -> str:
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (
            int(rows[key].split()[0]) / (1 << 20) for key in ("MemTotal", "MemAvailable")
        )
    except (OSError, KeyError, ValueError):
        return "unknown"
    return f"{total:.1f} GiB total, {free:.1f} GiB available"
