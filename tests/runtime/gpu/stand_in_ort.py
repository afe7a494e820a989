"""A stand-in for `onnxruntime` with its CUDA provider, on the stand-in driver's memory.

What the provider does was watched on the real one (docs/decisions.md): it launches on the caller's
stream, allocates in the first two calls of new shapes, and waits at the end of a call unless it is
told not to. What a GPU would punish, or a round could not afford, is refused here by `RuleBroken`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from stand_in import STREAM, Operation, RuleBroken, StandInDriver
from stand_in_tensorrt import Program, Tensor

Shape = tuple[int, ...]
_DTYPES = {1: np.float32, 10: np.float16, 7: np.int64, 9: np.bool_}
_TYPES = {"float32": "float"}


class Options:
    """SessionOptions and RunOptions."""

    def __init__(self) -> None:
        self.log_severity_level = 2
        self.enable_mem_pattern = True
        self.entries: dict[str, str] = {}
        self.sizes: dict[str, int] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        if (name, size) != ("B", 1):
            raise RuleBroken(f"{name} is taken to be {size}: calls of another size fail")
        self.sizes[name] = size

    add_run_config_entry = add_session_config_entry


class StandInOrt:
    """The module `onnxruntime`: what the GPU runtime calls of it, nothing else.

    programs: by the name of the ONNX file, without its ending. starts: whether the provider does.
    """

    __version__ = "99.2"
    SessionOptions = RunOptions = Options

    def __init__(
        self, driver: StandInDriver, programs: Mapping[str, Program], starts: bool = True
    ) -> None:
        self._driver, self._programs, self._starts = driver, programs, starts
        self.providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def get_available_providers(self) -> list[str]:
        return self.providers

    def preload_dlls(self) -> None:
        print("this must not reach a user's stdout")

    def set_default_logger_severity(self, level: int) -> None:
        self.log_severity_level = level

    @property
    def OrtValue(self) -> Any:
        """Memory on the device, which there is where the provider starts."""

        def make(shape: list[int], dtype: Any, device: str, index: int) -> None:
            if device == "cuda" and not self._starts:
                raise RuntimeError("CUDA Provider not available, can't get interface for it")

        return SimpleNamespace(ortvalue_from_shape_and_type=make)

    def InferenceSession(
        self, path: str, options: Options, providers: Any, enable_fallback: int = 1
    ) -> StandInSession:
        if enable_fallback:
            raise RuleBroken("a failure is printed, and tried again on the CPU")
        ((name, settings),) = providers
        if name != "CUDAExecutionProvider" or not options.entries.get(
            "session.disable_cpu_ep_fallback"
        ):
            raise RuleBroken("nodes may fall back to the CPU")
        if int(settings["user_compute_stream"]) != STREAM:
            raise RuleBroken("the provider launches on another stream than the driver's")
        if options.enable_mem_pattern:
            raise RuleBroken("a block for all of a call is allocated anew in its second")
        if not self._starts:
            raise ValueError("graph nodes that are assigned to the default CPU EP")
        program = self._programs[Path(path).name.removesuffix(".onnx")]
        return StandInSession(self._driver, program, self.providers, options.sizes)


class StandInSession:
    def __init__(
        self,
        driver: StandInDriver,
        program: Program,
        providers: list[str],
        sizes: Mapping[str, int],
    ) -> None:
        self.driver, self.program, self._providers = driver, program, providers
        self._sizes = sizes
        self._calls: Counter[tuple[tuple[str, Shape], ...]] = Counter()

    def get_providers(self) -> list[str]:
        return self._providers

    def get_inputs(self) -> list[Any]:
        return [_described(tensor, self._sizes) for tensor in self.program.inputs]

    def get_outputs(self) -> list[Any]:
        return [_described(tensor, self._sizes) for tensor in self.program.outputs]

    def io_binding(self) -> StandInBinding:
        return StandInBinding(self.driver)

    def run_with_iobinding(self, binding: StandInBinding, options: Options) -> None:
        if options.entries.get("disable_synchronize_execution_providers") != "1":
            raise RuleBroken("the provider waits at the end of the call")
        bound = dict(binding.bound)
        names = {tensor.name for tensor in (*self.program.inputs, *self.program.outputs)}
        if set(bound) != names:
            raise RuleBroken(f"bound is {sorted(bound)}, there is {sorted(names)}")
        for output, source in self.program.aliases.items():
            if bound[output] != bound[source]:
                raise RuleBroken(f"{output} and {source} must be one address")
        shapes = tuple(sorted((name, shape) for name, (_, shape, _) in bound.items()))
        if self.driver.capturing and self._calls[shapes] < 2:
            raise RuleBroken("the first two calls of these shapes allocate, not in a capture")
        self._calls[shapes] += 1

        def run() -> None:
            view = self.driver.memory.view
            self.program.run(
                {
                    name: view(address, dtype, int(np.prod(shape))).reshape(shape)
                    for name, (dtype, shape, address) in bound.items()
                }
            )

        self.driver.issue(Operation(run))


class StandInBinding:
    def __init__(self, driver: StandInDriver) -> None:
        self._driver = driver
        self.bound: dict[str, tuple[Any, Shape, int]] = {}

    def bind_input(
        self, name: str, device: str, index: int, element: int, shape: list[int], address: int
    ) -> None:
        if (device, index) != ("cuda", 0):
            raise RuleBroken(f"{name} is bound on {device}:{index}")
        if not all(isinstance(size, int) for size in shape):
            raise RuleBroken(f"{name} is bound with shape {shape}")
        dtype = _DTYPES[element]
        self._driver.memory.view(address, dtype, int(np.prod(shape)))
        self.bound[name] = dtype, tuple(shape), address

    bind_output = bind_input


def _described(tensor: Tensor, sizes: Mapping[str, int]) -> Any:
    """As ONNX Runtime describes an input or output, the sizes it was told filled in."""
    kind = f"tensor({_TYPES.get(tensor.dtype, tensor.dtype)})"
    return SimpleNamespace(
        name=tensor.name, type=kind, shape=[sizes.get(dim, dim) for dim in tensor.shape]
    )
