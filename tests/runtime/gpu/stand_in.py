"""A stand-in for the CUDA driver on host memory, stricter than the driver.

Nothing that is issued runs before `synchronize`: a host that reads too early sees old numbers, one
that overwrites what is still to be uploaded uploads the wrong ones. What a GPU would punish with a
wrong number or a crash is refused here by `RuleBroken`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.gpu.driver import ALIGNMENT, Counters, DeviceBuffer, Graph, HostBuffer

STREAM = 0x57AEA
_GUARD = 64


class RuleBroken(AssertionError):
    """Something that would be wrong, or undefined, on a GPU."""


class Memory:
    """Allocations on the host that pass for device memory."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[NDArray[np.uint8], int]] = {}  # address -> bytes, size

    def allocate(self, num_bytes: int) -> int:
        raw = np.zeros(num_bytes + ALIGNMENT + _GUARD, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        address = raw.ctypes.data + start
        own = raw[start:]
        own[num_bytes:] = 0xA5
        self._live[address] = (own, num_bytes)
        return address

    def free(self, address: int) -> None:
        del self._live[address]

    def view(self, address: int, dtype: Any, count: int) -> NDArray[Any]:
        """`count` elements at an address; refused unless they lie in one live allocation."""
        size = int(count) * np.dtype(dtype).itemsize
        for start, (own, length) in self._live.items():
            if start <= address and address + size <= start + length:
                part = own[address - start : address - start + size]
                return part.view(dtype)
        raise RuleBroken(f"{size} bytes at {address:#x} are no live allocation")

    def check_guards(self) -> None:
        """Nothing wrote behind an allocation."""
        for address, (own, length) in self._live.items():
            if not (own[length : length + _GUARD] == 0xA5).all():
                raise RuleBroken(f"something wrote behind the allocation at {address:#x}")


@dataclass(frozen=True)
class Operation:
    """Something on the stream. still_valid: raises RuleBroken where a replay may not run it."""

    run: Callable[[], object]
    still_valid: Callable[[], object] = lambda: None
    bytes_to_host: int = 0


class StandInGraph:
    def __init__(self, driver: StandInDriver, operations: Sequence[Operation]) -> None:
        self._driver, self._operations = driver, tuple(operations)

    def replay(self) -> None:
        self._driver.counters.replays += 1
        for operation in self._operations:
            operation.still_valid()
            self._driver.counters.bytes_to_host += operation.bytes_to_host
            self._driver.issue(operation)


class StandInDriver:
    """kernels: by name, functions (blocks, *arguments)."""

    device_name = "a stand-in"
    stream = STREAM

    def __init__(
        self,
        compute_capability: str = "8.9",
        kernels: Callable[[Memory], Mapping[str, Callable[..., None]]] | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        from numpy_kernels import NumpyKernels

        self.compute_capability, self._left = compute_capability, capacity_bytes
        self.memory, self.counters = Memory(), Counters()
        self._queue: list[Operation] = []
        self._thread = threading.get_ident()  # where the device is current
        self._captured: list[Operation] | None = None
        self._pinned: list[NDArray[np.uint8]] = []
        self._kernels = kernels(self.memory) if kernels else NumpyKernels(self.memory)

    @property
    def capturing(self) -> bool:
        return self._captured is not None

    def issue(self, operation: Operation) -> None:
        if self._thread != threading.get_ident():
            raise RuleBroken("the device is not current in this thread")
        (self._queue if self._captured is None else self._captured).append(operation)

    def attach(self) -> None:
        self._thread = threading.get_ident()

    def allocate(self, num_bytes: int, what: str) -> DeviceBuffer:
        from eagle3.runtime.errors import DeviceError

        if self.capturing:
            raise RuleBroken(f"an allocation inside a capture ({what})")
        if self._left is not None:
            self._left -= num_bytes
            if self._left < 0:
                raise DeviceError(f"{self.device_name} is out of memory: {what}")
        return DeviceBuffer(self.memory.allocate(num_bytes), num_bytes)

    def allocate_host(self, num_bytes: int) -> HostBuffer:
        if self.capturing:
            raise RuleBroken("a pinned allocation inside a capture")
        self._pinned.append(np.zeros(num_bytes, np.uint8))
        return HostBuffer(self._pinned[-1])

    def upload(self, target: int, source: HostBuffer, num_bytes: int, offset: int = 0) -> None:
        self._check_pinned(source)
        if not self.capturing:
            self.counters.bytes_to_device += num_bytes
        self.memory.view(target, np.uint8, num_bytes)

        def run() -> None:
            part = source.bytes[offset : offset + num_bytes]
            self.memory.view(target, np.uint8, num_bytes)[:] = part

        self.issue(Operation(run))

    def download(self, target: HostBuffer, source: int, num_bytes: int, offset: int = 0) -> None:
        self._check_pinned(target)
        if not self.capturing:
            self.counters.bytes_to_host += num_bytes
        self.memory.view(source, np.uint8, num_bytes)

        def run() -> None:
            part = self.memory.view(source, np.uint8, num_bytes)
            target.bytes[offset : offset + num_bytes] = part

        self.issue(Operation(run, bytes_to_host=num_bytes))

    def fill_zero(self, address: int, num_bytes: int) -> None:
        self.memory.view(address, np.uint8, num_bytes)
        self.issue(Operation(lambda: self.memory.view(address, np.uint8, num_bytes).fill(0)))

    def load_kernels(self, image: bytes, names: Sequence[str]) -> dict[str, Any]:
        if isinstance(self._kernels, Mapping):
            return {name: self._kernels[name] for name in names}
        return {name: getattr(self._kernels, name) for name in names}

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        if blocks < 1 or not 1 <= threads <= 1024:
            raise RuleBroken(f"a launch of {blocks} blocks of {threads} threads")
        if not self.capturing:
            self.counters.kernel_launches += 1
        given = [int(argument) for argument in arguments]
        if getattr(kernel, "takes_threads", False):
            self.issue(Operation(lambda: kernel(blocks, threads, *given)))
        else:
            self.issue(Operation(lambda: kernel(blocks, *given)))

    @contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        if self.capturing:
            raise RuleBroken("a capture inside a capture")
        self._captured, graphs = [], []
        try:
            yield graphs
            graphs.append(StandInGraph(self, self._captured))
        finally:
            self._captured = None

    def synchronize(self) -> None:
        if self.capturing:
            raise RuleBroken("a synchronization inside a capture")
        if self._thread != threading.get_ident():
            raise RuleBroken("the device is not current in this thread")
        self.counters.synchronizations += 1
        queue, self._queue = self._queue, []
        for operation in queue:
            operation.run()
        self.memory.check_guards()

    def mark(self) -> Any:
        return None

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return 0.0

    def close(self) -> None:
        self._queue.clear()

    def _check_pinned(self, buffer: HostBuffer) -> None:
        if not any(buffer.bytes is each for each in self._pinned):
            raise RuleBroken("an asynchronous copy of memory that is not pinned")
