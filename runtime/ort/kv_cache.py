"""Buffers and KV caches that are allocated once and shared with ONNX Runtime.

A `Buffer` owns its memory for the lifetime of the engine; each call uses a view of its first
elements. The past and present tensors of a cache are the same OrtValue, so an engine updates the
cache in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from eagle3.runtime.ort.ort_library import import_onnxruntime

_ALIGNMENT = 64  # bytes; the alignment that suits ONNX Runtime's kernels


def aligned_zeros(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros with an aligned first byte.

    Memory pages are touched only when they are written.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class Buffer:
    """Memory for one input or output, with cached views of its first elements by shape."""

    def __init__(self, capacity: int, dtype: DTypeLike) -> None:
        self._flat = aligned_zeros((capacity,), dtype)
        self._values: dict[tuple[int, ...], tuple[NDArray[Any], Any]] = {}

    def view(self, *shape: int) -> NDArray[Any]:
        """Return the first elements as an array of `shape`. The next call may overwrite it."""
        return self._entry(shape)[0]

    def value(self, *shape: int) -> Any:
        """Return `view(*shape)` as an OrtValue on the same memory."""
        return self._entry(shape)[1]

    def _entry(self, shape: tuple[int, ...]) -> tuple[NDArray[Any], Any]:
        entry = self._values.get(shape)
        if entry is None:
            array = self._flat[: int(np.prod(shape))].reshape(shape)
            entry = self._values[shape] = (array, ort_value(array))
        return entry


def ort_value(array: NDArray[Any]) -> Any:
    """Return an OrtValue that shares the memory of `array`."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, "cpu")


class KvCache:
    """The keys and values of every layer for B sequences, in one block [2, L, B, Hkv, S, D].

    Slots 0 .. past-1 contain committed tokens; the slots after them may be overwritten.

    Letters: L layers, B sequences, Hkv key-value heads, S capacity in slots, D head size.
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
        """Return the inputs past_* and the outputs present_* of sequences start .. stop-1.

        The default is all sequences. Both refer to the same memory.
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
        """Copy slots 0 .. stop-1 of sequence `source` to sequence `target`."""
        self.block[:, :, target, :, :stop] = self.block[:, :, source, :, :stop]

    def clear(self, start: int = 0, stop: int | None = None) -> None:
        """Zero slots start .. stop-1 of all sequences.

        This removes NaN: a masked slot has attention weight 0, but 0 times NaN is NaN.
        """
        self.block[..., start:stop, :] = 0

    def keep(self, past: int, nodes: Sequence[int]) -> None:
        """Move slots past + nodes to past, past + 1, ..., so the accepted path is contiguous.

        nodes: node indices in ascending order. A slot is never moved to the right, and a prefix
        that is already in place is not copied.
        """
        first = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if first == len(nodes):
            return
        moved = np.asarray(nodes[first:]) + past
        self.block[..., past + first : past + len(nodes), :] = self.block[..., moved, :]
