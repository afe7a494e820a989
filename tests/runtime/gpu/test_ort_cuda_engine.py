"""ONNX Runtime's CUDA provider: how it is asked, and what is refused, on the stand-in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from on_device import copy_of, on_device
from programs import build_plan_files, programs_of
from stand_in import RuleBroken, StandInDriver
from stand_in_ort import Options, StandInOrt

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BundleError, DeviceError, EngineError, EngineMissing, PlanError
from eagle3.runtime.gpu import load as gpu_load
from eagle3.runtime.gpu import ort_cuda_engine as ort_engine
from eagle3.runtime.gpu.driver import DeviceBuffer
from eagle3.runtime.gpu.load import chosen_backend, load_engines
from eagle3.runtime.gpu.ort_cuda_engine import OrtCuda, OrtEngine
from eagle3.runtime.ort.target_engine import bound_target

NOWHERE = DeviceBuffer(0, 0)


class Setup:
    """The target of a bundle on the stand-in, with memory for a call of some rows."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.driver = bundle, StandInDriver()
        self.module = StandInOrt(self.driver, programs_of(bundle))

    def engine(self) -> OrtEngine:
        bound = bound_target(self.bundle.manifest)
        return OrtEngine(self.bundle, "target", bound, OrtCuda(self.module), self.driver)

    def call(self, engine: OrtEngine, rows: int, **moved: int) -> Any:
        sizes = {"B": 1, "N": rows, "M": 1}
        shapes, addresses = {}, {}
        for spec in (*engine.inputs, *engine.outputs):
            shape = tuple(sizes.get(dim, dim) for dim in spec.shape)  # type: ignore[call-overload]
            count = 1
            for size in shape:
                count *= size
            address = self.driver.allocate(8 * count, spec.name).address
            addresses[spec.name] = addresses.get(spec.name.replace("present", "past"), address)
            if spec in engine.inputs:
                shapes[spec.name] = shape
        return engine.call(shapes, {**addresses, **moved}, NOWHERE)


@pytest.fixture
def setup(portable: Bundle) -> Setup:
    return Setup(portable)


def test_a_call_is_captured_after_the_first_of_its_shapes(setup: Setup) -> None:
    engine = setup.engine()
    call, other = setup.call(engine, 3), setup.call(engine, 4)
    for each in (call, call, other):
        each.enqueue()
    call.check_capturable()
    setup.driver.synchronize()
    with setup.driver.capture() as graphs:
        call.enqueue()
    with pytest.raises(EngineError, match="first two calls"), setup.driver.capture():
        other.enqueue()
    program = setup.module._programs["target"]
    program.widths.clear()  # type: ignore[attr-defined]
    graphs[0].replay()
    setup.driver.synchronize()
    assert program.widths == [3]  # type: ignore[attr-defined]


def test_loose_calls_are_bound_once_for_each_shape(setup: Setup) -> None:
    engine = setup.engine()
    spec = {spec.name: spec for spec in engine.inputs}
    made: list[Any] = []
    engine.call = lambda shapes, *_: made.append(shapes) or len(made)  # type: ignore

    def loose(rows: int) -> Any:
        shapes = {"input_ids": (1, rows), "past_len": (1,)}
        assert set(shapes) <= set(spec)
        return engine.loose_call(shapes, {}, NOWHERE)

    assert [loose(16), loose(8), loose(16), loose(8)] == [1, 2, 1, 2]
    for rows in range(20, 20 + 2 * ort_engine._MAX_LOOSE):
        loose(rows)
    assert len(engine._loose) == ort_engine._MAX_LOOSE


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("disable_cpu_ep_fallback", "may fall back"),
        ("disable_synchronize_execution_providers", "waits at the end"),
    ],
)
def test_what_must_be_asked_of_it_is(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    """The stand-in refuses a session or a call without it."""
    add = Options.add_session_config_entry

    def but_not(self: Options, name: str, value: str) -> None:
        if key not in name:
            add(self, name, value)

    for name in ("add_session_config_entry", "add_run_config_entry"):
        monkeypatch.setattr(Options, name, but_not)
    with pytest.raises((RuleBroken, BundleError, EngineError), match=message):
        setup.call(setup.engine(), 2).enqueue()


def test_float32_products_are_not_rounded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    make = StandInOrt.InferenceSession

    def spy(self: StandInOrt, path: str, options: Options, providers: Any, **how: Any) -> Any:
        asked.extend(settings for _, settings in providers)
        return make(self, path, options, providers, **how)

    monkeypatch.setattr(StandInOrt, "InferenceSession", spy)
    setup.engine()
    assert asked[0]["use_tf32"] == "0"


def test_an_address_that_is_none_and_caches_that_are_two(setup: Setup) -> None:
    engine = setup.engine()
    with pytest.raises(EngineError, match="engine 'target' rejected a binding: .* no live alloc"):
        setup.call(engine, 2, input_ids=4096)
    other = setup.driver.allocate(1 << 20, "elsewhere").address
    with pytest.raises(EngineError, match="engine 'target' failed: present_k.0 and past_k.0 must"):
        setup.call(engine, 2, **{"present_k.0": other}).enqueue()


def test_without_the_provider(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineMissing, match=r"onnxruntime .* no CUDA provider: .*eagle3\[gpu\]"):
        OrtCuda()
    setup.module = StandInOrt(setup.driver, setup.module._programs, starts=False)
    with pytest.raises(DeviceError, match=r"CUDA provider does not start: .*extras cuda and cudnn"):
        setup.engine()
    setup.module = StandInOrt(setup.driver, setup.module._programs)
    setup.module.InferenceSession = lambda *_, **__: 1 / 0  # type: ignore
    with pytest.raises(
        BundleError, match="engine 'target' .* must run every node: division .*build"
    ):
        setup.engine()

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("cuda_call.cc:154 long\n CUDA failure 2: out of memory ; GPU=0\n\n")

    setup.module.InferenceSession = full  # type: ignore
    with pytest.raises(DeviceError, match=r"not load: CUDA failure 2: out of memory; stop"):
        setup.engine()
    assert capsys.readouterr().out == ""


def test_a_graph_with_other_tensors_is_refused(setup: Setup) -> None:
    program = setup.module._programs["target"]
    program.inputs = [  # type: ignore[misc]
        replace(t, dtype="int32") if t.name == "past_len" else t for t in program.inputs
    ]
    with pytest.raises(BundleError, match=r"input past_len int64 \[1\] is required by its manife"):
        setup.engine()


def test_onnxruntime_describes_the_graphs_as_the_stand_in_does(portable: Bundle) -> None:
    """The real one, on the CPU: what it was told of the batch is a number in every shape."""

    class Real(StandInOrt):
        """Its sessions are onnxruntime's own; the provider is not asked for."""

        SessionOptions = staticmethod(onnxruntime.SessionOptions)  # type: ignore

        def InferenceSession(self, path: str, options: Any, **_: Any) -> Any:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
            session = onnxruntime.InferenceSession(path, options)
            session.get_providers = lambda: ["CUDAExecutionProvider"]
            return session

    driver = StandInDriver()
    programs = programs_of(portable)
    real = load_engines(portable, OrtCuda(Real(driver, programs)), driver)
    stand_in = load_engines(portable, OrtCuda(StandInOrt(driver, programs)), driver)
    for mine, theirs in ((real.target, stand_in.target), (real.draft, stand_in.draft)):
        assert isinstance(mine, OrtEngine) and isinstance(theirs, OrtEngine)
        assert sorted(map(str, mine.inputs)) == sorted(map(str, theirs.inputs))
        assert {spec.shape[0] for spec in (*mine.inputs, *mine.outputs)} == {1}


def test_no_prompt_has_calls_longer_than_those_at_load(portable: Bundle, tmp_path: Path) -> None:
    """Whose memory the provider's arena would have to grow by, for good."""
    own = on_device(portable, tmp_path, library="ort-cuda")
    programs = (own.target, own.growth)
    longest = [max(program.widths) for program in programs]
    for size in (*range(1, 17), 40):
        own.engine.generate([1 + i % 60 for i in range(size)], max_new_tokens=2)
    assert [max(program.widths) for program in programs] == longest
    assert longest[0] >= portable.manifest.plan.prefill_chunk


def test_it_is_chosen_where_there_are_no_plan_files(
    portable: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineMissing, match="no CUDA provider"):
        gpu_load._library("ort-cuda")
    found = SimpleNamespace(name="what is installed")
    monkeypatch.setattr(gpu_load, "find_library", lambda: found)
    assert chosen_backend(portable) == "what is installed"
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    assert chosen_backend(portable) == "ort-cuda"
    assert isinstance(gpu_load._library("ort-cuda"), OrtCuda)
    monkeypatch.undo()
    plan = replace(portable.manifest.plan, backend="ort-cuda")
    planned = replace(portable, manifest=replace(portable.manifest, plan=plan))
    assert chosen_backend(planned) == "ort-cuda", "which then says how to install it"
    built = copy_of(portable, tmp_path)
    build_plan_files(built.root)
    assert chosen_backend(built) == "tensorrt", "somebody built them"


def test_a_bundle_without_a_draft(setup: Setup) -> None:
    """`load_engines` of the same library and a manifest that has no head."""
    manifest = replace(setup.bundle.manifest, drafts={})
    bundle = replace(setup.bundle, manifest=manifest)
    engines = load_engines(bundle, OrtCuda(setup.module), setup.driver)
    assert (engines.draft, engines.drafter, engines.num_nodes) == (None, None, 1)
    assert engines.prefill_chunk == manifest.plan.prefill_chunk


def test_int8_weights_are_refused_with_the_way_out(setup: Setup) -> None:
    """Those of the head that drafts: the plan says what its first draft was exported with."""
    manifest = setup.bundle.manifest
    plan = replace(manifest.plan, draft_weights="int8")
    of_another = replace(setup.bundle, manifest=replace(manifest, plan=plan))
    assert load_engines(of_another, OrtCuda(setup.module), setup.driver).draft is not None
    drafts = {name: replace(info, weights="int8") for name, info in manifest.drafts.items()}
    bundle = replace(setup.bundle, manifest=replace(manifest, drafts=drafts))
    with pytest.raises(PlanError, match="draft eagle3 are int8 .*--draft-weights same, or run"):
        load_engines(bundle, OrtCuda(setup.module), setup.driver)
    with pytest.raises(PlanError, match="draft_weights int8 is not supported by backend ort-cuda"):
        replace(plan, backend="ort-cuda")
