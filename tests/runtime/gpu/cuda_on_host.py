"""kernels.cu compiled as C++: every thread of a launch is a call, in any order."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from eagle3.runtime.gpu.kernels import KERNELS, source

COMPILER = shutil.which("g++") or shutil.which("clang++")

_SHIM = """
#define __global__
#define __device__
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim;
#include "kernels.cu"
extern "C" void set_thread(unsigned block, unsigned thread, unsigned threads)
{
    blockIdx.x = block;
    threadIdx.x = thread;
    blockDim.x = threads;
}
"""


def compile_for_host(folder: Path) -> dict[str, Callable[..., None]]:
    """Every kernel as a function (blocks, threads, *arguments). Threads run in random order: a
    kernel that needs one of them to come first fails sooner or later."""
    assert COMPILER is not None
    (folder / "kernels.cu").write_text(source())
    (folder / "shim.cpp").write_text(_SHIM)
    library = folder / "kernels.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [COMPILER, *options, "-I", str(folder), str(folder / "shim.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    loaded = ctypes.CDLL(str(library))
    rng = np.random.default_rng(0)

    def as_function(name: str) -> Callable[..., None]:
        kernel = getattr(loaded, name)

        def launch(blocks: int, threads: int, *arguments: int) -> None:
            values = [ctypes.c_int64(argument) for argument in arguments]
            for index in rng.permutation(blocks * threads).tolist():
                loaded.set_thread(index // threads, index % threads, threads)
                kernel(*values)

        launch.takes_threads = True  # type: ignore[attr-defined]
        return launch

    return {name: as_function(name) for name in KERNELS}
