"""`load(..., device="cuda")`: loads driver, library, engines and kernels, in that order.

A missing driver, GPU, library or plan file is reported before anything large is read.
"""

from __future__ import annotations

import weakref

from eagle3.plans.tensorrt.library import MODULES, find_library
from eagle3.plans.tensorrt.plan_files import plan_files, usable_plan_files
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import PlanError
from eagle3.runtime.gpu.cuda_driver import CudaDriver
from eagle3.runtime.gpu.device import Device
from eagle3.runtime.gpu.device_engines import Engines
from eagle3.runtime.gpu.driver import Driver
from eagle3.runtime.gpu.kernels import Kernels, compile_kernels
from eagle3.runtime.gpu.ort_cuda_engine import BACKEND as ORT_CUDA
from eagle3.runtime.gpu.ort_cuda_engine import OrtCuda, has_cuda_provider, load_ort_engines
from eagle3.runtime.gpu.tensorrt_engine import TensorRT, load_plan_engines
from eagle3.runtime.stats import Clock

GpuLibrary = TensorRT | OrtCuda


def chosen_backend(bundle: Bundle) -> str:
    """Return the backend that the bundle was planned for or has plan files of; otherwise ONNX
    Runtime, which needs no plan files, if it has its CUDA provider; otherwise the installed
    TensorRT.

    Raises EngineMissing if there is none, and BuildError if the choice is ambiguous.
    """
    planned = bundle.manifest.plan.backend
    if planned in MODULES:
        return planned
    built = {each.library for each in plan_files(bundle.root)}
    if len(built) == 1:
        return built.pop()
    if not built and (planned == ORT_CUDA or has_cuda_provider()):
        return ORT_CUDA
    return find_library().name


def load_device(
    bundle: Bundle,
    backend: str | None = None,
    driver: Driver | None = None,
    library: GpuLibrary | None = None,
) -> Device:
    """Load the bundle on the first GPU.

    Raises DeviceError, EngineMissing, BuildError (plan files), BundleError and PlanError.
    """
    plan = bundle.manifest.plan
    if plan.lowering != "portable":
        raise PlanError(
            f"{bundle.root} was exported with lowering {plan.lowering}, a GPU requires portable:"
            " export it again with --lowering portable"
        )
    driver = CudaDriver() if driver is None else driver
    try:
        library = _library(backend or chosen_backend(bundle)) if library is None else library
        device = _device(bundle, driver, library)
    except BaseException:
        driver.close()
        raise
    # frees its memory with the object, not at the end of the process
    weakref.finalize(device, driver.close)
    return device


def _library(backend: str) -> GpuLibrary:
    return OrtCuda() if backend == ORT_CUDA else TensorRT(backend)


def _device(bundle: Bundle, driver: Driver, library: GpuLibrary) -> Device:
    engines = load_engines(bundle, library, driver)
    kernels = Kernels(driver, compile_kernels(driver.compute_capability))
    return Device(engines, driver, kernels, Clock())


def load_engines(bundle: Bundle, library: GpuLibrary, driver: Driver) -> Engines:
    """Load the bundle's engines. Raises the errors of `load_device`."""
    if isinstance(library, OrtCuda):
        return load_ort_engines(bundle, library, driver)
    files = usable_plan_files(bundle, library.backend, library.version, driver.compute_capability)
    return load_plan_engines(bundle, files, library, driver)
