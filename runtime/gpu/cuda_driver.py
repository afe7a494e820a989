"""The driver protocol, implemented on the CUDA driver (package cuda-bindings).

It uses the low-level bindings rather than cuda-core's objects: every call has one name, one error
code and an owner in this file, which can be verified by reading where no GPU is available.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from eagle3.runtime.errors import DeviceError, Eagle3Error, EngineMissing
from eagle3.runtime.gpu.driver import Counters, DeviceBuffer, Graph, HostBuffer

_PACKAGES = "pip install 'eagle3[gpu]' or 'eagle3[tensorrt]'"


def import_cuda_driver() -> Any:
    """Return the module `cuda.bindings.driver`. Raises EngineMissing that says what to install."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineMissing(f"cuda-bindings is not installed: {_PACKAGES} ({error})") from error
    return driver


def _version(number: int) -> str:
    """Return a version number as text: 12040 becomes "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


class _CudaGraph:
    """An instantiated graph. num_bytes: bytes that each replay copies to the host."""

    def __init__(self, owner: CudaDriver, handle: Any, num_bytes: int) -> None:
        self._owner, self._handle, self._num_bytes = owner, handle, num_bytes

    def replay(self) -> None:
        """Launch the whole graph."""
        self._owner.counters.replays += 1
        self._owner.counters.bytes_to_host += self._num_bytes
        self._owner.call("cuGraphLaunch", self._handle, self._owner.stream_handle)


class CudaDriver:
    """The primary context of one device, with its own stream.

    Raises DeviceError if there is no driver, no device, or a driver older than the bindings, and
    EngineMissing if the package is not installed.
    """

    def __init__(self, index: int = 0) -> None:
        self._cuda = import_cuda_driver()
        self._cleanup: list[Callable[[], object]] = []
        self.counters = Counters()
        self._start()
        self._check_version()
        device = self._device(index)
        self.device_name = bytes(self.call("cuDeviceGetName", 128, device)).split(b"\0")[0].decode()
        self.compute_capability = self._capability(device)
        self._context = self.call("cuDevicePrimaryCtxRetain", device)
        self._cleanup.append(lambda: self.call("cuDevicePrimaryCtxRelease", device))
        self.attach()
        # Not the default stream: it cannot be captured, and other streams wait for it.
        non_blocking = int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream_handle = self.call("cuStreamCreate", non_blocking)
        self._cleanup.append(lambda: self.call("cuStreamDestroy", self.stream_handle))
        self.stream = int(self.stream_handle)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver function `name` and return its result. Raises DeviceError if it fails."""
        code, *results = getattr(self._cuda, name)(*arguments)
        if int(code) != 0:
            raise DeviceError(f"{name} failed: {self._say(code)}")
        return results[0] if len(results) == 1 else tuple(results)

    def attach(self) -> None:
        """Make the device current in the calling thread, since requests can come from
        any thread.
        """
        self.call("cuCtxSetCurrent", self._context)

    def allocate(self, num_bytes: int, what: str) -> DeviceBuffer:
        """Allocate zeroed device memory. Raises DeviceError with the sizes if there is
        not enough.
        """
        code, address = self._cuda.cuMemAlloc(max(num_bytes, 1))
        if int(code) == int(self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            free, total = self.call("cuMemGetInfo")
            raise DeviceError(
                f"{self.device_name} is out of memory: {what} needs {num_bytes / 2**20:.0f} MiB,"
                f" {free / 2**20:.0f} of {total / 2**20:.0f} MiB are free; end what else uses the"
                " GPU, or export with a smaller --max-seq-len or a smaller dtype"
            )
        if int(code) != 0:
            raise DeviceError(f"cuMemAlloc of {num_bytes} bytes failed: {self._say(code)}")
        self._cleanup.append(lambda: self.call("cuMemFree", address))
        buffer = DeviceBuffer(int(address), num_bytes)
        self.fill_zero(buffer.address, num_bytes)
        return buffer

    def allocate_host(self, num_bytes: int) -> HostBuffer:
        """Allocate zeroed pinned memory, visible as a numpy array."""
        address = int(self.call("cuMemHostAlloc", max(num_bytes, 1), 0))
        self._cleanup.append(lambda: self.call("cuMemFreeHost", address))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
        array[:] = 0
        return HostBuffer(array)

    def upload(self, target: int, source: HostBuffer, num_bytes: int, offset: int = 0) -> None:
        """Copy from host to device."""
        self.counters.bytes_to_device += num_bytes
        address = source.bytes.ctypes.data + offset
        self.call("cuMemcpyHtoDAsync", target, address, num_bytes, self.stream_handle)

    def download(self, target: HostBuffer, source: int, num_bytes: int, offset: int = 0) -> None:
        """Copy from device to host."""
        self.counters.bytes_to_host += num_bytes
        address = target.bytes.ctypes.data + offset
        self.call("cuMemcpyDtoHAsync", address, source, num_bytes, self.stream_handle)

    def fill_zero(self, address: int, num_bytes: int) -> None:
        """Set device memory to zero."""
        if num_bytes:
            self.call("cuMemsetD8Async", address, 0, num_bytes, self.stream_handle)

    def load_kernels(self, image: bytes, names: Sequence[str]) -> dict[str, Any]:
        """Return the functions `names` of a cubin."""
        module = self.call("cuModuleLoadData", image)
        self._cleanup.append(lambda: self.call("cuModuleUnload", module))
        return {name: self.call("cuModuleGetFunction", module, name.encode()) for name in names}

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        """Launch a one-dimensional grid. The driver copies the arguments before it returns."""
        self.counters.kernel_launches += 1
        values = [ctypes.c_int64(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (blocks, 1, 1, threads, 1, 1)
        params = ctypes.addressof(pointers)
        self.call("cuLaunchKernel", kernel, *shape, 0, self.stream_handle, params, 0)

    @contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        """Record what is issued inside the context. The list contains the graph afterwards."""
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream_handle, mode)
        graphs: list[Graph] = []
        before = self.counters.copy()
        try:
            yield graphs
        except BaseException:
            # discards its error: another one is being raised
            self._cuda.cuStreamEndCapture(self.stream_handle)
            raise
        recorded = self.call("cuStreamEndCapture", self.stream_handle)
        instance = self.call("cuGraphInstantiate", recorded, 0)
        self._cleanup.append(lambda: self.call("cuGraphExecDestroy", instance))
        self.call("cuGraphDestroy", recorded)
        graphs.append(_CudaGraph(self, instance, self.counters.since(before).bytes_to_host))
        self.counters = before  # nothing of it has run

    def synchronize(self) -> None:
        """Wait for the stream. An error of anything issued before is raised here."""
        self.counters.synchronizations += 1
        self.call("cuStreamSynchronize", self.stream_handle)

    def mark(self) -> Any:
        """Return an event recorded now."""
        event = self.call("cuEventCreate", 0)
        self._cleanup.append(lambda: self.call("cuEventDestroy", event))
        self.call("cuEventRecord", event, self.stream_handle)
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds on the device between two recorded events."""
        return float(self.call("cuEventElapsedTime", start, end))

    def close(self) -> None:
        """Free everything, newest first. Calling it again has no effect."""
        if not self._cleanup:
            return
        self.attach()
        self._cuda.cuStreamSynchronize(self.stream_handle)
        while self._cleanup:
            self._cleanup.pop()()

    def _start(self) -> None:
        no_driver = "no NVIDIA driver was found: install one, or use device='cpu'"
        try:
            (code,) = self._cuda.cuInit(0)
        # the bindings have their own class for a library that is not found
        except Exception as error:
            raise DeviceError(f"{no_driver} ({error})") from error
        result = self._cuda.CUresult
        if int(code) == int(result.CUDA_ERROR_NO_DEVICE):
            raise DeviceError(
                "the NVIDIA driver finds no GPU: check `nvidia-smi`, CUDA_VISIBLE_DEVICES and, in a"
                " container, --gpus; or use device='cpu'"
            )
        stub = int(result.CUDA_ERROR_STUB_LIBRARY)
        if int(code) == stub:
            raise DeviceError(f"{no_driver} (libcuda is only a stub)")
        if int(code) != 0:
            raise DeviceError(f"the NVIDIA driver does not start: {self._say(code)}")

    def _check_version(self) -> None:
        """Raise DeviceError if the driver supports only older major versions of CUDA."""
        found, needed = self.call("cuDriverGetVersion"), int(self._cuda.CUDA_VERSION)
        if found // 1000 < needed // 1000:
            raise DeviceError(
                f"the NVIDIA driver supports CUDA {_version(found)}, cuda-bindings is for CUDA"
                f" {_version(needed)}: update the driver, or install"
                f" 'cuda-bindings=={found // 1000}.*' and the packages that go with it"
            )

    def _device(self, index: int) -> Any:
        count = self.call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise DeviceError(
                f"GPU {index} does not exist, this machine has {count}: choose another"
            )
        return self.call("cuDeviceGet", index)

    def _capability(self, device: Any) -> str:
        attribute = self._cuda.CUdevice_attribute
        major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        return ".".join(str(self.call("cuDeviceGetAttribute", a, device)) for a in (major, minor))

    def _say(self, code: Any) -> str:
        """Return the driver's description of an error code."""
        try:
            _, text = self._cuda.cuGetErrorString(code)
        except Eagle3Error:
            raise
        except Exception:  # without a driver, use the name of the code
            text = None
        return text.decode() if text else str(code)
