"""A portable bundle on the stand-in, beside the same bundle on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny

sys.path.insert(0, str(Path(__file__).parent))

from programs import OnnxProgram, programs_of, write_plan_files  # noqa: E402
from stand_in import Program, StandInDriver, StandInTensorRT  # noqa: E402

import eagle3  # noqa: E402
from eagle3.runtime.bundle import Bundle  # noqa: E402
from eagle3.runtime.gpu.device import Device  # noqa: E402
from eagle3.runtime.gpu.halves import load_engines  # noqa: E402
from eagle3.runtime.gpu.kernels import Kernels  # noqa: E402
from eagle3.runtime.gpu.tensorrt_engine import TensorRT  # noqa: E402
from eagle3.runtime.session import Clock  # noqa: E402


@pytest.fixture(scope="session")
def portable(llama_folder: Path, head_folder: Path, tmp_path_factory: Any) -> Bundle:
    """The tiny Llama and its random head in the lowering that TensorRT compiles."""
    folder = tmp_path_factory.mktemp("bundles") / "portable"
    return tiny.export_tiny(llama_folder, head_folder, folder, tiny.tiny_plan(lowering="portable"))


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


@pytest.fixture(scope="session")
def device(portable: Bundle, tmp_path_factory: Any) -> Iterator[OnDevice]:
    """`portable` on the stand-in."""
    yield on_device(portable, tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="session")
def cpu(portable: Bundle) -> Iterator[eagle3.Engine]:
    """`portable` on the CPU."""
    yield eagle3.load(portable.root, threads=1)
