"""Tests of finding a library and its compute capabilities, with stand-ins for its modules."""

from __future__ import annotations

import enum
import sys
from types import ModuleType
from typing import Any

import pytest

import eagle3.plans.tensorrt
from eagle3.plans.commands.build_command import build_exported
from eagle3.plans.tensorrt import library as tensorrt_library
from eagle3.plans.tensorrt.library import find_library, polygraphy_of, target_capability
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BuildError, EngineMissing

_NAMES = "NONE CURRENT SM75 SM80 SM86 SM89 SM120 SM121"


def _module(name: str, version: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({"__version__": version, "IKVCacheUpdateLayer": object, **names})
    return module


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = enum.Enum("ComputeCapability", _NAMES)
    module = _module("tensorrt_rtx", "1.7", ComputeCapability=capability)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
    monkeypatch.setitem(sys.modules, "tensorrt", None)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", _module("tensorrt", "11.0"))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: str | None) -> None:
    monkeypatch.setattr(tensorrt_library, "gpu_capability", lambda: capability)


def test_none_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        EngineMissing,
        match=r"installed \(searched for tensorrt-rtx or tensorrt\): pip install"
        r" 'eagle3\[tensorrt-rtx\]' && pip install --no-deps tensorrt-rtx-cu13 .*; or: pip install"
        r" 'eagle3\[tensorrt\]'",
    ):
        find_library()


def test_whichever_is_there_is_found(rtx: None) -> None:
    assert (find_library().name, find_library("tensorrt-rtx").version) == ("tensorrt-rtx", "1.7")
    with pytest.raises(EngineMissing, match=r"no TensorRT library .* \(searched for tensorrt\)"):
        find_library("tensorrt")
    with pytest.raises(BuildError, match="backend 'ort-cpu' does not use plan files"):
        find_library("ort-cpu")


def test_two_must_be_chosen_between(rtx: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", _module("tensorrt", "11.0"))
    with pytest.raises(BuildError, match="tensorrt-rtx 1.7 and tensorrt 11.0 are both installed"):
        find_library()
    assert find_library("tensorrt").version == "11.0"


def test_an_old_one_is_refused(full: None) -> None:
    del sys.modules["tensorrt"].IKVCacheUpdateLayer  # type: ignore[attr-defined]
    with pytest.raises(
        BuildError, match="tensorrt 11.0 cannot update a KV cache in place: install"
    ):
        find_library()


def test_rtx_builds_for_what_it_knows(rtx: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library()
    assert library.compute_capabilities == ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
    assert target_capability(library, "8.9") == "8.9"
    with pytest.raises(
        BuildError, match=r"9.0 is not supported by tensorrt-rtx 1.7, .* 7.5, 8.0, .*12.1:"
    ):
        target_capability(library, "9.0")
    _gpu(monkeypatch, "8.6")
    assert target_capability(library, None) == "8.6"
    _gpu(monkeypatch, "9.0")
    with pytest.raises(BuildError, match=r"9.0 is not supported by tensorrt-rtx"):
        target_capability(library, None)
    _gpu(monkeypatch, None)
    with pytest.raises(
        BuildError, match="no GPU was found: specify the GPU with --compute-capability"
    ):
        target_capability(library, None)


def test_the_full_library_builds_for_this_machine(
    full: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find_library()
    _gpu(monkeypatch, "8.7")
    assert target_capability(library, None) == target_capability(library, "8.7") == "8.7"
    with pytest.raises(BuildError, match="which has compute capability 8.7, but 8.9 was requested"):
        target_capability(library, "8.9")
    _gpu(monkeypatch, None)
    with pytest.raises(BuildError, match="no GPU was found: build on the device itself"):
        target_capability(library, "8.7")


def test_polygraphy_drives_one_library_a_process(
    full: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModuleType("polygraphy.config")
    config.USE_TENSORRT_RTX = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polygraphy.config", config)
    monkeypatch.setitem(sys.modules, "polygraphy.backend.trt", ModuleType("trt"))
    with pytest.raises(BuildError, match="already uses polygraphy with the other TensorRT library"):
        polygraphy_of(find_library())
    monkeypatch.setitem(sys.modules, "polygraphy.config", None)
    with pytest.raises(EngineMissing, match=r"requires polygraphy: pip install 'eagle3\["):
        polygraphy_of(find_library())


def test_an_export_that_cannot_build_says_that_the_bundle_is_there(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle can be exported on a workstation and its plan files built on the device later."""
    with pytest.raises(BuildError, match=rf"{bundle.root} is exported and checked, but has no"):
        build_exported(bundle.root)  # of the other lowering
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "eagle3.plans.tensorrt.plan_builder", raising=False)
    monkeypatch.delitem(sys.modules, "eagle3.plans.lint.tensorrt_lint", raising=False)
    monkeypatch.delattr(eagle3.plans.tensorrt, "plan_builder", raising=False)
    with pytest.raises(
        EngineMissing, match=rf"needs onnx .*; solve this, then run `eagle3 build {bundle.root}"
    ):
        build_exported(bundle.root)
