"""Finds the TensorRT library of this machine, and what it can build for.

Two libraries have the same API. `tensorrt` builds for the GPU it runs on; `tensorrt-rtx` builds for
any compute capability it knows, also where no GPU is. polygraphy drives either, one in a process.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from eagle3.runtime.errors import BuildError, EngineMissing

MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
"""Library, as a plan's `backend` names it -> its module."""
_INSTALL = {
    "tensorrt-rtx": (
        "pip install 'eagle3[tensorrt-rtx]' && pip install --no-deps tensorrt-rtx-cu13"
        " (it builds without a GPU)"
    ),
    "tensorrt": "pip install 'eagle3[tensorrt]' (on the device itself)",
}


@dataclass(frozen=True)
class Library:
    """An imported TensorRT. name: a key of MODULES; module: `tensorrt` or `tensorrt_rtx`."""

    name: str
    module: Any
    version: str

    @property
    def compute_capabilities(self) -> tuple[str, ...] | None:
        """What it can build for, as "8.9"; None: for the GPU of this machine alone."""
        if self.name != "tensorrt-rtx":
            return None
        names = [name for name in self.module.ComputeCapability.__members__ if name[2:].isdigit()]
        numbers = sorted(int(name.removeprefix("SM")) for name in names)
        return tuple(f"{number // 10}.{number % 10}" for number in numbers)


def find_library(name: str | None = None) -> Library:
    """The library `name`, or whichever is installed.

    Raises EngineMissing, with what to install, when it is not there or cannot be loaded, and
    BuildError when both are there and none was named.
    """
    wanted = tuple(MODULES) if name is None else (name,)
    if not set(wanted) <= set(MODULES):
        raise BuildError(
            f"backend is {name!r}, which needs no plan files: choose {' or '.join(MODULES)}"
        )
    found, reasons = [], []
    for each in wanted:
        try:
            module = importlib.import_module(MODULES[each])
            found.append(Library(each, module, str(module.__version__)))
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(str(error))
    if len(found) > 1:
        both = " and ".join(f"{each.name} {each.version}" for each in found)
        raise BuildError(f"{both} are both installed: say which, with --backend")
    if not found:
        ways = "; or: ".join(_INSTALL[each] for each in wanted)
        raise EngineMissing(
            f"no TensorRT library for {' or '.join(wanted)} is installed: {ways}"
            f" ({'; '.join(reasons)})"
        )
    library = found[0]
    if not hasattr(library.module, "IKVCacheUpdateLayer"):
        raise BuildError(
            f"{library.name} {library.version} cannot update a cache in place: install 10.15 or"
            " newer"
        )
    return library


def polygraphy_of(library: Library) -> Any:
    """The package polygraphy, turned to `library`.

    Raises EngineMissing without it, and BuildError when this process already drives the other one.
    """
    is_rtx = library.name == "tensorrt-rtx"
    try:
        config: Any = importlib.import_module("polygraphy.config")
    except ImportError as error:
        raise EngineMissing(
            f"building needs polygraphy: pip install 'eagle3[{library.name}]' ({error})"
        ) from error
    if "polygraphy.backend.trt" in sys.modules and is_rtx != config.USE_TENSORRT_RTX:
        raise BuildError(
            f"this process has already used the other TensorRT library, polygraphy drives one:"
            f" build for {library.name} in another process"
        )
    config.USE_TENSORRT_RTX = is_rtx  # read when polygraphy.backend.trt is first imported
    importlib.import_module("polygraphy.backend.trt")
    if is_rtx:
        importlib.import_module("polygraphy.backend.tensorrt_rtx")
    return sys.modules["polygraphy"]


def target_capability(library: Library, asked: str | None) -> str:
    """The compute capability to build for; None: that of this machine's GPU.

    Raises BuildError where the library cannot build for it, with what it can build for.
    """
    known = library.compute_capabilities
    if asked is not None and known is not None:
        if asked not in known:
            raise BuildError(
                f"compute capability {asked} is none that {library.name} {library.version} builds"
                f" for ({', '.join(known)}): name one of these with --compute-capability, or build"
                " with --backend tensorrt on the device itself"
            )
        return asked
    here = gpu_capability()
    if here is None:
        way = "name the GPU with --compute-capability, as in 8.9"
        if known is None:
            way = "build on the device itself, or for it with --backend tensorrt-rtx"
        raise BuildError(
            f"{library.name} {library.version} would build for this machine's GPU, and none is"
            f" here: {way}"
        )
    if asked not in (None, here):
        raise BuildError(
            f"compute capability {asked} was asked for, this machine's GPU has {here}, and"
            f" {library.name} builds for that alone: build on the device itself, or with --backend"
            " tensorrt-rtx"
        )
    return here if known is None else target_capability(library, here)


def gpu_capability() -> str | None:
    """Compute capability of the first GPU, as "8.9"; None without a GPU, driver or cuda-core."""
    try:
        device = importlib.import_module("cuda.core").Device(0)
        major, minor = device.compute_capability
    except Exception:  # whatever a missing package, driver or GPU raises
        return None
    return f"{major}.{minor}"
