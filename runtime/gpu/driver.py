"""What a round needs of CUDA, as a protocol: memory, copies, one stream, graphs, kernels.

`cuda_driver.py` implements it on the CUDA driver; the tests implement it on host memory and refuse
what a GPU would only punish. Everything runs on the driver's one stream, in order; nothing that was
issued may be taken as done before `synchronize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 256
"""Bytes; what TensorRT asks of every address that is bound."""


@dataclass(frozen=True)
class DeviceBuffer:
    """Device memory; `address` is a multiple of ALIGNMENT and never moves."""

    address: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """Pinned host memory, which the device copies from and to while the host goes on."""

    bytes: NDArray[np.uint8]

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """All of it, as elements of `dtype`."""
        return self.bytes.view(dtype)


@dataclass
class Counters:
    """What was issued since the driver was made; differences of copies say what a round cost."""

    replays: int = 0
    kernel_launches: int = 0
    engine_launches: int = 0
    synchronizations: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0

    def copy(self) -> Counters:
        """The counts as they stand."""
        return Counters(**vars(self))

    def since(self, before: Counters) -> Counters:
        """What was counted after `before` was copied."""
        return Counters(**{name: value - vars(before)[name] for name, value in vars(self).items()})


class Graph(Protocol):
    """Captured work, replayed with the addresses it was captured with."""

    def replay(self) -> None:
        """Issues all of it at once."""


class Driver(Protocol):
    """One device and one stream. Raises DeviceError where CUDA fails.

    device_name, compute_capability ("8.9"), stream (a CUstream as int): of the device in use.
    """

    device_name: str
    compute_capability: str
    stream: int
    counters: Counters

    def attach(self) -> None:
        """Makes the device current in the calling thread; requests may come from any."""

    def allocate(self, num_bytes: int, what: str) -> DeviceBuffer:
        """Zeroed device memory, kept until `close`; `what` names it where there is not enough."""

    def allocate_host(self, num_bytes: int) -> HostBuffer:
        """Zeroed pinned host memory, kept until `close`."""

    def upload(self, target: int, source: HostBuffer, num_bytes: int, offset: int = 0) -> None:
        """Copies from `offset` of the pinned buffer to a device address; the host must leave the
        source as it is until the next `synchronize`."""

    def download(self, target: HostBuffer, source: int, num_bytes: int, offset: int = 0) -> None:
        """Copies from a device address to `offset` of the pinned buffer."""

    def fill_zero(self, address: int, num_bytes: int) -> None:
        """Sets device memory to zero."""

    def load_kernels(self, image: bytes, names: Sequence[str]) -> dict[str, Any]:
        """The functions `names` of a compiled module, by name."""

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        """Launches a kernel whose parameters are all 64 bits wide."""

    def capture(self) -> AbstractContextManager[list[Graph]]:
        """What is issued inside is not run but recorded; the list holds the graph afterwards."""

    def synchronize(self) -> None:
        """Waits until everything issued is done: the only point where the host waits."""

    def mark(self) -> Any:
        """A point in the stream, for `elapsed_ms`."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds on the device between two marks that were passed."""

    def close(self) -> None:
        """Frees everything; nothing of this driver may be used afterwards."""
