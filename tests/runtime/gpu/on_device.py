"""A bundle on the stand-in, as the tests take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import OnnxProgram, programs_of, write_plan_files
from stand_in import StandInDriver
from stand_in_tensorrt import Program, StandInTensorRT

import eagle3
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.gpu.device import Device
from eagle3.runtime.gpu.halves import load_engines
from eagle3.runtime.gpu.kernels import Kernels
from eagle3.runtime.gpu.tensorrt_engine import TensorRT
from eagle3.runtime.session import Clock


@dataclass
class OnDevice:
    """A bundle on the stand-in, and what the stand-in saw."""

    engine: eagle3.Engine
    driver: StandInDriver
    programs: dict[str, Any]

    @property
    def target(self) -> OnnxProgram:
        return self.programs["target"]  # type: ignore[no-any-return]


def on_device(
    bundle: Bundle,
    folder: Path,
    driver: StandInDriver | None = None,
    engines: Sequence[str] = ("target", "draft_tree"),
    grow: Callable[[Program], Program] = lambda own: own,
    **options: Any,
) -> OnDevice:
    driver = driver or StandInDriver()
    """grow: wraps the growth of the draft's tree."""
    programs = {name: each for name, each in programs_of(bundle).items() if name in engines}
    if "draft_tree" in programs:
        programs["draft_tree"] = grow(programs["draft_tree"])
    files = write_plan_files(bundle, programs, folder)
    library = TensorRT("tensorrt", StandInTensorRT(driver, programs))
    kernels = Kernels(driver, b"")
    loaded = load_engines(bundle.manifest, files, library, driver)
    device = Device(loaded, driver, kernels, Clock(), **options)
    return OnDevice(eagle3.Engine(bundle, 1, device), driver, dict(programs))
