"""What the stand-in's plan files compute: the bundle's own ONNX files, run by ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime as ort
from numpy.typing import NDArray
from stand_in import RuleBroken
from stand_in_tensorrt import Program, StandInTensorRT, Tensor

from eagle3.plans.tensorrt import plan_builder as tensorrt_build
from eagle3.plans.tensorrt.build_request import BuildRequest
from eagle3.plans.tensorrt.library import Library
from eagle3.plans.tensorrt.plan_builder import build_bundle
from eagle3.plans.tensorrt.plan_files import PlanFile
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import TensorSpec, engine_name
from eagle3.runtime.gpu.device_engines import TARGET, growing_draft
from eagle3.runtime.ort.growth_engine import ENGINE as DRAFT_TREE

Arrays = Mapping[str, NDArray[Any]]
VERSION = StandInTensorRT.__version__


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_onnx(own: Any, inputs: Arrays, outputs: Arrays) -> None:
    """Runs over the arrays' own memory."""
    binding = own.io_binding()
    for name, array in inputs.items():
        assert array.flags.c_contiguous
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    own.run_with_iobinding(binding)


def tensors(specs: Sequence[TensorSpec]) -> list[Tensor]:
    return [Tensor(spec.name, spec.dtype, spec.shape) for spec in specs]


def aliases(outputs: Sequence[Tensor]) -> dict[str, str]:
    names = [t.name for t in outputs if t.name.startswith("present_")]
    return {name: name.replace("present_", "past_") for name in names}


def num_slots(inputs: Sequence[Tensor]) -> int:
    """S: slots of a cache [B, Hkv, S, D]."""
    (size,) = {t.shape[2] for t in inputs if t.name.startswith("past_") and len(t.shape) == 4}
    assert isinstance(size, int)
    return size


class OnnxProgram:
    """An engine of the bundle. widths: N of the calls so far; most_slots: past_len + N, at most.

    A call whose rows, padding included, have no slots in the cache is refused.
    """

    def __init__(self, bundle: Bundle, name: str) -> None:
        info = bundle.manifest.engines[name]
        self.inputs, self.outputs = tensors(info.inputs), tensors(info.outputs)
        self.aliases = aliases(self.outputs)
        self._name, self._session = name, session(bundle.path(info.file))
        self._rows = next(t.name for t in self.inputs if "N" in t.shape)
        self.capacity = num_slots(self.inputs)
        self.widths: list[int] = []
        self.most_slots = 0

    def run(self, arrays: Arrays) -> None:
        rows, past = arrays[self._rows].shape[1], int(arrays["past_len"][0])
        if past + rows > self.capacity:
            raise RuleBroken(
                f"{self._name}: {rows} rows behind {past}, the cache has {self.capacity}"
            )
        self.widths.append(rows)
        self.most_slots = max(self.most_slots, past + rows)
        inputs, outputs = ({t.name: arrays[t.name] for t in x} for x in (self.inputs, self.outputs))
        run_onnx(self._session, inputs, outputs)


def programs_of(bundle: Bundle) -> dict[str, Program]:
    """The engines that a GPU runs, as they were exported."""
    head = growing_draft(bundle.manifest)
    names = [TARGET] if head is None else [TARGET, engine_name(head, DRAFT_TREE)]
    return {name: OnnxProgram(bundle, name) for name in names}


@contextmanager
def stand_in_builder() -> Iterator[None]:
    """`eagle3 build` as it is, less the compiler: a plan file names its program, see
    `StandInTensorRT`."""

    def compile_job(job: Any, *_: object) -> tuple[bytes, bool]:
        profiles = [each.ranges for each in job.profiles]
        return json.dumps({"program": job.engine, "profiles": profiles}).encode(), False

    with mock.patch.multiple(
        tensorrt_build,
        find_library=lambda name: Library(name, None, VERSION),
        target_capability=lambda library, asked: asked,
        polygraphy_of=lambda library: None,
        captured=nullcontext,
        _compile=compile_job,
    ):
        yield


def build_plan_files(
    root: Path, backend: str = "tensorrt", capability: str = "8.9", **request: Any
) -> dict[str, PlanFile]:
    """Plan files for the stand-in in the bundle at `root`, and their JSON."""
    asked = BuildRequest(backend, capability, **request)
    with stand_in_builder():
        return {each.engine: each for each in build_bundle(root, asked)}
