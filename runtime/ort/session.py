"""An ONNX Runtime session over buffers that are allocated once.

Who owns what: a `Buffer` owns its memory for the life of the engine; a call sees views of its
front. Past and present of a cache are the same OrtValue, so an engine writes it in place.
`load_session` compares a graph with its manifest and with what its caller will bind, so that a
foreign one is refused before anything is allocated for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import TensorSpec
from eagle3.runtime.errors import BundleError, EngineError, EngineMissing

Values = tuple[Mapping[str, Any], Mapping[str, Any]]  # OrtValues by name: inputs, outputs

_ALIGNMENT = 64  # bytes; what ONNX Runtime's kernels like
_MAX_BINDINGS = 256
_BACKEND = "ort-cpu"
_DTYPES = {"tensor(float)": "float32"}  # of other dtypes `tensor(X)`, X is our name


def import_onnxruntime() -> Any:
    """The module `onnxruntime`, or EngineMissing that says which extra to install."""
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineMissing(
            "no engine package is installed: pip install 'eagle3[cpu]' (or 'eagle3[gpu]' on an "
            f"NVIDIA machine) ({error})"
        ) from error
    return onnxruntime


def aligned_zeros(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros whose first byte is aligned; pages are touched only when written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class Buffer:
    """Memory for one input or output, seen through views of different shapes of its front."""

    def __init__(self, capacity: int, dtype: DTypeLike) -> None:
        self._flat = aligned_zeros((capacity,), dtype)
        self._values: dict[tuple[int, ...], tuple[NDArray[Any], Any]] = {}

    def view(self, *shape: int) -> NDArray[Any]:
        """The front of the buffer as an array of `shape`; the next call may overwrite it."""
        return self._entry(shape)[0]

    def value(self, *shape: int) -> Any:
        """The same memory as an OrtValue."""
        return self._entry(shape)[1]

    def _entry(self, shape: tuple[int, ...]) -> tuple[NDArray[Any], Any]:
        entry = self._values.get(shape)
        if entry is None:
            array = self._flat[: int(np.prod(shape))].reshape(shape)
            entry = self._values[shape] = (array, ort_value(array))
        return entry


def ort_value(array: NDArray[Any]) -> Any:
    """An OrtValue that shares the array's memory."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, "cpu")


class KvCache:
    """Keys and values of every layer in one block [2, L, B, Hkv, S, D], of B sequences.

    Slots 0 .. past-1 hold committed tokens; what stands behind them may be overwritten.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: DTypeLike,
        batch_size: int = 1,
    ) -> None:
        shape = (2, num_layers, batch_size, num_kv_heads, capacity, head_dim)
        self.block = aligned_zeros(shape, dtype)
        self.capacity = capacity

    def bindings(
        self, start: int = 0, stop: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(inputs past_*, outputs present_*) of sequences start .. stop-1, by default of all.

        The same memory under both names.
        """
        values = {
            f"{kind}.{layer}": ort_value(of_layer[start:stop])
            for kind, of_kind in zip("kv", self.block, strict=True)
            for layer, of_layer in enumerate(of_kind)
        }
        past = {f"past_{name}": value for name, value in values.items()}
        present = {f"present_{name}": value for name, value in values.items()}
        return past, present

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copies slots 0 .. stop-1 of sequence `source` to sequence `target`."""
        self.block[:, :, target, :, :stop] = self.block[:, :, source, :, :stop]

    def clear(self, start: int = 0, stop: int | None = None) -> None:
        """Zeros slots start .. stop-1. A masked slot has weight 0, but 0 times NaN is NaN."""
        self.block[..., start:stop, :] = 0

    def keep(self, past: int, nodes: Sequence[int]) -> None:
        """Moves slots past + nodes to past, past + 1, ...: the accepted path becomes contiguous.

        nodes ascending; a node is never moved to the right, and a prefix already in place stays.
        """
        first = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if first == len(nodes):
            return
        moved = np.asarray(nodes[first:]) + past
        self.block[..., past + first : past + len(nodes), :] = self.block[..., moved, :]


@dataclass
class Clock:
    """Time spent inside engines, by all sessions that share it."""

    engine_ns: int = 0
    calls: dict[str, int] = field(default_factory=dict)


class Session:
    """One compiled graph. Calls of equal shapes reuse one of the newest bindings."""

    def __init__(self, path: Path, name: str, threads: int, clock: Clock) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # failures come back as exceptions
        # Two sessions take turns: a pool that spins after its run would take the other's core.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BundleError(f"engine '{name}' ({path}) cannot be loaded: {error}") from error
        self.name = name
        self.inputs = tuple(map(tensor_spec, self._session.get_inputs()))
        self.outputs = tuple(map(tensor_spec, self._session.get_outputs()))
        self._clock = clock
        self._bindings: dict[Hashable, Any] = {}

    def run(self, key: Hashable, values: Callable[[], Values]) -> None:
        """Runs once over OrtValues, by name: `values()` gives (inputs, outputs).

        `key` names the shapes of the call: it is bound once, and with a key seen before the same
        memory is read and written again. Raises EngineError when ONNX Runtime fails.
        """
        try:
            binding = self._bindings.get(key)
            if binding is None:
                binding = self._remember(key, self._bind(*values()))
            start = time.perf_counter_ns()
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"engine '{self.name}' failed: {error}") from error
        self._clock.engine_ns += time.perf_counter_ns() - start
        self._clock.calls[self.name] = self._clock.calls.get(self.name, 0) + 1

    def _remember(self, key: Hashable, binding: Any) -> Any:
        """Keeps the binding; the oldest one goes when there are too many."""
        while len(self._bindings) >= _MAX_BINDINGS:
            del self._bindings[next(iter(self._bindings))]
        self._bindings[key] = binding
        return binding

    def _bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding


@dataclass(frozen=True)
class Bound:
    """What a caller binds to an engine: every input, and the outputs that it may ask for.

    Both are read lazily, up to the first that the engine has not: a manifest may claim any
    number of layers.
    """

    inputs: Iterable[TensorSpec]
    outputs: Iterable[TensorSpec]


def cache_specs(
    prefix: str, num_layers: int, shape: tuple[int, int, int], dtype: str
) -> Iterator[TensorSpec]:
    """The caches `prefix`_k.0, `prefix`_v.0, ... of an engine; shape: Hkv, S, D."""
    for layer in range(num_layers):
        for kind in "kv":
            yield TensorSpec(f"{prefix}_{kind}.{layer}", dtype, ("B", *shape))


def load_session(bundle: Bundle, name: str, bound: Bound, threads: int, clock: Clock) -> Session:
    """Loads engine `name` of a bundle.

    Raises BundleError when it was built for another backend, cannot be loaded, or when its inputs
    and outputs are not those of its manifest and of `bound`.
    """
    _refuse_other_backend(bundle)
    path = bundle.path(bundle.manifest.engines[name].file)
    session = Session(path, name, threads, clock)
    check_tensors(bundle, name, session, bound, more_outputs=True)
    return session


class HasTensors(Protocol):
    """A graph that says what it takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def check_tensors(
    bundle: Bundle,
    name: str,
    graph: HasTensors,
    bound: Bound,
    *,
    more_outputs: bool,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Raises BundleError unless the graph of engine `name` has the tensors of its manifest and of
    `bound`; more_outputs: it may have outputs that nobody binds; fixed: symbols that it was loaded
    with a number for."""

    def loaded(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        return (replace(s, shape=tuple(fixed.get(str(d), d) for d in s.shape)) for s in specs)

    info = bundle.manifest.engines[name]
    where = f"engine '{name}' ({bundle.path(info.file)})"
    inputs, outputs = f"{where}: input", f"{where}: output"
    _compare(graph.inputs, loaded(info.inputs), inputs, "its manifest")
    _compare(graph.outputs, loaded(info.outputs), outputs, "its manifest")
    sizes = "the sizes in the manifest"
    _compare(graph.inputs, loaded(bound.inputs), inputs, sizes)
    _compare(graph.outputs, loaded(bound.outputs), outputs, sizes, more_allowed=more_outputs)


def _refuse_other_backend(bundle: Bundle) -> None:
    plan = bundle.manifest.plan
    if plan.backend != _BACKEND:
        raise BundleError(
            f"{bundle.root} was built for backend {plan.backend} in {plan.dtype}, here runs"
            f" {_BACKEND}: load it with device 'cuda' (--device cuda), or export it again with"
            f" --backend {_BACKEND} --dtype float32"
        )


def tensor_spec(value: Any) -> TensorSpec:
    """An input or output as ONNX Runtime describes it; an unnamed dimension is "?"."""
    dtype = _DTYPES.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
    return TensorSpec(value.name, dtype, tuple("?" if dim is None else dim for dim in value.shape))


def _compare(
    found: Sequence[TensorSpec],
    expected: Iterable[TensorSpec],
    where: str,
    source: str,
    *,
    more_allowed: bool = False,
) -> None:
    """Names, dtypes, ranks and static dimensions; what a symbolic dimension is called is free."""
    left = {spec.name: spec for spec in found}
    for spec in expected:
        own = left.pop(spec.name, None)
        if own is None or _static(own) != _static(spec):
            raise BundleError(
                f"{where} {_say(spec)} is asked for by {source}, the graph has"
                f" {'none of that name' if own is None else _say(own)}: export the bundle again"
            )
    if left and not more_allowed:
        raise BundleError(
            f"{where} {_say(next(iter(left.values())))} is unknown to {source}: export the bundle"
            " again"
        )


def _static(spec: TensorSpec) -> tuple[str, list[int | None]]:
    return spec.dtype, [dim if isinstance(dim, int) else None for dim in spec.shape]


def _say(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]"
