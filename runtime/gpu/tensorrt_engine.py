"""A TensorRT plan file as calls over fixed addresses.

`plans/tensorrt/plan_files.py` decides which files can be used; `load_engine` compares a file's
bindings with what the caller will bind. `PlanEngine.call` creates one context for one set of
shapes: a CUDA graph captured from a context is valid only while that context does not change. All
contexts share one block of scratch memory, because one stream runs them in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eagle3.plans.tensorrt.library import find_library
from eagle3.plans.tensorrt.plan_files import PlanFile, rebuild_command
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import TensorSpec, engine_name
from eagle3.runtime.errors import BundleError, DeviceError, EngineError
from eagle3.runtime.gpu.device_engines import TARGET, Engines, Shape, growing_draft, round_rows
from eagle3.runtime.gpu.driver import DeviceBuffer, Driver
from eagle3.runtime.ort.growth_engine import ENGINE as DRAFT_TREE
from eagle3.runtime.ort.growth_engine import bound_growth
from eagle3.runtime.ort.signature import Bound
from eagle3.runtime.ort.target_engine import bound_target

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}


class TensorRT:
    """The library of a backend, with a logger that keeps its warnings and errors.

    Raises EngineMissing if it is not installed, and BuildError if it is too old.
    """

    def __init__(self, backend: str, module: Any | None = None) -> None:
        self.backend = backend
        self.module = find_library(backend).module if module is None else module
        self.version = str(self.module.__version__)
        self.complaints: list[str] = []
        self.logger = _logger(self.module, self.complaints)
        self.runtime = self.module.Runtime(self.logger)

    def last_complaint(self) -> str:
        """Return the library's latest messages, for an error message, and clear them."""
        said = self.complaints[-1] if self.complaints else "the library gave no reason"
        self.complaints.clear()
        return said


def _logger(module: Any, complaints: list[str]) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        """Keeps warnings and errors, and prints nothing."""

        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            """Called by the library, from any of its threads."""
            if severity <= module.ILogger.Severity.ERROR:
                complaints.append(" ".join(str(text).split()))

    return Logger()


class PlanEngine:
    """A deserialized plan file. rebuild: the command that builds it again."""

    def __init__(self, file: PlanFile, rebuild: str, library: TensorRT, driver: Driver) -> None:
        self.name, self.rebuild = file.engine, rebuild
        self.where = f"engine '{file.engine}' ({file.path})"
        self._library, self._driver = library, driver
        self._loose: dict[int, PlanCall] = {}
        self._engine = _deserialized(file, self.where, rebuild, library)
        self._names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        mode = library.module.TensorIOMode.INPUT
        inputs = {n for n in self._names if self._engine.get_tensor_mode(n) == mode}
        self.inputs = tuple(self._spec(n) for n in self._names if n in inputs)
        self.outputs = tuple(self._spec(n) for n in self._names if n not in inputs)

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of its largest profile, besides inputs and outputs."""
        return max(
            int(self._engine.get_device_memory_size_for_profile_v2(profile))
            for profile in range(self._engine.num_optimization_profiles)
        )

    def largest(self, name: str, axis: int) -> int:
        """Return the maximum of one dimension of an input over all profiles."""
        return max(
            int(tuple(self._engine.get_tensor_profile_shape(name, profile)[2])[axis])
            for profile in range(self._engine.num_optimization_profiles)
        )

    def call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> PlanCall:
        """Return a call with its own context for inputs of these shapes, all tensors at these
        addresses.

        Raises EngineError if no profile accepts the shapes or the library refuses an address.
        """
        profile = self._profile_for(shapes)
        context = self._context()
        context.set_device_memory(scratch.address, scratch.num_bytes)
        self._must(context.set_optimization_profile_async(profile, self._driver.stream), "profile")
        self.reshape(context, shapes)
        for name in self._names:
            self._must(context.set_tensor_address(name, addresses[name]), f"address of {name}")
        return PlanCall(self, context, profile)

    def loose_call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> PlanCall:
        """Like `call`, with one context per profile. The next such call changes it, so it must not
        be captured.
        """
        profile = self._profile_for(shapes)
        if profile not in self._loose:
            self._loose[profile] = self.call(shapes, addresses, scratch)
        self.reshape(self._loose[profile].context, shapes)
        return self._loose[profile]

    def reshape(self, context: Any, shapes: Mapping[str, Shape]) -> None:
        """Set the shapes of the inputs."""
        for name, shape in shapes.items():
            self._must(context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")

    def _context(self) -> Any:
        module = self._library.module
        user_managed = module.ExecutionContextAllocationStrategy.USER_MANAGED
        strategies = getattr(module, "DynamicShapesKernelSpecializationStrategy", None)
        if strategies is None:
            context = self._engine.create_execution_context(user_managed)
        else:
            # By default TensorRT for RTX compiles kernels for a shape in the background and swaps
            # them in later; a captured graph would keep the slower ones.
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(user_managed)
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            context = self._engine.create_execution_context(config)
        if context is None:
            raise DeviceError(
                f"no context for engine '{self.name}': {self._library.last_complaint()}"
            )
        return context

    def enqueue(self, context: Any) -> None:
        """Issue one call. Raises EngineError."""
        self._driver.counters.engine_launches += 1
        self._must(context.execute_async_v3(self._driver.stream), "the call")

    def check_capturable(self, context: Any) -> None:
        """Raise EngineError if a CUDA graph cannot contain this call."""
        ask = getattr(context, "is_stream_capturable", None)  # missing in some versions of TensorRT
        if ask is not None and not ask(self._driver.stream):
            raise EngineError(
                f"{self.where} has layers that a CUDA graph cannot contain; run `{self.rebuild}`"
            )

    def check_aliases(self) -> None:
        """Raise BundleError unless every cache is updated in place: past and present are bound to
        one address, which is valid for no other engine.
        """
        # missing in some versions of TensorRT
        ask = getattr(self._engine, "get_aliased_input_tensor", None)
        for name in (spec.name for spec in self.outputs if spec.name.startswith("present_")):
            past = name.replace("present_", "past_")
            if ask is not None and ask(name) != past:
                raise BundleError(
                    f"{self.where}: {name} is not written in place of {past}; run `{self.rebuild}`"
                )

    def _must(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise EngineError(
                f"engine '{self.name}' refused {what}: {self._library.last_complaint()}"
            )

    def _profile_for(self, shapes: Mapping[str, Shape]) -> int:
        """Return the index of the first profile whose ranges contain all shapes."""
        for profile in range(self._engine.num_optimization_profiles):
            if all(self._holds(profile, name, shape) for name, shape in shapes.items()):
                return profile
        name, shape = next(iter(shapes.items()))
        raise EngineError(
            f"no profile of engine '{self.name}' accepts {name} {list(shape)} with the other"
            f" inputs; run `{self.rebuild}`"
        )

    def _holds(self, profile: int, name: str, shape: Shape) -> bool:
        low, _, high = map(tuple, self._engine.get_tensor_profile_shape(name, profile))
        return len(low) == len(shape) and all(
            a <= size <= b for a, size, b in zip(low, shape, high, strict=True)
        )

    def _spec(self, name: str) -> TensorSpec:
        dtype = str(self._engine.get_tensor_dtype(name)).rsplit(".", 1)[-1]
        shape = tuple("?" if dim < 0 else int(dim) for dim in self._engine.get_tensor_shape(name))
        return TensorSpec(name, _DTYPES.get(dtype, dtype.lower()), shape)


class PlanCall:
    """One shape of an engine, issued any number of times."""

    def __init__(self, engine: PlanEngine, context: Any, profile: int) -> None:
        self._engine, self.context, self.profile = engine, context, profile

    def enqueue(self) -> None:
        """Issue the call on the driver's stream."""
        self._engine.enqueue(self.context)

    def check_capturable(self) -> None:
        """Raise EngineError if a CUDA graph cannot contain this call. Requires a first
        `enqueue`.
        """
        self._engine.check_capturable(self.context)


def load_plan_engines(
    bundle: Bundle, files: Mapping[str, PlanFile], library: TensorRT, driver: Driver
) -> Engines:
    """Load the engines. files: engine -> plan file, see `usable_plan_files`. Raises BundleError
    for a file whose bindings do not match the manifest.
    """
    manifest, request = bundle.manifest, files[TARGET].request
    rebuild = rebuild_command(bundle, request, library.backend, driver.compute_capability)

    def load(name: str, bound: Bound) -> PlanEngine:
        return load_engine(files[name], rebuild, bound, library, driver)

    target = load(TARGET, bound_target(manifest))
    drafter, draft, rows = growing_draft(manifest), None, 1
    if drafter is not None:
        info = manifest.drafts[drafter]
        draft = load(engine_name(drafter, DRAFT_TREE), bound_growth(manifest, info))
        rows = max(draft.largest("next_ids", 1), round_rows(info))
    chunk = request.prefill_chunk or manifest.plan.prefill_chunk
    return Engines(manifest, target, drafter, draft, rows, request.verify_widths, chunk)


def load_engine(
    file: PlanFile, rebuild: str, bound: Bound, library: TensorRT, driver: Driver
) -> PlanEngine:
    """Load a plan file that has the tensors of `bound`.

    Raises BundleError, with the command that rebuilds it, for any other file.
    """
    engine = PlanEngine(file, rebuild, library, driver)
    _compare(engine, "input", engine.inputs, bound.inputs)
    _compare(engine, "output", engine.outputs, bound.outputs)
    engine.check_aliases()
    return engine


def _deserialized(file: PlanFile, where: str, rebuild: str, library: TensorRT) -> Any:
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise BundleError(f"{where} cannot be read: {error}") from error
    engine = library.runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BundleError(
            f"{where} cannot be loaded: {library.last_complaint()}; run `{rebuild} --force`"
        )
    return engine


def _compare(
    engine: PlanEngine, kind: str, found: Sequence[TensorSpec], expected: Iterable[TensorSpec]
) -> None:
    """Compare names, dtypes, ranks and fixed dimensions. A dimension that is free in one may be
    free in both.
    """
    left = {spec.name: spec for spec in found}
    for spec in expected:
        own = left.pop(spec.name, None)
        if own is None or not _fits(own, spec):
            has = "none of that name" if own is None else _say(own)
            raise BundleError(
                f"{engine.where}: {kind} {_say(spec)} is required by the manifest, but the plan"
                f" file has {has}: run `{engine.rebuild}`"
            )
    if left:
        raise BundleError(
            f"{engine.where}: {kind} {_say(next(iter(left.values())))} is unknown to the manifest:"
            f" run `{engine.rebuild}`"
        )


def _fits(own: TensorSpec, spec: TensorSpec) -> bool:
    def both(a: int | str, b: int | str) -> bool:
        return a == b or isinstance(a, str) or isinstance(b, str)

    same_rank = len(own.shape) == len(spec.shape)
    return own.dtype == spec.dtype and same_rank and all(map(both, own.shape, spec.shape))


def _say(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]"
