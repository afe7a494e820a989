"""The kernels of `kernels.cu`: compiled for the device in use, launched by name.

NVRTC compiles them when a bundle is loaded, not when it is exported: the source belongs to this
package, so it always matches the code that launches it, the bundle contains nothing more that can
become stale, and it takes a fraction of a second. They are compiled to a cubin rather than to PTX,
because a driver runs cubins of a newer minor version of CUDA, but not PTX.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from eagle3.runtime.errors import DeviceError, EngineMissing
from eagle3.runtime.gpu.driver import Driver

KERNELS = (
    "place_tree",
    "accept_greedy",
    "keep_kv",
    "clear_kv",
    "feed_draft",
    "advance",
    "count_fed",
    "draft_done",
)
_THREADS = 128


def source() -> str:
    """Return the text of kernels.cu."""
    return files("eagle3.runtime.gpu").joinpath("kernels.cu").read_text(encoding="utf-8")


def compile_kernels(compute_capability: str) -> bytes:
    """Compile kernels.cu to a cubin for a compute capability such as "8.9". Needs NVRTC, but no
    GPU.

    Raises EngineMissing without NVRTC, and DeviceError if NVRTC does not support the device or
    rejects the source.
    """
    nvrtc = _import_nvrtc()
    _, program = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(source().encode(), b"kernels.cu", 0, None, None)
    )
    architecture = f"sm_{compute_capability.replace('.', '')}"
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code) != 0:
            raise DeviceError(
                f"NVRTC {_version(nvrtc)} cannot compile the kernels for {architecture}"
                f" ({code.name}): {_log(nvrtc, program)}; for a newer GPU, upgrade"
                " nvidia-cuda-nvrtc"
            )
        _, size = _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        image: bytes = b" " * size
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, image))
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _import_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the first call loads the library
    except Exception as error:  # the bindings have their own class for a missing library
        raise EngineMissing(
            f"NVRTC is not installed: pip install 'eagle3[gpu]' or 'eagle3[tensorrt]' ({error})"
        ) from error
    return nvrtc


def _checked(nvrtc: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(results[0]) != 0:
        raise DeviceError(f"NVRTC {_version(nvrtc)} failed: {results[0].name}")
    return results


def _version(nvrtc: Any) -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _log(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    return " ".join(log.decode(errors="replace").strip("\0 \n").split())


class Kernels:
    """The functions of kernels.cu on a driver. Arguments are addresses and integers, in order."""

    def __init__(self, driver: Driver, image: bytes) -> None:
        self._driver = driver
        self._functions = driver.load_kernels(image, KERNELS)

    def launch(self, name: str, *arguments: int, blocks: int = 1, threads: int = _THREADS) -> None:
        """Launch `blocks` blocks of `threads` threads."""
        self._driver.launch(self._functions[name], blocks, threads, arguments)

    def launch_rows(self, name: str, num_rows: int, *arguments: int) -> None:
        """Launch one thread per row, `num_rows` in all."""
        self.launch(name, *arguments, blocks=-(-num_rows // _THREADS))
