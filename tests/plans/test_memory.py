"""Tests of the memory estimates: known models computed by hand, and properties of any model."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_models import llama_8b, llama_8b_head, mixture, smollm2

from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.memory import (
    check_memory,
    kv_bytes_per_token,
    longest_context,
    matrix_bytes,
    memory,
    size_text,
)
from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import PlanError

GPU = Plan(
    max_seq_len=4096,
    max_draft_tokens=63,
    tree=TreePlan(10, 7, 59),
    dtype="float16",
    lowering="portable",
    backend="tensorrt",
    verify_widths=(1, 8, 16, 32, 64),
)


def device(memory_bytes: int, **fields: Any) -> DeviceSpec:
    peak = {"float32": 1e12, "float16": 2e12}
    return DeviceSpec("a device", "made up", memory_bytes, 0, 1e11, peak, **fields)


def test_llama_8b_in_float16() -> None:
    target = llama_8b()
    assert target.num_parameters == 8_030_261_248
    needed = memory(target, None, GPU)
    assert needed.target_weights == needed.target_file == 2 * 8_030_261_248
    assert kv_bytes_per_token(target.attention, GPU) == 2 * 32 * 8 * 128 * 2 == 131072
    assert needed.target_kv == 4097 * 131072
    assert (needed.draft_weights, needed.draft_kv, needed.draft_copies) == (0, 0, 0)


def test_its_head_in_float16() -> None:
    head = llama_8b_head()
    assert head.num_parameters == 424_673_280
    needed = memory(llama_8b(), head, GPU)
    assert needed.draft_weights == 2 * 424_673_280
    assert needed.draft_copies == 2 * 128256 * 4096  # plan files share no weights
    assert needed.draft_file == needed.draft_weights + needed.draft_copies
    assert needed.draft_kv == (4096 + 4 * 63) * 2 * 8 * 128 * 2
    assert needed.total == needed.weights + needed.kv + needed.activations
    assert memory(llama_8b(), head, Plan()).draft_copies == 0  # one mapped file


def test_an_eagle_1_head_brings_no_lm_head_but_a_gpu_engine_holds_one() -> None:
    head = replace(llama_8b_head(), own_lm_head=False, lm_head_parameters=128256 * 4096)
    needed = memory(llama_8b(), head, GPU)
    assert needed.draft_weights == 2 * (head.fuse_parameters + head.step_parameters)
    assert needed.draft_copies == 2 * 2 * 128256 * 4096
    tied = replace(llama_8b(), tied=True)
    assert memory(tied, head, GPU).draft_copies == 2 * 128256 * 4096


def test_int8_is_a_byte_and_a_scale_a_block() -> None:
    assert matrix_bytes(1280, "int8", "float16", 4096) == 1280 + 2 * 10  # blocks of 128
    assert matrix_bytes(1280, "int8", "float32", 576) == 1280 + 4 * 20  # blocks of 64
    assert matrix_bytes(1280, "same", "bfloat16", 576) == 2560
    plan = replace(GPU, target_weights="int8")
    needed, target = memory(llama_8b(), None, plan), llama_8b()
    matrices = target.layer_parameters + 128256 * 4096
    rest = 2 * (128256 * 4096 + 4096)  # the embedding table and the last norm stay float16
    assert needed.target_weights == matrices * (1 + 2 / 128) + rest


def test_a_tied_table_is_int8_on_the_cpu_only() -> None:
    target, on_gpu = smollm2(), replace(GPU, target_weights="int8")
    rest = target.num_parameters - target.layer_parameters
    found = memory(target, None, on_gpu).target_weights
    assert found == round(target.layer_parameters * (1 + 2 / 64)) + 2 * rest
    on_cpu = replace(Plan(), target_weights="int8")
    matrices = target.layer_parameters + target.embedding_parameters
    norms = target.num_parameters - matrices
    found = memory(target, None, on_cpu).target_weights
    assert found == round(matrices * (1 + 4 / 576) + 4 * norms)


def test_activations_of_one_layer_by_hand() -> None:
    """d 10, I 20, 2 heads and 1 KV head of 5, V 100; 7 rows, 17 slots, logits of 4 rows."""
    plan = Plan(16, 7, 3, TreePlan(1, 3, 3))
    values = 7 * (4 * 10 + 2 * 20 + (2 + 2) * 5) + 7 * 17
    scores = 2 * 7 * 17
    assert memory(mixture(), None, plan).target_activations == 4 * (values + scores + 4 * 100)
    fused = replace(plan, backend="tensorrt", lowering="portable")
    assert memory(mixture(), None, fused).target_activations == 4 * (values + 4 * 100)


def test_all_experts_are_stored() -> None:
    assert memory(mixture(), None, Plan()).target_weights == 4 * 11000


plans = st.builds(
    Plan,
    max_seq_len=st.integers(64, 4096),
    prefill_chunk=st.integers(1, 64),
    max_draft_tokens=st.integers(4, 63),
    batch=st.integers(1, 4),
    draft_weights=st.sampled_from(["same", "int8"]),
)
targets = st.sampled_from([llama_8b(), smollm2(), mixture()])
heads = st.sampled_from([None, llama_8b_head()])


@given(targets, heads, plans, st.integers(1, 5000))
def test_more_context_never_costs_less(target: Any, head: Any, plan: Plan, longer: int) -> None:
    more = replace(plan, max_seq_len=plan.max_seq_len + longer)
    assert memory(target, head, more).total > memory(target, head, plan).total


@given(targets, heads, plans, st.integers(0, 60_000_000_000))
def test_a_plan_is_refused_exactly_when_it_needs_more_than_there_is(
    target: Any, head: Any, plan: Plan, size: int
) -> None:
    needed = memory(target, head, plan).total
    assert check_memory(target, head, plan, device(needed)).total == needed
    for has in {needed - 1, size + 1}:
        if has >= needed:
            assert check_memory(target, head, plan, device(has)).total == needed
            continue
        with pytest.raises(PlanError) as caught:
            check_memory(target, head, plan, device(has))
        assert f"needs {size_text(needed)}" in str(caught.value)
        assert f"has {size_text(has)}" in str(caught.value)


@given(targets, heads, plans, st.integers(1, 60_000_000_000))
def test_the_longest_context_is_the_longest(target: Any, head: Any, plan: Plan, size: int) -> None:
    found = longest_context(target, head, plan, device(size))

    def fits(max_seq_len: int) -> bool:
        shorter = min(plan.prefill_chunk, max_seq_len)
        other = replace(plan, max_seq_len=max_seq_len, prefill_chunk=shorter)
        return memory(target, head, other).total <= size

    shortest = plan.max_draft_tokens + 1
    if found is None:
        assert not fits(shortest)
    else:
        assert fits(found) and (found == plan.max_seq_len or not fits(found + 1))


def test_a_refusal_says_what_would_fit() -> None:
    target, head = llama_8b(), llama_8b_head()
    full = memory(target, head, GPU)
    with pytest.raises(PlanError, match=r"max_seq_len \d+ or less would fit"):
        check_memory(target, head, GPU, device(full.total - 10_000_000))
    with pytest.raises(
        PlanError,
        match=r"draft_weights int8 would fit, target_weights int8 would fit \(not implemented",
    ):
        check_memory(target, head, GPU, device(full.total - 10_000_000))
    with pytest.raises(PlanError, match="the target without a draft would fit"):
        check_memory(target, head, GPU, device(full.total - 10_000_000))
    with pytest.raises(
        PlanError, match="neither a shorter context nor int8 weights would make it fit"
    ):
        check_memory(target, head, GPU, device(1_000_000_000))
    plain = Plan(max_draft_tokens=16)
    with pytest.raises(PlanError, match="dtype float16 would fit"):
        check_memory(target, None, plain, device(20_000_000_000))


def test_the_context_it_names_does_fit() -> None:
    target, head = llama_8b(), llama_8b_head()
    small = device(memory(target, head, GPU).total - 100_000_000)
    longest = longest_context(target, head, GPU, small)
    assert longest is not None and longest < 4096
    assert check_memory(target, head, replace(GPU, max_seq_len=longest), small)


def test_what_the_system_holds_is_not_for_engines() -> None:
    needed = memory(smollm2(), None, Plan()).total
    busy = DeviceSpec("busy", "made up", needed, 1, 1e11, {"float32": 1e12})
    with pytest.raises(PlanError, match="less 1 bytes reserved|less 0.0 MB reserved"):
        check_memory(smollm2(), None, Plan(), busy)
