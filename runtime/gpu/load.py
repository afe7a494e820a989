"""`load(..., device="cuda")`: driver, library, plan files and kernels, in that order.

What is missing is said before anything large is read: no driver, no GPU, no library, no plan file.
"""

from __future__ import annotations

import weakref

from eagle3.plans.tensorrt_files import plan_files, usable_plan_files
from eagle3.plans.tensorrt_library import MODULES, find_library
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.errors import PlanError
from eagle3.runtime.gpu.cuda_driver import CudaDriver
from eagle3.runtime.gpu.device import Device
from eagle3.runtime.gpu.driver import Driver
from eagle3.runtime.gpu.halves import load_engines
from eagle3.runtime.gpu.kernels import Kernels, compile_kernels
from eagle3.runtime.gpu.tensorrt_engine import TensorRT
from eagle3.runtime.session import Clock


def chosen_backend(bundle: Bundle) -> str:
    """The backend that the bundle was planned for, or has plan files of; else what is installed.

    Raises EngineMissing where nothing is, BuildError where that leaves a choice.
    """
    planned = bundle.manifest.plan.backend
    if planned in MODULES:
        return planned
    built = {each.library for each in plan_files(bundle.root)}
    return built.pop() if len(built) == 1 else find_library().name


def load_device(
    bundle: Bundle,
    backend: str | None = None,
    driver: Driver | None = None,
    library: TensorRT | None = None,
) -> Device:
    """The bundle on the first GPU.

    Raises DeviceError, EngineMissing, BuildError (plan files), BundleError, PlanError.
    """
    plan = bundle.manifest.plan
    if plan.lowering != "portable":
        raise PlanError(
            f"{bundle.root} was exported with lowering {plan.lowering}, on a GPU runs portable:"
            " export it again with --lowering portable"
        )
    driver = CudaDriver() if driver is None else driver
    try:
        library = TensorRT(backend or chosen_backend(bundle)) if library is None else library
        device = _device(bundle, driver, library)
    except BaseException:
        driver.close()
        raise
    weakref.finalize(device, driver.close)  # its memory goes with it, not with the process
    return device


def _device(bundle: Bundle, driver: Driver, library: TensorRT) -> Device:
    files = usable_plan_files(bundle, library.backend, library.version, driver.compute_capability)
    kernels = Kernels(driver, compile_kernels(driver.compute_capability))
    return Device(load_engines(bundle, files, library, driver), driver, kernels, Clock())
