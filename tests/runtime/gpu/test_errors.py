"""What cannot run says so, with the way out: plan files, libraries, memory, logits."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from on_device import OnDevice, on_device
from programs import Arrays, programs_of, write_plan_files
from stand_in import StandInDriver
from stand_in_tensorrt import Program, StandInTensorRT, Tensor

import eagle3
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.errors import (
    BundleError,
    DeviceError,
    EngineError,
    EngineMissing,
    PlanError,
    RequestError,
)
from eagle3.runtime.gpu.device import default_widths
from eagle3.runtime.gpu.halves import load_engines
from eagle3.runtime.gpu.load import default_backend, find_plan_files, load_device
from eagle3.runtime.gpu.tensorrt_engine import PlanEngine, TensorRT

BAD = 30  # a token whose embedding is NaN
NEVER_BAD = {1: -100.0, BAD: -1000.0}
REBUILD = r"run `eagle3 build "


class Setup:
    """A stand-in with the plan files of a bundle."""

    def __init__(self, bundle: Bundle, folder: Path, **changes: Any) -> None:
        self.manifest, self.driver = bundle.manifest, StandInDriver()
        self.programs = programs_of(bundle)
        self.files = write_plan_files(bundle, self.programs, folder, **changes)
        self.library = TensorRT("tensorrt", StandInTensorRT(self.driver, self.programs))

    def load(self) -> Any:
        return load_engines(self.manifest, self.files, self.library, self.driver)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compute_capability": "9.0"},
            r"built for compute capability 9.0, a stand-in has 8.9: " + REBUILD,
        ),
        (
            {"library_version": "98.0"},
            r"built by tensorrt 98.0, installed is 99.1: " + REBUILD,
        ),
        (
            {"backend": "tensorrt-rtx"},
            r"built by tensorrt-rtx, tensorrt was asked for: load it with backend='tensorrt-rtx'",
        ),
    ],
)
def test_a_plan_file_for_something_else_is_refused(
    portable: Bundle, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        Setup(portable, tmp_path, **changes).load()


def test_a_broken_or_missing_plan_file(portable: Bundle, tmp_path: Path) -> None:
    setup = Setup(portable, tmp_path)
    setup.files["target"].path.write_text("nonsense")
    with pytest.raises(BundleError, match=f"cannot be loaded: not a plan file: .*; {REBUILD}"):
        setup.load()
    setup.files["target"].path.unlink()
    with pytest.raises(BundleError, match="target.plan.* cannot be read"):
        setup.load()
    del setup.files["target"]
    with pytest.raises(BundleError, match="no plan file of the target among"):
        setup.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: replace(t, name="ids"), r"input_ids int64 \[B, N\] .* has none of that name"),
        (lambda t: replace(t, dtype="int32"), r"the plan file has input_ids int32 \[\?, \?\]"),
        (lambda t: replace(t, shape=("B",)), r"the plan file has input_ids int64 \[\?\]: run"),
        (lambda t: replace(t, shape=(2, "N")), None),
    ],
)
def test_bindings_are_compared_with_the_manifest(
    portable: Bundle, tmp_path: Path, change: Any, message: str | None
) -> None:
    setup = Setup(portable, tmp_path)
    program = setup.programs["target"]
    program.inputs = [change(t) if t.name == "input_ids" else t for t in program.inputs]
    if message is None:
        setup.load()
        return
    with pytest.raises(BundleError, match=message):
        setup.load()


def test_a_cache_of_another_size_and_an_unknown_output(portable: Bundle, tmp_path: Path) -> None:
    setup = Setup(portable, tmp_path)
    program = setup.programs["target"]
    inputs = program.inputs
    program.inputs = [  # type: ignore[misc]
        replace(t, shape=("B", 2, 100, 8)) if t.name == "past_k.0" else t for t in inputs
    ]
    with pytest.raises(BundleError, match=r"past_k.0 float32 \[B, 2, 129, 8\] .* 100, 8\]"):
        setup.load()
    program.inputs = inputs  # type: ignore[misc]
    program.outputs = [*program.outputs, Tensor("extra", "int64", ("B",))]  # type: ignore[misc]
    with pytest.raises(BundleError, match="output extra .* is unknown to the manifest"):
        setup.load()


def test_a_cache_that_is_not_written_in_place(portable: Bundle, tmp_path: Path) -> None:
    setup = Setup(portable, tmp_path)
    setup.programs["target"].aliases = {}  # type: ignore[misc]
    with pytest.raises(BundleError, match="present_k.0 is not written in place of past_k.0; run"):
        setup.load()


def test_a_width_that_no_profile_takes(portable: Bundle, tmp_path: Path) -> None:
    setup = Setup(portable, tmp_path)
    path = setup.files["target"].path
    content = json.loads(path.read_text())
    for profile in content["profiles"]:
        for shape in profile["input_ids"]:
            shape[1] = min(shape[1], 2)
    path.write_text(json.dumps(content))
    from eagle3.runtime.gpu.device import Device
    from eagle3.runtime.gpu.kernels import Kernels
    from eagle3.runtime.session import Clock

    with pytest.raises(EngineError, match=r"takes input_ids \[1, 4\].*; run `eagle3 build"):
        Device(setup.load(), setup.driver, Kernels(setup.driver, b""), Clock())


def test_out_of_device_memory(portable: Bundle, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="out of memory: the target's cache"):
        on_device(portable, tmp_path, driver=StandInDriver(capacity_bytes=120_000))


def test_a_library_that_is_not_installed() -> None:
    with pytest.raises(EngineMissing, match=r"backend tensorrt needs the package tensorrt: pip"):
        TensorRT("tensorrt")


def test_the_real_library_says_why_it_loads_nothing(portable: Bundle, tmp_path: Path) -> None:
    """TensorRT for RTX itself, which needs no GPU for this."""
    module = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    library = TensorRT("tensorrt-rtx")
    assert library.version == module.__version__
    setup = Setup(portable, tmp_path, backend="tensorrt-rtx", library_version=library.version)
    setup.library = library
    with pytest.raises(BundleError, match=r"cannot be loaded: .*Error Code.*; run `eagle3 build"):
        setup.load()
    for name in (
        "create_runtime_config",
        "get_aliased_input_tensor",
        "get_device_memory_size_for_profile_v2",
    ):
        assert hasattr(module.ICudaEngine, name)
    config = module.IRuntimeConfig
    assert hasattr(config, "set_execution_context_allocation_strategy")
    assert isinstance(config.dynamic_shapes_kernel_specialization_strategy, property)
    assert module.DynamicShapesKernelSpecializationStrategy.EAGER
    for name in ("set_device_memory", "set_optimization_profile_async", "execute_async_v3"):
        assert hasattr(module.IExecutionContext, name)


def test_an_engine_that_no_graph_can_hold() -> None:
    engine = object.__new__(PlanEngine)
    engine.name, engine._driver = "target", SimpleNamespace(stream=1)  # type: ignore[assignment]
    engine._file = SimpleNamespace(path="p", rebuild="eagle3 build B")  # type: ignore[assignment]
    context = SimpleNamespace(is_stream_capturable=lambda stream: False)
    with pytest.raises(EngineError, match="no CUDA graph can hold; run `eagle3 build B`"):
        engine.check_capturable(context)
    engine.check_capturable(SimpleNamespace())


def test_load_says_what_is_missing(bundle: Bundle, portable: Bundle, tmp_path: Path) -> None:
    for options, message in (
        ({"device": "gpu"}, "device 'gpu' is not supported, choose one of cpu, cuda"),
        ({"device": "cpu", "backend": "tensorrt"}, "'tensorrt' does not run on device cpu"),
        ({"device": "cuda", "backend": "ort-cuda"}, "choose one of tensorrt, tensorrt-rtx"),
    ):
        with pytest.raises(RequestError, match=message):
            eagle3.load(portable.root, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="lowering ort, tensorrt runs portable"):
        eagle3.load(bundle.root, device="cuda")
    setup = Setup(portable, tmp_path)
    message = r"no plan file of the target for tensorrt on a stand-in, compute capability 8.9: run"
    with pytest.raises(BundleError, match=message):
        load_device(portable, "tensorrt", setup.driver, setup.library)


def test_the_backend_is_what_the_bundle_was_built_for(portable: Bundle, tmp_path: Path) -> None:
    copy = tiny.edited_bundle(portable, tmp_path / "bundle")
    assert default_backend(copy) == "tensorrt"
    (copy.root / "plans" / "tensorrt-rtx-sm89").mkdir(parents=True)
    assert default_backend(copy) == "tensorrt-rtx"


def test_what_only_the_cpu_can_do_is_refused_by_name(device: OnDevice) -> None:
    with pytest.raises(RequestError, match="load the bundle with device 'cpu'"):
        _ = device.engine.target


@pytest.mark.skipif(find_spec("cuda") is None, reason="needs cuda-bindings")
def test_plan_files_are_found_beside_the_bundle(portable: Bundle, tmp_path: Path) -> None:
    copy = tiny.edited_bundle(portable, tmp_path / "bundle")
    setup = Setup(copy, tmp_path)
    other = copy.root / "plans" / "tensorrt-sm90"
    other.mkdir(parents=True)
    with pytest.raises(BundleError, match=r"\(it has tensorrt-sm90\): run `eagle3 build"):
        find_plan_files(copy, setup.library, setup.driver)
    folder = other.rename(copy.root / "plans" / "tensorrt-sm89")
    write_plan_files(copy, setup.programs, folder)
    note = {"library": "tensorrt", "library_version": "99.1", "compute_capability": "8.9"}
    for name in setup.programs:
        (folder / f"{name}.json").write_text(json.dumps(note))
    device = load_device(copy, "tensorrt", setup.driver, setup.library)
    assert device.drafts
    closed: list[bool] = []
    setup.driver.close = lambda: closed.append(True)  # type: ignore[method-assign]
    other_device = load_device(copy, "tensorrt", setup.driver, setup.library)
    assert not closed
    del other_device
    gc.collect()
    assert closed == [True], "its memory goes with it, not with the process"
    assert eagle3.Engine(copy, 1, device).generate([5, 6], max_new_tokens=3).token_ids
    (folder / "target.json").write_text("{}")
    with pytest.raises(BundleError, match=r"target.json cannot be read .*: run `eagle3 build"):
        find_plan_files(copy, setup.library, setup.driver)


@pytest.mark.parametrize(("most", "widths"), [(1, (1,)), (7, (1, 2, 4, 7)), (8, (1, 2, 4, 8))])
def test_default_widths(most: int, widths: tuple[int, ...]) -> None:
    assert default_widths(most) == widths


# Logits that are no numbers


class WithBad:
    """The growth, with a token that the target has no numbers for among the root's children."""

    def __init__(self, own: Program) -> None:
        self.inputs, self.outputs, self.aliases = own.inputs, own.outputs, own.aliases
        self._own, self.bad = own, True

    def run(self, arrays: Arrays) -> None:
        self._own.run(arrays)
        if self.bad:
            arrays["tokens"][0, 1] = BAD


@pytest.fixture(scope="module")
def poisoned(
    portable: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OnDevice, OnDevice]]:
    """A target with a NaN embedding on the stand-in, and the whole one."""
    weights = bytearray(portable.path("target.onnx.data").read_bytes())
    row = np.full(tiny.HIDDEN, np.nan, np.float32).tobytes()
    weights[BAD * len(row) : (BAD + 1) * len(row)] = row
    folder = tmp_path_factory.mktemp("poisoned")
    edited = tiny.edited_bundle(portable, folder / "b", {"target.onnx.data": bytes(weights)})
    (folder / "whole").mkdir()
    yield on_device(edited, folder, grow=WithBad), on_device(portable, folder / "whole")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 1},
    {"temperature": 1.0},
    {"temperature": 1.0, "acceptance": "coupled"},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_nan_in_the_prompt_is_an_error_and_the_next_request_is_well(
    poisoned: tuple[OnDevice, OnDevice], options: dict[str, Any], drafter: str
) -> None:
    own, whole = (each.engine for each in poisoned)
    with pytest.raises(EngineError, match="target.* logits are NaN"):
        own.generate([5] * 20 + [BAD, 6], drafter=drafter, **options)
    after = {"max_new_tokens": 20, "drafter": drafter, "logit_bias": NEVER_BAD}
    assert own.generate([5, 6], **after).token_ids == whole.generate([5, 6], **after).token_ids


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_nan_in_mid_text_is_an_error(
    poisoned: tuple[OnDevice, OnDevice], options: dict[str, Any]
) -> None:
    own = poisoned[0].engine
    for drafter in ("none", "eagle3"):
        forced = {"logit_bias": {BAD: 1000.0}, "drafter": drafter, **options}
        stream = own.stream([5, 6], **forced)
        assert next(stream).token_ids == [BAD]
        with pytest.raises(EngineError, match="target's logits are NaN"):
            next(stream)


@pytest.mark.parametrize("options", [{}, OPTIONS[3], {"repetition_penalty": 1.2}])
def test_a_draft_token_that_gives_nan_changes_nothing(
    poisoned: tuple[OnDevice, OnDevice], options: dict[str, Any]
) -> None:
    own, whole = poisoned
    options = {"max_new_tokens": 16, **options}
    prompt = [5, 6, 7]
    expected = whole.engine.generate(prompt, drafter="none", **options)
    assert BAD not in expected.token_ids, "this text proves nothing"
    found = own.engine.generate(prompt, drafter="eagle3", **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.plain_rounds > 12, "every spoiled round is done again plainly"
