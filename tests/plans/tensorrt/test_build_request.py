"""Tests of build requests and their optimization profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.plans.plan import Plan
from eagle3.plans.tensorrt.build_request import (
    BuildRequest,
    profiles,
    request_for_bundle,
    request_from_plan,
    resolved,
)
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import EngineInfo, TensorSpec
from eagle3.runtime.errors import BuildError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"prefill_chunk": -1}, "prefill_chunk must be at least 1, got -1"),
        ({"workspace_bytes": 0}, "workspace_bytes must be at least 1, got 0"),
        ({"verify_widths": (8, 8)}, r"verify_widths must be strictly ascending .*, got \[8, 8\]"),
        ({"verify_widths": (0, 8)}, r"verify_widths must be .*, got \[0, 8\]"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        BuildRequest(**values)


def test_json_round_trip() -> None:
    request = BuildRequest("tensorrt", "8.7", 2, (1, 16), 64, 1 << 30)
    assert BuildRequest.from_json(request.to_json()) == request


def test_what_is_open_is_the_plan_s() -> None:
    plan = Plan(prefill_chunk=64)
    assert request_from_plan(plan).backend is None  # ort-cpu has no plan files
    assert resolved(BuildRequest(), plan) == BuildRequest(batch=1, prefill_chunk=64)
    asked = BuildRequest("tensorrt", "8.7", 2, (1, 16), 32, 1 << 30)
    assert resolved(asked, plan) == asked


def test_another_plan_may_not_contradict_the_bundle_s() -> None:
    exported = Plan(lowering="portable", dtype="float16")
    other = replace(exported, prefill_chunk=256, tree=TreePlan(4, 4, 8))
    assert request_for_bundle(other, exported).prefill_chunk == 256
    with pytest.raises(
        BuildError,
        match="the plan's dtype is float32, but the bundle was exported with float16: export it"
        " again with --dtype float32",
    ):
        request_for_bundle(replace(exported, dtype="float32"), exported)
    with pytest.raises(BuildError, match="max_seq_len is 4096, .*--max-seq-len 4096"):
        request_for_bundle(replace(exported, max_seq_len=4096), exported)


def test_profiles_are_ranges_of_the_plan(bundle: Bundle) -> None:
    """The bundle has max_draft_tokens 32, prefill_chunk 16, a tree of 6 nodes, K 3 and D 3."""
    verify, prefill = profiles(bundle.manifest, "target", BuildRequest())
    assert (verify.name, prefill.name) == ("verify", "prefill")
    assert verify.ranges["tree_mask"] == ((1, 1, 1), (1, 7, 7), (1, 33, 33))
    assert verify.ranges["logit_rows"] == ((1, 1), (1, 7), (1, 33))
    assert prefill.ranges["tree_mask"] == ((1, 1, 1), (1, 16, 16), (1, 16, 16))
    assert prefill.ranges["logit_rows"] == ((1, 1),) * 3
    for profile in (verify, prefill):
        assert set(profile.ranges) == {x.name for x in bundle.manifest.engines["target"].inputs}
        assert profile.ranges["past_k.7"] == ((1, 2, 129, 8),) * 3


def test_a_draft_has_its_own(bundle: Bundle) -> None:
    """The window of a draft includes the rows of earlier steps. top_k has a range of values, at
    most the size of the draft vocabulary, here 40."""
    verify, prefill = profiles(bundle.manifest, "eagle3.draft", BuildRequest())
    assert verify.ranges["tree_mask"] == ((1, 1, 1), (1, 3, 6), (1, 33, 128))
    assert verify.ranges["top_k"] == prefill.ranges["top_k"] == ((1,), (3,), (32,))
    few = replace(bundle.manifest.drafts["eagle3"], draft_vocab_size=8)
    manifest = replace(bundle.manifest, drafts={"eagle3": few})
    verify, _ = profiles(manifest, "eagle3.draft", BuildRequest())
    assert verify.ranges["top_k"] == ((1,), (3,), (8,))


def test_batch_widths_and_chunk_are_the_request_s(bundle: Bundle) -> None:
    request = BuildRequest(batch=4, verify_widths=(1, 8, 40), prefill_chunk=100)
    verify, prefill = profiles(bundle.manifest, "target", request)
    assert verify.ranges["input_ids"] == ((1, 1), (4, 8), (4, 40))  # a tree of 7 rows is padded
    assert prefill.ranges["input_ids"] == ((1, 1), (4, 100), (4, 100))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (BuildRequest(verify_widths=(1, 8)), "between 33, .* but ends at 8"),
        (BuildRequest(verify_widths=(1, 200)), "between 33, .* and 128, .* but ends at 200"),
        (BuildRequest(prefill_chunk=129), "prefill_chunk must be at most 128, .* got 129"),
    ],
)
def test_what_does_not_fit_the_bundle_is_refused(
    bundle: Bundle, request_: BuildRequest, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        profiles(bundle.manifest, "target", request_)


def test_an_unknown_dimension_is_refused(bundle: Bundle) -> None:
    odd = EngineInfo("eagle3.draft.onnx", (TensorSpec("x", "int64", ("B", "Q")),), ())
    manifest = replace(bundle.manifest, engines={**bundle.manifest.engines, "eagle3.draft": odd})
    with pytest.raises(BuildError, match=r"input x of engine eagle3.draft has .* dimension 'Q'"):
        profiles(manifest, "eagle3.draft", BuildRequest())
