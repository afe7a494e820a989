"""A stand-in for TensorRT on the stand-in's memory: engines are programs in Python.

A plan file is JSON; a context refuses what is missing, too small, out of range, changed after its
graph was captured, or captured before a first call (`RuleBroken`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from stand_in import STREAM, Operation, RuleBroken, StandInDriver

from eagle3.runtime.gpu.driver import ALIGNMENT

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """An input or output; a dimension that varies is its symbol."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Program(Protocol):
    """What an engine computes. aliases: output -> the input whose memory it must share."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    aliases: Mapping[str, str]

    def run(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Reads and writes arrays that lie in device memory."""


_NAMES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "bool": "BOOL"}
_SCRATCH_BYTES = 4096


class StandInTensorRT:
    """The module `tensorrt`: what the runtime calls of it, nothing else.

    programs: what a plan file's JSON may name under "program". A plan file also holds "profiles":
    for each, input name -> [smallest, usual, largest shape].
    """

    __version__ = "99.1"
    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user", STATIC="static")

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3)

        def __init__(self) -> None:
            pass

    def __init__(self, driver: StandInDriver, programs: Mapping[str, Program]) -> None:
        self.driver, self.programs = driver, programs

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self._load(logger, data))

    def _load(self, logger: Any, data: bytes) -> StandInEngine | None:
        try:
            content = json.loads(data)
            return StandInEngine(self, self.programs[content["program"]], content["profiles"])
        except (ValueError, KeyError) as error:
            logger.log(self.ILogger.Severity.ERROR, f"not a plan file: {error}")
            return None


class StandInEngine:
    def __init__(self, owner: StandInTensorRT, program: Program, profiles: list[Any]) -> None:
        self.owner, self.program, self._profiles = owner, program, profiles
        self._tensors = {t.name: t for t in [*program.inputs, *program.outputs]}
        self._inputs = {t.name for t in program.inputs}
        self.num_io_tensors, self.num_optimization_profiles = len(self._tensors), len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return [*self._tensors][index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self._inputs else "output"

    def get_tensor_dtype(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return f"DataType.{_NAMES.get(dtype, dtype.upper())}"

    def get_tensor_shape(self, name: str) -> Shape:
        return tuple(d if isinstance(d, int) else -1 for d in self._tensors[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Shape]:
        fixed = self._tensors[name].shape
        ranges = self._profiles[profile].get(name, [fixed] * 3)
        return [tuple(shape) for shape in ranges]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.program.aliases.get(name)

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return _SCRATCH_BYTES

    def create_execution_context(self, strategy: str) -> StandInContext:
        if self.owner.driver.capturing:
            raise RuleBroken("a context is made inside a capture")
        if strategy != "user":
            raise RuleBroken("a context with scratch memory of its own")
        return StandInContext(self)


class StandInContext:
    """Counts its changes: a graph captured before one of them is void."""

    def __init__(self, engine: StandInEngine) -> None:
        self._engine, self._driver = engine, engine.owner.driver
        self._changes = 0
        self._profile: int | None = None
        self._scratch: int | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._warm: set[tuple[tuple[str, Shape], ...]] = set()

    def set_device_memory(self, address: int, size: int) -> None:
        self._driver.memory.view(address, np.uint8, size)
        if size < _SCRATCH_BYTES:
            raise RuleBroken(f"scratch memory of {size} bytes, {_SCRATCH_BYTES} are needed")
        self._change()
        self._scratch = address

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._change()
        self._profile, self._shapes = profile, {}
        return 0 <= profile < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        if self._profile is None:
            raise RuleBroken(f"a shape of {name} before a profile was chosen")
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        inside = [a <= size <= b for a, size, b in zip(low, shape, high, strict=True)]
        if not all(inside):
            raise RuleBroken(f"{name} {list(shape)} is outside profile {self._profile}")
        if self._shapes.get(name) != tuple(shape):
            self._change()
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if address % ALIGNMENT:
            raise RuleBroken(f"{name} at {address:#x} is not a multiple of {ALIGNMENT}")
        self._driver.memory.view(address, np.uint8, 1)
        self._change()
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        program = self._engine.program
        if stream != STREAM:
            raise RuleBroken("a call on another stream than the driver's")
        key = tuple(sorted(self._shapes.items()))
        if self._driver.capturing and key not in self._warm:
            raise RuleBroken("captured before a warm-up call of these shapes")
        if not self._driver.capturing:
            self._warm.add(key)
        arrays = self._arrays()
        addresses, changes = dict(self._addresses), self._changes
        for output, source in program.aliases.items():
            if addresses[output] != addresses[source]:
                raise RuleBroken(f"{output} and {source} must be one address")
        alone = [a for name, a in addresses.items() if name not in program.aliases]
        if len(set(alone)) != len(alone):
            raise RuleBroken("two tensors at one address")
        shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}

        def run() -> None:
            view = self._driver.memory.view
            assert self._scratch is not None
            view(self._scratch, np.uint8, _SCRATCH_BYTES)[:] = 0xCD
            program.run(
                {
                    name: view(addresses[name], dtype, int(np.prod(shape))).reshape(shape)
                    for name, (dtype, shape) in shapes.items()
                }
            )

        def still_valid() -> None:
            if self._changes != changes:
                raise RuleBroken("the context was changed after its graph was captured")
            self._arrays()

        self._driver.issue(Operation(run, still_valid))
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def _change(self) -> None:
        if self._driver.capturing:
            raise RuleBroken("a context is changed inside a capture")
        self._changes += 1

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Every tensor as an array in device memory; refused where anything is missing or small."""
        program = self._engine.program
        if self._scratch is None:
            raise RuleBroken("no scratch memory was set")
        symbols: dict[str, int] = {}
        for tensor in program.inputs:
            if tensor.name not in self._shapes:
                raise RuleBroken(f"no shape was set for {tensor.name}")
            for dim, size in zip(tensor.shape, self._shapes[tensor.name], strict=True):
                if isinstance(dim, int) and dim != size:
                    raise RuleBroken(f"{tensor.name} has {size} where {dim} is fixed")
                if isinstance(dim, str) and symbols.setdefault(dim, size) != size:
                    raise RuleBroken(f"{tensor.name}: {dim} is {size} here, {symbols[dim]} before")
        arrays = {}
        for tensor in [*program.inputs, *program.outputs]:
            if tensor.name not in self._addresses:
                raise RuleBroken(f"no address was set for {tensor.name}")
            shape = tuple(d if isinstance(d, int) else symbols[d] for d in tensor.shape)
            dtype = np.dtype(tensor.dtype)
            count = int(np.prod(shape))
            flat = self._driver.memory.view(self._addresses[tensor.name], dtype, count)
            arrays[tensor.name] = flat.reshape(shape)
        return arrays
