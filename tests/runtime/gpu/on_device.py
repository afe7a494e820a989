"""A bundle on the stand-in, as the tests take it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import OnnxProgram, build_plan_files, programs_of
from stand_in import StandInDriver
from stand_in_ort import StandInOrt
from stand_in_tensorrt import Program, StandInTensorRT

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.gpu.device import Device
from eagle3.runtime.gpu.kernels import Kernels
from eagle3.runtime.gpu.load import load_engines
from eagle3.runtime.gpu.ort_cuda_engine import OrtCuda
from eagle3.runtime.gpu.tensorrt_engine import TensorRT
from eagle3.runtime.stats import Clock


@dataclass
class OnDevice:
    """A bundle on the stand-in, and what the stand-in saw."""

    engine: eagle3.Engine
    driver: StandInDriver
    programs: dict[str, Any]

    @property
    def target(self) -> OnnxProgram:
        return self.programs["target"]  # type: ignore[no-any-return]

    @property
    def growth(self) -> Any:
        """The engine `draft_tree` of whichever head there is."""
        return next(each for name, each in self.programs.items() if name != "target")


def copy_of(bundle: Bundle, folder: Path) -> Bundle:
    """A copy that may get plan files."""
    shutil.copytree(bundle.root, folder / "bundle")
    return Bundle.open(folder / "bundle")


def on_device(
    bundle: Bundle,
    folder: Path,
    driver: StandInDriver | None = None,
    grow: Callable[[Program], Program] = lambda own: own,
    widths: tuple[int, ...] | None = None,
    library: str = "tensorrt",
    **request: Any,
) -> OnDevice:
    """grow: wraps the growth of the draft's tree. library: which stands in. request: of the build
    of plan files, where it needs them. folder: for a copy."""
    driver, bundle = driver or StandInDriver(), copy_of(bundle, folder)
    programs = programs_of(bundle)
    for name in programs:
        if name != "target":
            programs[name] = grow(programs[name])
    if library == "ort-cuda":
        engines = load_engines(bundle, OrtCuda(StandInOrt(driver, programs)), driver)
    else:
        build_plan_files(bundle.root, **request)
        tensorrt = StandInTensorRT(driver, programs)
        engines = load_engines(bundle, TensorRT("tensorrt", tensorrt), driver)
    device = Device(engines, driver, Kernels(driver, b""), Clock(), widths)
    return OnDevice(eagle3.Engine(bundle, 1, device), driver, dict(programs))
