"""A bundle's ONNX files on ONNX Runtime's CUDA provider, as calls over fixed addresses.

The provider launches on the driver's stream (`user_compute_stream`), every tensor is bound to its
device memory, and no node can fall back to the CPU. A call then only launches kernels: its arena
is large enough after two calls of the same shapes, and it does not wait. `halves.py` can therefore
capture it like a TensorRT call. The provider's own graphs (`enable_cuda_graph`, `gpu_graph_id`)
would contain only the engine, and each belongs to the thread that captured it (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import engine_name
from eagle3.runtime.errors import (
    BundleError,
    DeviceError,
    Eagle3Error,
    EngineError,
    EngineMissing,
    PlanError,
)
from eagle3.runtime.gpu.device_engines import TARGET, Engines, Shape, growing_draft, round_rows
from eagle3.runtime.gpu.driver import DeviceBuffer, Driver
from eagle3.runtime.ort.growth_engine import ENGINE as DRAFT_TREE
from eagle3.runtime.ort.growth_engine import bound_growth
from eagle3.runtime.ort.ort_library import import_onnxruntime
from eagle3.runtime.ort.signature import Bound, check_tensors, tensor_spec
from eagle3.runtime.ort.target_engine import bound_target

BACKEND = "ort-cuda"
_PROVIDER = "CUDAExecutionProvider"
# values of TensorProto
_ELEMENTS = {"float32": 1, "float16": 10, "bfloat16": 16, "int64": 7, "bool": 9}
_FIXED = {"B": 1}  # shapes that depend on B are then constants, and the session reports them so
_MAX_LOOSE = 64
_INSTALL = (
    "pip uninstall onnxruntime, which owns the same module, then pip install 'eagle3[gpu]'"
    " (with onnxruntime-gpu's extras cuda and cudnn where CUDA's libraries are not installed)"
)
_NO_START = f"ONNX Runtime's CUDA provider does not start: {_INSTALL}"


def has_cuda_provider() -> bool:
    """Return whether the installed `onnxruntime` was built with the CUDA provider."""
    try:
        return _PROVIDER in import_onnxruntime().get_available_providers()
    except EngineMissing:
        return False


class OrtCuda:
    """`onnxruntime` with its CUDA provider. Raises EngineMissing if it has none."""

    backend = BACKEND

    def __init__(self, module: Any | None = None) -> None:
        self.module = import_onnxruntime() if module is None else module
        if _PROVIDER not in self.module.get_available_providers():
            raise EngineMissing(
                f"onnxruntime {self.module.__version__} here has no CUDA provider: {_INSTALL}"
            )

    def session(self, path: Path, name: str, stream: int) -> Any:
        """Return a session whose nodes all run on the GPU, on `stream`.

        Raises DeviceError if the provider does not start, and BundleError for a graph that it
        cannot run.
        """
        self.module.set_default_logger_severity(3)  # otherwise each session warns on stderr
        # it prints the libraries that it does not find
        with contextlib.redirect_stdout(io.StringIO()):
            self.module.preload_dlls()  # loads CUDA's libraries if they were installed with pip
        providers = [(_PROVIDER, provider_options(stream))]
        try:
            session = self.module.InferenceSession(
                str(path), self._options(), providers=providers, enable_fallback=0
            )
        except Exception as error:
            raise self._why_not(error, f"engine '{name}' ({path})") from error
        if _PROVIDER not in session.get_providers():
            raise DeviceError(_NO_START)
        return session

    def _why_not(self, error: Exception, engine: str) -> Eagle3Error:
        """Return the error that explains why a session could not be created."""
        said = _in_a_line(error)
        if "CUDA failure" in said:
            return DeviceError(
                f"{engine} does not load: {said}; stop other programs that use the GPU, or export"
                " with a smaller dtype"
            )
        try:  # a session without the provider only reports that its nodes are on the CPU
            self.module.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)
        except Exception:
            return DeviceError(_NO_START)
        return BundleError(
            f"{engine} does not load on ONNX Runtime's CUDA provider, which must run every node:"
            f" {said}; another backend may run it: eagle3 build"
        )

    def _options(self) -> Any:
        options = self.module.SessionOptions()
        options.log_severity_level = 4  # failures are raised as exceptions
        for symbol, size in _FIXED.items():
            options.add_free_dimension_override_by_name(symbol, size)
        # with it, a second call allocates too, which a capture does not allow
        options.enable_mem_pattern = False
        for key in (
            "session.disable_cpu_ep_fallback",
            # Keep weights out of the arena, which rounds their sum up to a power of two.
            "session.use_device_allocator_for_initializers",
        ):
            options.add_session_config_entry(key, "1")
        return options

    def run_options(self) -> Any:
        """Return the options of a call that returns after launching."""
        options = self.module.RunOptions()
        options.log_severity_level = 4
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options


def provider_options(stream: int) -> dict[str, str]:
    """Return the options of the provider: run on `stream` of the first GPU."""
    return {
        "device_id": "0",
        "user_compute_stream": str(stream),
        "use_tf32": "0",
        # Allocate the memory that is needed, not the next power of two.
        "arena_extend_strategy": "kSameAsRequested",
    }


def _in_a_line(error: Exception) -> str:
    """Return ONNX Runtime's message in one line, without its source locations."""
    said = " ".join(str(error).split())
    return said[max(said.find("CUDA failure"), 0) :].partition(" ; GPU=")[0]


class OrtEngine:
    """One graph of a bundle. Raises BundleError if its tensors are not those of `bound`.

    float32 products are not rounded to TF32, because a float32 bundle promises float32's tokens.
    """

    scratch_bytes = 0  # the provider has its own arena

    def __init__(
        self, bundle: Bundle, name: str, bound: Bound, library: OrtCuda, driver: Driver
    ) -> None:
        self.name, self._driver = name, driver
        path = bundle.path(bundle.manifest.engines[name].file)
        self.session = library.session(path, name, driver.stream)
        self._run_options = library.run_options()
        self.inputs = tuple(map(tensor_spec, self.session.get_inputs()))
        self.outputs = tuple(map(tensor_spec, self.session.get_outputs()))
        check_tensors(bundle, name, self, bound, more_outputs=False, fixed=_FIXED)
        self._loose: dict[tuple[Shape, ...], OrtCall] = {}

    def call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> OrtCall:
        """Bind every tensor. Raises EngineError if ONNX Runtime refuses."""
        sizes = {
            symbol: size
            for spec in self.inputs
            for symbol, size in zip(spec.shape, shapes[spec.name], strict=True)
        }
        try:
            binding = self.session.io_binding()
            for bind, specs in (
                (binding.bind_input, self.inputs),
                (binding.bind_output, self.outputs),
            ):
                for spec in specs:
                    shape = [sizes.get(dim, dim) for dim in spec.shape]
                    element, address = _ELEMENTS[spec.dtype], addresses[spec.name]
                    bind(spec.name, "cuda", 0, element, shape, address)
        except Exception as error:
            raise EngineError(
                f"engine '{self.name}' rejected a binding: {_in_a_line(error)}"
            ) from error
        return OrtCall(self, binding)

    def loose_call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> OrtCall:
        """Return a binding per set of shapes. A prompt has two: a chunk and the remainder."""
        key = tuple(shapes.values())
        if key not in self._loose:
            while len(self._loose) >= _MAX_LOOSE:
                del self._loose[next(iter(self._loose))]
            self._loose[key] = self.call(shapes, addresses, scratch)
        return self._loose[key]

    def enqueue(self, binding: Any) -> None:
        """Issue one call. Raises EngineError."""
        self._driver.counters.engine_launches += 1
        try:
            self.session.run_with_iobinding(binding, self._run_options)
        except Exception as error:
            raise EngineError(f"engine '{self.name}' failed: {_in_a_line(error)}") from error


class OrtCall:
    """One shape of an engine, bound."""

    def __init__(self, engine: OrtEngine, binding: Any) -> None:
        self._engine, self._binding = engine, binding

    def enqueue(self) -> None:
        """Issue the call on the driver's stream."""
        self._engine.enqueue(self._binding)

    def check_capturable(self) -> None:
        """Do nothing: a call that cannot be captured fails in the capture."""


def load_ort_engines(bundle: Bundle, library: OrtCuda, driver: Driver) -> Engines:
    """Load the engines. Raises BundleError, DeviceError, EngineMissing and PlanError."""
    manifest, plan = bundle.manifest, bundle.manifest.plan
    drafter, draft, rows = growing_draft(manifest), None, 1
    if drafter is not None and manifest.drafts[drafter].weights == "int8":
        raise PlanError(
            f"the weights of draft {drafter} are int8 in blocks, for which ONNX Runtime's CUDA"
            " provider has no kernel: export with --draft-weights same, or run `eagle3 build"
            f" {bundle.root}` and load with a TensorRT backend"
        )

    def load(name: str, bound: Bound) -> OrtEngine:
        return OrtEngine(bundle, name, bound, library, driver)

    target = load(TARGET, bound_target(manifest))
    if drafter is not None:
        info = manifest.drafts[drafter]
        draft = load(engine_name(drafter, DRAFT_TREE), bound_growth(manifest, info))
        rows = max(plan.prefill_chunk, round_rows(info))
    return Engines(manifest, target, drafter, draft, rows, (), plan.prefill_chunk)
