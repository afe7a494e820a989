"""Checks that the inputs and outputs of an engine match its manifest and what a caller binds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import TensorSpec
from eagle3.runtime.errors import BundleError

_DTYPES = {"tensor(float)": "float32"}  # any other `tensor(X)` is named X


@dataclass(frozen=True)
class Bound:
    """The tensors that a caller binds to an engine.

    inputs: every input. outputs: the outputs that the caller may request.
    Both are read lazily, up to the first tensor that the engine does not have, because a manifest
    may claim any number of layers.
    """

    inputs: Iterable[TensorSpec]
    outputs: Iterable[TensorSpec]


def cache_specs(
    prefix: str, num_layers: int, shape: tuple[int, int, int], dtype: str
) -> Iterator[TensorSpec]:
    """Yield the cache tensors `prefix`_k.0, `prefix`_v.0, ... of an engine.

    shape: (Hkv, S, D), that is key-value heads, capacity in slots and head size.
    """
    for layer in range(num_layers):
        for kind in "kv":
            yield TensorSpec(f"{prefix}_{kind}.{layer}", dtype, ("B", *shape))


class HasTensors(Protocol):
    """A graph that lists its inputs and outputs."""

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
    """Raise BundleError unless the graph of engine `name` matches its manifest and `bound`.

    more_outputs: whether the graph may have outputs that the caller does not bind.
    fixed: values of symbolic dimensions that became constants when the graph was loaded.
    """

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


def tensor_spec(value: Any) -> TensorSpec:
    """Return the TensorSpec of an ONNX Runtime input or output. An unnamed dimension is "?"."""
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
    """Raise BundleError unless `found` matches `expected`.

    Names, dtypes, ranks and static dimensions must match; the names of symbolic dimensions need
    not.
    """
    left = {spec.name: spec for spec in found}
    for spec in expected:
        own = left.pop(spec.name, None)
        if own is None or _static(own) != _static(spec):
            raise BundleError(
                f"{where} {_say(spec)} is required by {source}, but the graph has"
                f" {'none of that name' if own is None else _say(own)}: export the bundle again"
            )
    if left and not more_allowed:
        raise BundleError(
            f"{where} {_say(next(iter(left.values())))} is not expected by {source}: export the"
            " bundle again"
        )


def _static(spec: TensorSpec) -> tuple[str, list[int | None]]:
    return spec.dtype, [dim if isinstance(dim, int) else None for dim in spec.shape]


def _say(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]"
