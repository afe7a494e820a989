"""The driver without a GPU: the real bindings take its calls, its errors say what to do.

Every call goes through `cuda.bindings` first, which converts the arguments before it misses the
driver's library: an argument of a wrong type or number is found here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eagle3.runtime.errors import DeviceError, EngineMissing
from eagle3.runtime.gpu.cuda_driver import CudaDriver
from eagle3.runtime.gpu.driver import ALIGNMENT

real = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
MODULE = "eagle3.runtime.gpu.cuda_driver.import_cuda_driver"

try:
    real.cuInit(0)
    HAS_DRIVER = True
except Exception:
    HAS_DRIVER = False
pytestmark = pytest.mark.skipif(
    HAS_DRIVER, reason="a driver is here: bench/gpu_check.py is the test"
)

Code = real.CUresult


class FakeCuda:
    """`cuda.bindings.driver` on a machine with one GPU; `results` overrides what a call returns."""

    def __init__(self, **results: Any) -> None:
        self.results, self.calls = results, []  # type: tuple[dict[str, Any], list[str]]
        self._memory: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(real, name)
        if not name.startswith("cu") or not callable(found):
            return found
        return lambda *arguments: self._call(name, found, arguments)

    def _call(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with pytest.raises(Exception, match="NVIDIA driver"):
            function(*arguments)
        self.calls.append(name)
        if name in self.results:
            return self.results[name]
        defaults: dict[str, Any] = {
            "cuDeviceGetName": (b"Fake GPU\0\0",),
            "cuDeviceGetAttribute": (9,),
            "cuDeviceGetCount": (1,),
            "cuDeviceGet": (real.CUdevice(0),),
            "cuDriverGetVersion": (13000,),
            "cuDevicePrimaryCtxRetain": (real.CUcontext(1),),
            "cuStreamCreate": (real.CUstream(77),),
            "cuMemAlloc": (real.CUdeviceptr(1 << 20),),
            "cuMemGetInfo": (3 << 20, 8 << 20),
            "cuModuleLoadData": (real.CUmodule(2),),
            "cuModuleGetFunction": (real.CUfunction(3),),
            "cuStreamEndCapture": (real.CUgraph(4),),
            "cuGraphInstantiate": (real.CUgraphExec(5),),
            "cuEventCreate": (real.CUevent(6),),
            "cuEventElapsedTime": (1.5,),
            "cuGetErrorString": (b"out of luck",),
        }
        if name == "cuMemHostAlloc":
            block = (ctypes.c_uint8 * arguments[0])()
            self._memory.append(block)
            return (Code.CUDA_SUCCESS, ctypes.addressof(block))
        return (Code.CUDA_SUCCESS, *defaults.get(name, ()))


def driver_on(monkeypatch: pytest.MonkeyPatch, **results: Any) -> tuple[CudaDriver, FakeCuda]:
    fake = FakeCuda(**results)
    monkeypatch.setattr(MODULE, lambda: fake)
    return CudaDriver(), fake


def test_every_call_is_one_the_bindings_take(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, fake = driver_on(monkeypatch)
    assert (driver.device_name, driver.compute_capability) == ("Fake GPU", "9.9")
    assert driver.stream == 77
    buffer = driver.allocate(1000, "something")
    assert (buffer.address % ALIGNMENT, buffer.num_bytes) == (0, 1000)
    pinned = driver.allocate_host(64)
    pinned.view(np.int64)[:] = 5
    driver.upload(buffer.address, pinned, 16, 8)
    driver.download(pinned, buffer.address, 8)
    kernel = driver.load_kernels(b"image", ["advance"])["advance"]
    driver.launch(kernel, 2, 32, [buffer.address, -1, 1 << 62])
    with driver.capture() as graphs:
        driver.download(pinned, buffer.address, 24)
        driver.launch(kernel, 1, 1, [])
    counted = driver.counters.copy()
    graphs[0].replay()
    driver.synchronize()
    assert driver.elapsed_ms(driver.mark(), driver.mark()) == 1.5
    cost = driver.counters.since(counted)
    assert (cost.replays, cost.bytes_to_host, cost.synchronizations) == (1, 24, 1)
    assert (counted.bytes_to_host, counted.kernel_launches) == (8, 1), "a capture runs nothing"
    driver.close()
    freed = {"cuMemFree", "cuMemFreeHost", "cuModuleUnload", "cuGraphExecDestroy", "cuGraphDestroy"}
    freed |= {"cuEventDestroy", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"}
    assert freed <= set(fake.calls)
    assert fake.calls[-2:] == ["cuStreamDestroy", "cuDevicePrimaryCtxRelease"], "newest first"


def test_a_launch_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def launch(*arguments: Any) -> Any:
        pointers = (ctypes.c_void_p * 3).from_address(arguments[9])
        seen.extend(ctypes.c_int64.from_address(pointer).value for pointer in pointers)
        return (Code.CUDA_SUCCESS,)

    driver, fake = driver_on(monkeypatch)
    kernel = driver.load_kernels(b"image", ["advance"])["advance"]
    fake.cuLaunchKernel = launch  # type: ignore[attr-defined]
    driver.launch(kernel, 4, 32, [1 << 40, -7, 0])
    assert seen == [1 << 40, -7, 0]


def test_a_failed_capture_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, fake = driver_on(monkeypatch)
    with pytest.raises(ZeroDivisionError), driver.capture():
        raise ZeroDivisionError
    assert fake.calls[-2:] == ["cuStreamBeginCapture", "cuStreamEndCapture"]


def test_no_driver() -> None:
    with pytest.raises(DeviceError, match=r"no NVIDIA driver was found: .* device='cpu'"):
        CudaDriver()


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"cuInit": (Code.CUDA_ERROR_NO_DEVICE,)}, "finds no GPU: check `nvidia-smi`"),
        ({"cuInit": (Code.CUDA_ERROR_STUB_LIBRARY,)}, "no NVIDIA driver .*libcuda is only a stub"),
        ({"cuInit": (Code.CUDA_ERROR_SYSTEM_NOT_READY,)}, "does not start: out of luck"),
        (
            {"cuDriverGetVersion": (Code.CUDA_SUCCESS, 12040)},
            r"supports CUDA 12.4, cuda-bindings is for CUDA 13.*'cuda-bindings==12.\*'",
        ),
        ({"cuDeviceGetCount": (Code.CUDA_SUCCESS, 0)}, "GPU 0 does not exist, this machine has 0"),
        (
            {"cuStreamCreate": (Code.CUDA_ERROR_OUT_OF_MEMORY,)},
            "cuStreamCreate failed: out of luck",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        driver_on(monkeypatch, **results)


def test_out_of_memory_names_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = driver_on(monkeypatch, cuMemAlloc=(Code.CUDA_ERROR_OUT_OF_MEMORY, 0))
    message = "the target's cache needs 2048 MiB, 3 of 8 MiB are free; .* smaller --max-seq-len"
    with pytest.raises(DeviceError, match=message):
        driver.allocate(2 << 30, "the target's cache")


def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(EngineMissing, match=r"cuda-bindings is not installed: pip install"):
        CudaDriver()
