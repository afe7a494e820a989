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
from click.testing import CliRunner
from on_device import OnDevice, copy_of, on_device
from programs import Arrays, build_plan_files, programs_of
from stand_in import StandInDriver
from stand_in_tensorrt import Program, StandInTensorRT, Tensor

import eagle3
from eagle3.cli import main
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import (
    BuildError,
    BundleError,
    DeviceError,
    EngineError,
    EngineMissing,
    PlanError,
    RequestError,
)
from eagle3.runtime.gpu import load as gpu_load
from eagle3.runtime.gpu.device import Device, graph_widths
from eagle3.runtime.gpu.kernels import Kernels
from eagle3.runtime.gpu.load import chosen_backend, load_device
from eagle3.runtime.gpu.tensorrt_engine import PlanEngine, TensorRT, load_plan_engines
from eagle3.runtime.stats import Clock

BAD = 30  # a token whose embedding is NaN
NEVER_BAD = {1: -100.0, BAD: -1000.0}
REBUILD = r"run `eagle3 build "


class Setup:
    """A stand-in, and a copy of a bundle with plan files for it."""

    def __init__(self, bundle: Bundle, folder: Path, **request: Any) -> None:
        self.bundle, self.driver = copy_of(bundle, folder), StandInDriver()
        self.programs = programs_of(self.bundle)
        self.files = build_plan_files(self.bundle.root, **request)
        self.library = TensorRT("tensorrt", StandInTensorRT(self.driver, self.programs))

    def load(self) -> Any:
        return load_plan_engines(self.bundle, self.files, self.library, self.driver)

    def device(self) -> Any:
        return load_device(self.bundle, "tensorrt", self.driver, self.library)


@pytest.fixture
def setup(portable: Bundle, tmp_path: Path) -> Setup:
    return Setup(portable, tmp_path)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"capability": "9.0"},
            r"no plan files of target, .* for tensorrt 99.1 on a GPU of compute capability 8.9"
            r" \(it has plan files for tensorrt on compute capability 9.0\): " + REBUILD,
        ),
        (
            {"backend": "tensorrt-rtx"},
            r"\(it has plan files for tensorrt-rtx on compute capability 8.9\): " + REBUILD,
        ),
    ],
)
def test_plan_files_for_something_else_are_refused(
    portable: Bundle, tmp_path: Path, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        Setup(portable, tmp_path, **request_).device()


def test_plan_files_of_another_library_graph_or_folder_are_refused(setup: Setup) -> None:
    folder = setup.files["target"].path.parent
    note = json.loads((folder / "target.json").read_text())
    for change, message in (
        (
            {"library_version": "98.0"},
            "target.plan was built by tensorrt 98.0, but this machine has tensorrt 9",
        ),
        ({"sources": {"target.onnx": "0" * 64}}, "is stale: it was built from another target.onnx"),
        (
            {"compute_capability": "9.0"},
            "was built for tensorrt on compute capability 9.0, but this machine has",
        ),
        ({"size": 7}, "expected 7 from target.json"),
    ):
        (folder / "target.json").write_text(json.dumps({**note, **change}))
        with pytest.raises(BuildError, match=f"{message}.*: {REBUILD}"):
            setup.device()
    (folder / "target.json").write_text("{}")
    with pytest.raises(BuildError, match=r"target.json cannot be read .*run `eagle3 build"):
        setup.device()


def test_a_broken_plan_file(setup: Setup) -> None:
    setup.files["target"].path.write_text("nonsense")
    with pytest.raises(BundleError, match=f"cannot be loaded: not a plan file: .*; {REBUILD}"):
        setup.load()
    setup.files["target"].path.unlink()
    with pytest.raises(BundleError, match="target.plan.* cannot be read"):
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
    setup: Setup, change: Any, message: str | None
) -> None:
    program = setup.programs["target"]
    program.inputs = [change(t) if t.name == "input_ids" else t for t in program.inputs]
    if message is None:
        setup.load()
        return
    with pytest.raises(BundleError, match=message):
        setup.load()


def test_a_cache_of_another_size_and_an_unknown_output(setup: Setup) -> None:
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


def test_a_cache_that_is_not_written_in_place(setup: Setup) -> None:
    setup.programs["target"].aliases = {}  # type: ignore[misc]
    with pytest.raises(BundleError, match="present_k.0 is not written in place of past_k.0; run"):
        setup.load()


def test_a_width_that_no_profile_takes(setup: Setup) -> None:
    path = setup.files["target"].path
    content = json.loads(path.read_text())
    for profile in content["profiles"]:
        for shape in profile["input_ids"]:
            shape[1] = min(shape[1], 2)
    path.write_text(json.dumps(content))
    with pytest.raises(EngineError, match=r"accepts input_ids \[1, 16\].*; run `eagle3 build"):
        Device(setup.load(), setup.driver, Kernels(setup.driver, b""), Clock())


def test_out_of_device_memory(portable: Bundle, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="out of memory: the target's cache"):
        on_device(portable, tmp_path, driver=StandInDriver(capacity_bytes=120_000))


def test_a_library_that_is_not_installed() -> None:
    with pytest.raises(EngineMissing, match=r"library is installed \(searched for tensorrt\): pip"):
        TensorRT("tensorrt")


def test_the_real_library_says_why_it_loads_nothing(portable: Bundle, tmp_path: Path) -> None:
    """TensorRT for RTX itself, which needs no GPU for this."""
    module = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    library = TensorRT("tensorrt-rtx")
    assert library.version == module.__version__
    setup = Setup(portable, tmp_path)
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
    engine.where, engine.rebuild = "engine 'target' (p)", "eagle3 build B"
    engine._driver = SimpleNamespace(stream=1)  # type: ignore[assignment]
    context = SimpleNamespace(is_stream_capturable=lambda stream: False)
    with pytest.raises(EngineError, match="that a CUDA graph cannot contain; run `eagle3 build B`"):
        engine.check_capturable(context)
    engine.check_capturable(SimpleNamespace())


def test_load_says_what_is_missing(bundle: Bundle, portable: Bundle) -> None:
    for options, message in (
        ({"device": "gpu"}, "device 'gpu' is not supported: use one of cpu, cuda"),
        ({"device": "cpu", "backend": "tensorrt"}, "'tensorrt' does not run on device cpu"),
        ({"device": "cuda", "backend": "ort-cpu"}, "use one of ort-cuda, tensorrt, tensorrt-"),
    ):
        with pytest.raises(RequestError, match=message):
            eagle3.load(portable.root, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="lowering ort, a GPU requires portable"):
        eagle3.load(bundle.root, device="cuda")
    driver = StandInDriver()
    library = TensorRT("tensorrt", StandInTensorRT(driver, {}))
    message = r"no plan files of target, .* on a GPU of compute capability 8.9: run `eagle3 build"
    with pytest.raises(BuildError, match=message):
        load_device(portable, "tensorrt", driver, library)


@pytest.mark.parametrize("command", [["run", "hi"], ["verify"], ["chat"]])
def test_a_machine_without_a_driver_says_so_in_one_line(
    portable: Bundle, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    def none() -> Any:
        raise DeviceError("no NVIDIA driver was found: install one, or use device='cpu'")

    monkeypatch.setattr(gpu_load, "CudaDriver", none)
    verb, *rest = command
    arguments = [verb, str(portable.root), *rest, "--device", "cuda", "--backend", "tensorrt"]
    done = CliRunner().invoke(main, arguments, input="")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: no NVIDIA driver was found: install one, or use device='cpu'\n"
    done = CliRunner().invoke(main, [*arguments[:-1], "ort-cpu"], input="")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: backend 'ort-cpu' does not run on device cuda")


def test_the_backend_is_what_the_bundle_was_built_for(portable: Bundle, tmp_path: Path) -> None:
    planned = replace(portable.manifest.plan, backend="tensorrt")
    edited = tiny.edited_bundle(portable, tmp_path / "planned", plan=planned)
    assert chosen_backend(edited) == "tensorrt"
    own = on_device(edited, tmp_path)
    assert own.engine.device is not None and own.engine.device.widths == [1, 8], "the plan's"
    assert own.engine.generate([5, 6, 7], max_new_tokens=9).stats.rounds > 0
    for backend in ("tensorrt-rtx", "tensorrt"):
        (tmp_path / backend).mkdir()
        built = Setup(portable, tmp_path / backend, backend=backend)
        assert chosen_backend(built.bundle) == backend


def test_what_only_the_cpu_can_do_is_refused_by_name(device: OnDevice) -> None:
    with pytest.raises(RequestError, match="load the bundle with device='cpu'"):
        _ = device.engine.target


@pytest.mark.skipif(find_spec("cuda") is None, reason="needs cuda-bindings")
def test_the_plan_files_of_a_build_are_loaded(setup: Setup) -> None:
    device = setup.device()
    assert device.drafters == ("eagle3", "none")
    closed: list[bool] = []
    setup.driver.close = lambda: closed.append(True)  # type: ignore[method-assign]
    other_device = setup.device()
    assert not closed
    del other_device
    gc.collect()
    assert closed == [True], "its memory goes with it, not with the process"
    setup.files["target"].note_path.unlink()
    with pytest.raises(BuildError, match="no plan files of target for"):
        setup.device()
    assert closed == [True, True], "nor does it stay where the rest is missing"
    assert eagle3.Engine(setup.bundle, 1, device).generate([5, 6], max_new_tokens=3).token_ids


@pytest.mark.parametrize(
    ("widths", "num_nodes", "expected"),
    [
        ((1, 8, 16, 33), 7, [1, 8]),
        ((1, 8, 16, 33), 8, [1, 8]),
        ((8, 16, 33), 9, [1, 8, 16]),
        ((1, 3), 7, [1, 3]),
        ((1, 8), 1, [1]),
    ],
)
def test_widths_end_with_the_first_that_holds_the_tree(
    widths: tuple[int, ...], num_nodes: int, expected: list[int]
) -> None:
    assert graph_widths(widths, num_nodes) == expected


def test_the_rows_of_a_chunk_are_what_was_built(
    portable: Bundle, tmp_path: Path, device: OnDevice
) -> None:
    own = on_device(portable, tmp_path, prefill_chunk=11)
    own.target.widths.clear()
    options: dict[str, Any] = {"max_new_tokens": 5}
    found = own.engine.generate([*range(5, 45)], **options)
    assert own.target.widths[:4] == [11, 11, 11, 7]
    assert found.token_ids == device.engine.generate([*range(5, 45)], **options).token_ids


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
