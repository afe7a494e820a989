"""Find the TensorRT library of this machine and the GPUs it can build for.

Two libraries have the same API: `tensorrt` builds for the GPU it runs on, and `tensorrt-rtx` builds
for any compute capability it supports, even without a GPU. polygraphy works with either of them,
but only with one per process.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from eagle3.runtime.errors import BuildError, EngineMissing

MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
"""Name of the library, as in a plan's `backend` -> name of its Python module."""
_INSTALL = {
    "tensorrt-rtx": (
        "pip install 'eagle3[tensorrt-rtx]' && pip install --no-deps tensorrt-rtx-cu13"
        " (it builds without a GPU)"
    ),
    "tensorrt": "pip install 'eagle3[tensorrt]' (on the device itself)",
}


@dataclass(frozen=True)
class Library:
    """An imported TensorRT library. name: a key of MODULES. module: the imported Python module."""

    name: str
    module: Any
    version: str

    @property
    def compute_capabilities(self) -> tuple[str, ...] | None:
        """Supported compute capabilities such as "8.9"; None if it only builds for this machine."""
        if self.name != "tensorrt-rtx":
            return None
        names = [name for name in self.module.ComputeCapability.__members__ if name[2:].isdigit()]
        numbers = sorted(int(name.removeprefix("SM")) for name in names)
        return tuple(f"{number // 10}.{number % 10}" for number in numbers)


def find_library(name: str | None = None) -> Library:
    """Import the library `name`, or by default the one that is installed.

    Raises EngineMissing, with the command to install it, if the library is not installed or cannot
    be loaded. Raises BuildError if `name` is not a TensorRT library, if `name` is None and both are
    installed, or if the library is too old.
    """
    wanted = tuple(MODULES) if name is None else (name,)
    if not set(wanted) <= set(MODULES):
        raise BuildError(f"backend {name!r} does not use plan files: choose {' or '.join(MODULES)}")
    found, reasons = [], []
    for each in wanted:
        try:
            module = importlib.import_module(MODULES[each])
            found.append(Library(each, module, str(module.__version__)))
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(str(error))
    if len(found) > 1:
        both = " and ".join(f"{each.name} {each.version}" for each in found)
        raise BuildError(f"{both} are both installed: choose one with --backend")
    if not found:
        ways = "; or: ".join(_INSTALL[each] for each in wanted)
        raise EngineMissing(
            f"no TensorRT library is installed (searched for {' or '.join(wanted)}): {ways}"
            f" ({'; '.join(reasons)})"
        )
    library = found[0]
    if not hasattr(library.module, "IKVCacheUpdateLayer"):
        raise BuildError(
            f"{library.name} {library.version} cannot update a KV cache in place: install 10.15 or"
            " newer"
        )
    return library


def polygraphy_of(library: Library) -> Any:
    """Import the package polygraphy and set it to use `library`.

    Raises EngineMissing if polygraphy is not installed, and BuildError if this process already uses
    polygraphy with the other library.
    """
    is_rtx = library.name == "tensorrt-rtx"
    try:
        config: Any = importlib.import_module("polygraphy.config")
    except ImportError as error:
        raise EngineMissing(
            "building plan files requires polygraphy: pip install"
            f" 'eagle3[{library.name}]' ({error})"
        ) from error
    if "polygraphy.backend.trt" in sys.modules and is_rtx != config.USE_TENSORRT_RTX:
        raise BuildError(
            f"this process already uses polygraphy with the other TensorRT library, and polygraphy"
            f" supports only one per process: build for {library.name} in another process"
        )
    config.USE_TENSORRT_RTX = is_rtx  # polygraphy.backend.trt reads this when first imported
    importlib.import_module("polygraphy.backend.trt")
    if is_rtx:
        importlib.import_module("polygraphy.backend.tensorrt_rtx")
    return sys.modules["polygraphy"]


def target_capability(library: Library, asked: str | None) -> str:
    """Return the compute capability to build for.

    asked: by default that of this machine's GPU. Raises BuildError, with the supported ones, if the
    library cannot build for it, or if it is needed and this machine has no GPU.
    """
    known = library.compute_capabilities
    if asked is not None and known is not None:
        if asked not in known:
            raise BuildError(
                f"compute capability {asked} is not supported by {library.name} {library.version},"
                f" which supports {', '.join(known)}: choose one of these with"
                " --compute-capability, or build with --backend tensorrt on the device itself"
            )
        return asked
    here = gpu_capability()
    if here is None:
        way = "specify the GPU with --compute-capability, for example 8.9"
        if known is None:
            way = "build on the device itself, or here with --backend tensorrt-rtx"
        raise BuildError(
            f"{library.name} {library.version} builds for the GPU of this machine, but no GPU was"
            f" found: {way}"
        )
    if asked not in (None, here):
        raise BuildError(
            f"{library.name} builds only for the GPU of this machine, which has compute capability"
            f" {here}, but {asked} was requested: build on the device itself, or with --backend"
            " tensorrt-rtx"
        )
    return here if known is None else target_capability(library, here)


def gpu_capability() -> str | None:
    """Return the compute capability of the first GPU, such as "8.9".

    Returns None if there is no GPU, no driver or no cuda-core.
    """
    try:
        device = importlib.import_module("cuda.core").Device(0)
        major, minor = device.compute_capability
    except Exception:  # a missing package, driver or GPU raises various types
        return None
    return f"{major}.{minor}"
