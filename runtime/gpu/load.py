"""`load(..., device="cuda")`: driver, library, plan files and kernels, in that order.

What is missing is said before anything large is read: no driver, no GPU, no library, no plan file.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path

from eagle3.runtime.bundle import Bundle
from eagle3.runtime.errors import BundleError, PlanError
from eagle3.runtime.gpu.cuda_driver import CudaDriver
from eagle3.runtime.gpu.device import Device
from eagle3.runtime.gpu.driver import Driver
from eagle3.runtime.gpu.halves import DRAFT_TREE, TARGET, load_engines
from eagle3.runtime.gpu.kernels import Kernels, compile_kernels
from eagle3.runtime.gpu.tensorrt_engine import LIBRARIES, PlanFile, TensorRT
from eagle3.runtime.session import Clock

PLANS = "plans"
"""The folder of a bundle that holds plan files: a folder for each library and GPU."""


def default_backend(bundle: Bundle) -> str:
    """The backend that the bundle was planned for, or has plan files of; else the first."""
    if bundle.manifest.plan.backend in LIBRARIES:
        return bundle.manifest.plan.backend
    built = (name for name in LIBRARIES if list((bundle.root / PLANS).glob(f"{name}-sm*")))
    return next(built, next(iter(LIBRARIES)))


def load_device(
    bundle: Bundle,
    backend: str | None = None,
    driver: Driver | None = None,
    library: TensorRT | None = None,
) -> Device:
    """The bundle on the first GPU. Raises DeviceError, EngineMissing, BundleError, PlanError."""
    plan = bundle.manifest.plan
    backend = default_backend(bundle) if backend is None else backend
    if plan.lowering != "portable":
        raise PlanError(
            f"{bundle.root} was exported with lowering {plan.lowering}, {backend} runs portable:"
            " export it again with --lowering portable"
        )
    driver = CudaDriver() if driver is None else driver
    library = TensorRT(backend) if library is None else library
    files = find_plan_files(bundle, library, driver)
    kernels = Kernels(driver, compile_kernels(driver.compute_capability))
    engines = load_engines(bundle.manifest, files, library, driver)
    device = Device(engines, driver, kernels, Clock())
    weakref.finalize(device, driver.close)  # its memory goes with it, not with the process
    return device


def find_plan_files(bundle: Bundle, library: TensorRT, driver: Driver) -> dict[str, PlanFile]:
    """Plan files by engine, from the bundle's folder for this library and GPU.

    Raises BundleError, naming what there is instead, when the target has none.
    """
    capability = driver.compute_capability
    folder = bundle.root / PLANS / f"{library.backend}-sm{capability.replace('.', '')}"
    rebuild = f"eagle3 build {bundle.root} --backend {library.backend}"
    rebuild += f" --compute-capability {capability}"
    notes = {name: folder / f"{name}.json" for name in (TARGET, DRAFT_TREE)}
    files = {name: _read(note, rebuild) for name, note in notes.items() if note.is_file()}
    if TARGET not in files:
        others = sorted(each.name for each in (bundle.root / PLANS).glob("*-sm*"))
        has = f" (it has {', '.join(others)})" if others else ""
        raise BundleError(
            f"{bundle.root} has no plan file of the target for {library.backend} on"
            f" {driver.device_name}, compute capability {capability}{has}: run `{rebuild}`"
        )
    return files


def _read(note: Path, rebuild: str) -> PlanFile:
    """What the JSON beside a plan file says of it."""
    try:
        data = json.loads(note.read_text(encoding="utf-8"))
        return PlanFile(
            path=note.with_suffix(".plan"),
            backend=str(data["library"]),
            library_version=str(data["library_version"]),
            compute_capability=str(data["compute_capability"]),
            rebuild=rebuild,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{note} cannot be read ({error}): run `{rebuild}`") from error
