"""Buffers and KV caches that are allocated once and shared with ONNX Runtime.

A `Buffer` owns its memory for the life of the engine; a call sees views of its front. Past and
present of a cache are the same OrtValue, so an engine writes it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from eagle3.runtime.ort.ort_library import import_onnxruntime

_ALIGNMENT = 64  # bytes; what ONNX Runtime's kernels like


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
