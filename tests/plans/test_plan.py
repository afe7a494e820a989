"""Tests of plans: defaults, ranges, strict JSON and the trees of requests."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.plans.backends import widths_of, widths_up_to
from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import MAX_DRAFT_TOKENS, TreePlan
from eagle3.runtime.errors import PlanError

GPU = {"backend": "tensorrt", "lowering": "portable", "dtype": "float16"}


def test_defaults_are_a_valid_plan() -> None:
    plan = Plan()
    assert (plan.max_seq_len, plan.prefill_chunk, plan.max_draft_tokens) == (2048, 128, 64)
    assert plan.tree == TreePlan(draft_top_k=1, draft_depth=3, num_draft_tokens=3)
    assert (plan.dtype, plan.draft_weights) == ("float32", "same")
    assert (plan.lowering, plan.backend) == ("ort", "ort-cpu")
    assert (plan.batch, plan.verify_widths) == (1, ())
    assert (plan.target_weights, plan.kv_dtype) == ("same", "same")
    assert (plan.compute_capability, plan.workspace_bytes) == (None, None)
    assert plan.unbuilt == ()


def test_a_plan_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Plan().max_seq_len = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_seq_len": 1}, r"max_seq_len must be from 2 to \d+, got 1"),
        ({"max_seq_len": 2048.0}, r"max_seq_len must be an integer from 2 to .*, got 2048.0"),
        ({"max_seq_len": True}, r"max_seq_len must be an integer from 2 to .*, got True"),
        ({"prefill_chunk": 0}, r"prefill_chunk must be from 1 to max_seq_len = 2048, got 0"),
        (
            {"max_seq_len": 100},
            r"prefill_chunk must be from 1 to max_seq_len = 100, got 128: raise max_seq_len",
        ),
        (
            {"max_seq_len": 64, "prefill_chunk": 8},
            r"max_draft_tokens must be .* max_seq_len - 1 = 63, got 64: raise max_seq_len",
        ),
        ({"max_draft_tokens": 2}, r"num_draft_tokens is 3, .* max_draft_tokens is 2"),
        (
            {"max_draft_tokens": MAX_DRAFT_TOKENS + 1},
            r"max_draft_tokens must be from 1 to 1024, got 1025",
        ),
        ({"dtype": "float64"}, r"dtype must be one of float32, float16, bfloat16, got 'float64'"),
        ({"draft_weights": 8}, r"draft_weights must be one of .*, got 8"),
        ({"lowering": "trt"}, r"lowering must be one of ort, portable, got 'trt'"),
        ({"backend": "tpu"}, r"backend must be one of ort-cpu.*, got 'tpu'"),
        ({"dtype": "bfloat16"}, r"dtype bfloat16 is not supported by backend ort-cpu"),
        ({"tree": (1, 2, 3)}, r"tree must be a TreePlan, got \(1, 2, 3\)"),
        ({"batch": 0}, r"batch must be from 1 to 1024, got 0"),
        ({"target_weights": "int4"}, r"target_weights must be one of same, int8, got 'int4'"),
        ({"kv_dtype": "int8"}, r"kv_dtype must be one of same, float32.*, got 'int8'"),
        ({**GPU, "lowering": "ort"}, r"lowering ort is not .* backend tensorrt, .* portable"),
        ({**GPU, "backend": "tensorrt-rtx", "lowering": "ort"}, r"backend tensorrt-rtx,"),
        ({**GPU, "compute_capability": 8.9}, r"compute_capability must be .* '8.9', got 8.9"),
        ({**GPU, "compute_capability": "sm89"}, r"compute_capability must be .*, got 'sm89'"),
        ({"compute_capability": "8.9"}, r"compute_capability is 8.9, .* ort-cpu builds no plan"),
        ({"workspace_bytes": 1 << 30}, r"workspace_bytes is 1073741824, .* ort-cpu builds no"),
        ({**GPU, "workspace_bytes": 0}, r"workspace_bytes must be from 1 to \d+, got 0"),
        (
            {"verify_widths": (1, 65)},
            r"verify_widths is \[1, 65\], but backend ort-cpu does not pad",
        ),
        ({**GPU, "verify_widths": 65}, r"verify_widths must be a list of integers .*, got 65"),
        ({**GPU, "verify_widths": [1, 65.0]}, r"verify_widths must be a list .*, got \[1, 65.0\]"),
        (
            {**GPU, "verify_widths": [0, 65]},
            r"verify_widths must be strictly ascending .*, got \[0, 65\]",
        ),
        ({**GPU, "verify_widths": [8, 8, 65]}, r"strictly ascending .*, got \[8, 8, 65\]"),
        ({**GPU, "verify_widths": [1, 64]}, r"ends at 64, .* can have 65 rows .* add 65"),
        ({**GPU, "verify_widths": [1, 4096]}, r"ends at 4096, which exceeds max_seq_len 2048"),
    ],
)
def test_a_contradiction_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**values)


@pytest.mark.parametrize("field", ["draft_top_k", "draft_depth", "num_draft_tokens"])
@pytest.mark.parametrize("value", [0, -1, 10**9, "3", None, True, 1.5])
def test_a_tree_names_the_wrong_field(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"tree.{field} must be .*1 to"):
        TreePlan(**{field: value})


def test_the_cache_may_be_exactly_as_large_as_one_verification() -> None:
    plan = Plan(max_seq_len=65, prefill_chunk=65, max_draft_tokens=64)
    assert plan.max_draft_tokens + 1 == plan.max_seq_len


@pytest.mark.parametrize(("top_k", "depth", "expected"), [(1, 3, 3), (10, 1, 10), (4, 3, 36)])
def test_candidates_of_a_dynamic_tree(top_k: int, depth: int, expected: int) -> None:
    assert TreePlan(top_k, depth, 1).num_candidates == expected


def test_override_replaces_only_what_is_named() -> None:
    plan = Plan(tree=TreePlan(4, 3, 8))
    assert plan.override() == plan.tree
    assert plan.override(draft_depth=5) == TreePlan(4, 5, 8)
    assert plan.override(1, 2, 64) == TreePlan(1, 2, 64)  # more than the 2 candidates
    assert plan.tree == TreePlan(4, 3, 8)


@pytest.mark.parametrize("num_draft_tokens", [0, -5])
def test_override_refuses_an_empty_tree(num_draft_tokens: int) -> None:
    with pytest.raises(
        PlanError, match=f"num_draft_tokens must be from 1 to .*, got {num_draft_tokens}"
    ):
        Plan().override(num_draft_tokens=num_draft_tokens)


def test_a_tree_above_the_plan_is_refused_with_both_numbers() -> None:
    plan = Plan(max_draft_tokens=16)
    with pytest.raises(PlanError, match=r"num_draft_tokens is 17, .*max_draft_tokens is 16"):
        plan.override(num_draft_tokens=17)


def test_numpys_integers_are_stored_as_int() -> None:
    tree = TreePlan(np.int64(4), np.int32(3), np.uint8(8))  # type: ignore[arg-type]
    plan = Plan(np.int64(512), np.int16(32), np.uint8(16), tree)  # type: ignore[arg-type]
    assert plan == Plan(512, 32, 16, TreePlan(4, 3, 8))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert type(plan.override(draft_depth=np.int64(2)).draft_depth) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(2), np.int64(0)])
def test_numpys_other_values_are_refused(value: Any) -> None:
    with pytest.raises(PlanError, match=r"tree.draft_depth must be .*1 to"):
        Plan().override(draft_depth=value)


def test_json_round_trip() -> None:
    plan = Plan(max_seq_len=512, tree=TreePlan(4, 4, 10), dtype="float16", lowering="portable")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_round_trip_of_a_gpu_plan() -> None:
    plan = Plan(
        **GPU,  # type: ignore[arg-type]
        verify_widths=[1, np.int64(16), 65],  # type: ignore[arg-type]
        compute_capability="8.9",
        workspace_bytes=1 << 30,
    )
    assert plan.verify_widths == (1, 16, 65)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("backend", ["ort-cuda", "tensorrt", "tensorrt-rtx"])
def test_a_gpu_plan_resolves_to_widths_that_cover_every_tree(backend: str) -> None:
    plan = Plan(lowering="portable", dtype="float16", backend=backend, max_draft_tokens=40)
    resolved = plan.resolved()
    assert plan.verify_widths == () and plan.kv_dtype == "same"  # a new object
    assert resolved.verify_widths == (1, 8, 16, 32, 41)
    assert resolved.kv_dtype == "float16"
    assert resolved.resolved() == resolved


@given(st.integers(1, 1024))
def test_widths_cover_one_row_to_all(rows: int) -> None:
    widths = widths_up_to(rows)
    assert widths[0] == 1 and widths[-1] == rows
    assert widths_of(widths, rows, 1 << 20) == widths  # they pass the check of a plan


def test_a_cpu_plan_resolves_to_calls_of_any_width() -> None:
    assert Plan().resolved() == replace(Plan(), kv_dtype="float32")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 4}, "batch is 4"),
        ({"target_weights": "int8", "lowering": "portable"}, "target_weights is int8.*portable"),
        ({"kv_dtype": "float16"}, "kv_dtype is float16, .* float32"),
    ],
)
def test_what_nothing_builds_may_be_planned_but_says_so(
    values: dict[str, Any], message: str
) -> None:
    plan = Plan(**values)
    assert len(plan.unbuilt) == 1
    with pytest.raises(PlanError, match=message):
        plan.require_built()
    with pytest.raises(PlanError, match=message):
        Plan.from_json(plan.to_json())  # the plan of a bundle must be built
    Plan(kv_dtype="float32").require_built()  # equals "same"


def test_json_is_strict() -> None:
    good = Plan().to_json()
    with pytest.raises(PlanError, match=r"plan has unknown fields \['max_len'\]"):
        Plan.from_json({**good, "max_len": 3})
    with pytest.raises(PlanError, match=r"tree has unknown fields \['top_k'\]"):
        Plan.from_json({**good, "tree": {**good["tree"], "top_k": 3}})
    with pytest.raises(PlanError, match=r"tree must be a JSON object, got list"):
        Plan.from_json({**good, "tree": [1, 2, 3]})
    with pytest.raises(PlanError, match=r"plan must be a JSON object, got NoneType"):
        Plan.from_json(None)
    for name in good:
        with pytest.raises(PlanError, match=rf"plan is missing the fields \['{name}'\]"):
            Plan.from_json({key: value for key, value in good.items() if key != name})
