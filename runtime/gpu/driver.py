"""What a round needs of CUDA, as a protocol: memory, copies, one stream, graphs, kernels.

`cuda_driver.py` implements it on the CUDA driver. The tests implement it on host memory and raise
errors for what is undefined on a GPU. Everything runs on one stream, in order; nothing issued is
complete before `synchronize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 256
"""Bytes; the alignment that TensorRT requires of bound addresses."""


@dataclass(frozen=True)
class DeviceBuffer:
    """Device memory. `address` is a multiple of ALIGNMENT and never changes."""

    address: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """Pinned host memory, which the device copies from and to asynchronously."""

    bytes: NDArray[np.uint8]

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return the whole buffer as an array of `dtype`."""
        return self.bytes.view(dtype)


@dataclass
class Counters:
    """Counts of issued work since the driver was created. The difference of two copies is the cost
    of a round.
    """

    replays: int = 0
    kernel_launches: int = 0
    engine_launches: int = 0
    synchronizations: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0

    def copy(self) -> Counters:
        """Return a copy of the counts."""
        return Counters(**vars(self))

    def since(self, before: Counters) -> Counters:
        """Return the counts since `before`."""
        return Counters(**{name: value - vars(before)[name] for name, value in vars(self).items()})


class Graph(Protocol):
    """Captured work, replayed with the addresses it was captured with."""

    def replay(self) -> None:
        """Launch the whole graph."""


class Driver(Protocol):
    """One device and one stream. Raises DeviceError if CUDA fails.

    device_name, compute_capability ("8.9"), stream (a CUstream as int): properties of the device
    in use.
    """

    device_name: str
    compute_capability: str
    stream: int
    counters: Counters

    def attach(self) -> None:
        """Make the device current in the calling thread, since requests can come from
        any thread.
        """

    def allocate(self, num_bytes: int, what: str) -> DeviceBuffer:
        """Allocate zeroed device memory, kept until `close`. `what` names it in the error if there
        is not enough.
        """

    def allocate_host(self, num_bytes: int) -> HostBuffer:
        """Allocate zeroed pinned host memory, kept until `close`."""

    def upload(self, target: int, source: HostBuffer, num_bytes: int, offset: int = 0) -> None:
        """Copy from `offset` of the pinned buffer to a device address. The host must not change
        the source until the next `synchronize`.
        """

    def download(self, target: HostBuffer, source: int, num_bytes: int, offset: int = 0) -> None:
        """Copy from a device address to `offset` of the pinned buffer."""

    def fill_zero(self, address: int, num_bytes: int) -> None:
        """Set device memory to zero."""

    def load_kernels(self, image: bytes, names: Sequence[str]) -> dict[str, Any]:
        """Return the functions `names` of a compiled module, by name."""

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        """Launch a kernel whose parameters are all 64 bits wide."""

    def capture(self) -> AbstractContextManager[list[Graph]]:
        """Record, instead of run, what is issued inside. The list contains the graph afterwards."""

    def synchronize(self) -> None:
        """Wait until everything issued is complete: the only point where the host waits."""

    def mark(self) -> Any:
        """Return a point in the stream, for `elapsed_ms`."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds on the device between two completed marks."""

    def close(self) -> None:
        """Free everything. The driver must not be used afterwards."""
