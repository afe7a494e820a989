"""Tests of the latency estimates: known models computed by hand, and properties of any model."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_models import llama_8b, llama_8b_head, mixture, smollm2

from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.facts import Experts
from eagle3.plans.plan import Plan
from eagle3.plans.preset import load_preset
from eagle3.plans.roofline import draft_growth, expected_round, target_call
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import PlanError

# With 1 GB/s and 1 GFLOP/s, the times in milliseconds equal MB and MFLOP.
UNIT = DeviceSpec("unit", "made up", 1 << 40, 0, 1e9, {"float32": 1e9, "float16": 1e9}, "8.9")
GPU = Plan(
    max_seq_len=4096,
    max_draft_tokens=63,
    tree=TreePlan(10, 7, 59),
    dtype="float16",
    lowering="portable",
    backend="tensorrt",
    verify_widths=(1, 8, 16, 32, 64),
)
ORT = Plan(dtype="float16", tree=TreePlan(3, 3, 5))


def test_a_plain_step_of_llama_8b_by_hand() -> None:
    """It reads all matrices but the embedding, the cache, and writes one row of logits; 2 FLOPs per
    parameter."""
    call = target_call(llama_8b(), GPU, UNIT, rows=1, context=100)
    weights = 2 * (8_030_261_248 - 128256 * 4096 - 4096)
    cache = (4097 + 1) * 131072  # portable attention reads all slots
    assert call.num_bytes == weights + cache + 128256 * 4
    products = 2 * (8_030_261_248 - 128256 * 4096 - 4096)
    assert call.flops == products + 4 * 32 * 32 * 128 * 4097
    assert call.memory_ms == pytest.approx(call.num_bytes / 1e6)
    assert call.compute_ms == pytest.approx(call.flops / 1e6)


def test_fused_attention_reads_what_is_filled() -> None:
    call = target_call(llama_8b(), ORT, UNIT, rows=4, context=100)
    weights = 2 * (8_030_261_248 - 128256 * 4096 - 4096)
    assert call.num_bytes == weights + (104 + 4) * 131072 + 4 * 128256 * 4
    assert call.flops == 4 * weights + 4 * 32 * 32 * 128 * 4 * 104


def test_the_growth_of_a_tree_by_hand() -> None:
    head = llama_8b_head()
    first, *steps = draft_growth(head, replace(ORT, tree=TreePlan(3, 4, 9)), UNIT, context=100)
    assert len(steps) == 3 and len(set(map(id, steps))) == 1
    read = head.step_parameters + head.lm_head_parameters
    cache = 2 * 8 * 128 * 2
    assert steps[0].num_bytes == 2 * read + (103 + 3) * cache + 3 * 32000 * 4
    assert steps[0].flops == 2 * 3 * read + 4 * 32 * 128 * 3 * 103
    # The committed rows, at most 5, go through fc; only the last one has logits.
    assert first.num_bytes == 2 * head.num_parameters + (105 + 5) * cache + 32000 * 4
    layers = head.fuse_parameters + head.step_parameters
    assert first.flops == 2 * (5 * layers + head.lm_head_parameters) + 4 * 32 * 128 * 5 * 105


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    """With 2 of 8 experts per token, one token reads 2,000 of 8,000 parameters, and two tokens read
    8000 * (1 - (6/8)^2)."""
    plan = Plan(64, 16, 8, TreePlan(1, 3, 3))
    calls = [target_call(mixture(), plan, UNIT, rows, context=0) for rows in (1, 2)]
    head, cache, logits = 4 * 1000, 2 * 2 * 5 * 4, 100 * 4
    assert calls[0].num_bytes == 4 * (1000 + 2000) + head + (1 + 1) * cache + logits
    assert calls[1].num_bytes == 4 * (1000 + 3500) + head + (2 + 2) * cache + 2 * logits
    assert calls[1].flops == 2 * 2 * (1000 + 2000 + 1000) + 4 * 2 * 2 * 5 * 2 * 2


@given(st.integers(1, 64), st.data(), st.integers(1, 10**6))
def test_experts_read_lie_between_one_tokens_and_all(
    total: int, data: st.DataObject, parameters: int
) -> None:
    experts = Experts(total, data.draw(st.integers(1, total)), parameters)
    read = [experts.read_parameters(rows) for rows in (1, 2, 7, 64)]
    assert read[0] == pytest.approx(experts.active_parameters)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(read, read[1:], strict=False))
    assert read[-1] <= parameters * (1 + 1e-12)


@given(st.integers(1, 63), st.integers(0, 1900), st.sampled_from([ORT, GPU]))
def test_more_rows_and_more_context_never_cost_less(rows: int, context: int, plan: Plan) -> None:
    target = llama_8b()
    call = target_call(target, plan, UNIT, rows, context)
    assert target_call(target, plan, UNIT, rows + 1, context).ms > call.ms
    assert target_call(target, plan, UNIT, rows, context + 1).ms >= call.ms
    assert call.ms <= call.serial_ms <= 2 * call.ms


def test_the_bound_is_the_longer_of_the_two() -> None:
    fast = replace(UNIT, peak_flops={"float16": 1e15})
    narrow = target_call(llama_8b(), GPU, fast, 1, 0)
    assert narrow.bound == "memory" and narrow.ms == narrow.memory_ms
    slow = replace(UNIT, peak_flops={"float16": 1e6})
    wide = target_call(llama_8b(), GPU, slow, 64, 0)
    assert wide.bound == "compute" and wide.ms == wide.compute_ms


def test_a_batch_reads_weights_once_and_caches_each() -> None:
    """Arithmetic grows with the batch, the bytes of weights do not, so speculation gains less."""
    one, eight = (target_call(llama_8b(), replace(ORT, batch=b), UNIT, 1, 100) for b in (1, 8))
    assert eight.flops == pytest.approx(8 * one.flops)
    weights = 2 * (8_030_261_248 - 128256 * 4096 - 4096)
    assert eight.num_bytes - weights == pytest.approx(8 * (one.num_bytes - weights))


def test_speedup_is_tau_over_the_cost_of_a_round() -> None:
    cost = expected_round(llama_8b(), llama_8b_head(), GPU, load_preset("l4").device)
    relative = (cost.draft_ms + cost.verify_ms) / cost.plain.ms
    assert cost.speedup(4.0) == pytest.approx(4.0 / relative)
    assert cost.speedup(cost.break_even_tau) == pytest.approx(1.0)
    assert len(cost.draft) == 7 and cost.verify_width == 64  # 59 nodes and the root, padded
    assert cost.verify_ms == cost.verify[64].ms
    assert cost.serial_speedup(4.0) < cost.speedup(4.0)


def test_without_a_draft_a_round_is_a_plain_step() -> None:
    cost = expected_round(llama_8b(), None, GPU, UNIT)
    assert cost.draft == () and cost.verify_width == 1
    assert cost.speedup(1.0) == 1.0 and list(cost.verify) == [1, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("plan", "widths"),
    [
        (Plan(max_draft_tokens=16, tree=TreePlan(3, 3, 5)), [1, 2, 4, 6, 8, 16, 17]),
        (Plan(max_draft_tokens=16, tree=TreePlan(2, 1, 9)), [1, 2, 3, 4, 8, 16, 17]),  # 2 nodes
        (replace(GPU, verify_widths=()), [1, 8, 16, 32, 64]),
    ],
)
def test_the_widths_that_are_shown(plan: Plan, widths: list[int]) -> None:
    assert list(expected_round(llama_8b(), None, plan, UNIT).verify) == widths


def test_a_context_beyond_the_plan_is_refused_with_both_numbers() -> None:
    plan = Plan(64, 16, 15, TreePlan(1, 3, 3))
    assert expected_round(smollm2(), None, plan, UNIT).context == 32
    assert expected_round(smollm2(), None, plan, UNIT, context=48).context == 48
    with pytest.raises(
        PlanError, match=r"context must be from 0 to 48 \(max_seq_len 64 .*, got 49"
    ):
        expected_round(smollm2(), None, plan, UNIT, context=49)


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(
        PlanError, match="unit has no peak_flops for bfloat16, only for float32, float16"
    ):
        target_call(smollm2(), replace(GPU, dtype="bfloat16"), UNIT, 1, 0)


# Rows of a call -> ms, measured on the machine of the `cpu` preset with this package's engines.
MEASURED = {1: 17, 2: 18, 4: 21, 8: 26, 12: 30, 16: 36, 24: 48, 32: 60, 64: 110}


@pytest.mark.parametrize(("rows", "ms"), MEASURED.items())
def test_what_was_measured_on_a_cpu_is_above_the_roofline(rows: int, ms: float) -> None:
    """The roofline is a lower bound. Without overlap of memory traffic and arithmetic, the estimate
    is at most a quarter below the measurement."""
    preset: Any = load_preset("cpu")
    plan = replace(preset.plan, max_draft_tokens=64, target_weights="same")
    call = target_call(smollm2(), plan, preset.device, rows, 32)
    assert call.ms < ms
    assert 1.0 <= ms / call.serial_ms < 1.25


@pytest.mark.parametrize(("rows", "ms"), {1: 8.8, 2: 8.9, 6: 11.2, 16: 18.1}.items())
def test_what_was_measured_in_int8_is_above_the_roofline(rows: int, ms: float) -> None:
    """Integer products of a call this small do not reach the memory's bandwidth."""
    preset: Any = load_preset("cpu")
    assert preset.plan.target_weights == "int8"
    call = target_call(smollm2(), preset.plan, preset.device, rows, 200)
    assert call.ms < call.serial_ms < ms < 3 * call.serial_ms
    slower = replace(preset.device, peak_flops={"float32": 192e9})
    assert target_call(smollm2(), preset.plan, slower, rows, 200).compute_ms > call.compute_ms
