"""Facts of a bundle, from its manifest, against those of the checkpoints it was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from eagle3.export.targets.checkpoint_facts import draft_facts, target_facts
from eagle3.plans.memory import memory
from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.bundle_facts import bundle_facts, differences
from eagle3.runtime.bundle.describe import cache_bytes
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import PlanError


def test_a_bundle_says_what_its_checkpoints_say(
    bundle: Bundle, llama_folder: Path, head_folder: Path
) -> None:
    """But for what is in no manifest: whether lm_head is tied, vectors, and small constants."""
    target, draft = bundle_facts(bundle)
    source = target_facts(str(llama_folder))
    head = draft_facts(str(head_folder), source)
    assert draft is not None
    assert target.attention == source.attention and draft.attention == head.attention
    assert target.num_parameters == pytest.approx(source.num_parameters, rel=0.05)
    assert draft.step_parameters == pytest.approx(head.step_parameters, rel=0.05)
    assert draft.fuse_parameters == pytest.approx(head.fuse_parameters, rel=0.05)
    assert draft.lm_head_parameters == head.lm_head_parameters
    assert (draft.feature_size, draft.hidden_size) == (head.feature_size, head.hidden_size)
    assert draft.intermediate_size == pytest.approx(head.intermediate_size, rel=0.1)
    assert target.intermediate_size > 0
    assert target.tied and any("lm_head" in note for note in target.notes)


def test_caches_are_those_of_inspect(bundle: Bundle) -> None:
    target, draft = bundle_facts(bundle)
    needed = memory(target, draft, bundle.manifest.plan)
    assert {"target": needed.target_kv, "eagle3.draft": needed.draft_kv} == cache_bytes(bundle)


def test_the_head_is_found_behind_other_drafts(bundle: Bundle) -> None:
    drafts = bundle.manifest.drafts
    small = replace(drafts["eagle3"], method="model")
    both = Bundle(bundle.root, replace(bundle.manifest, drafts={"small": small, **drafts}))
    assert bundle_facts(both)[1] == bundle_facts(bundle)[1]
    alone = Bundle(bundle.root, replace(bundle.manifest, drafts={"small": small}))
    with pytest.raises(PlanError, match="has the drafts small, but only EAGLE heads"):
        bundle_facts(alone)


def test_a_mixture_is_refused(bundle: Bundle) -> None:
    info = replace(bundle.manifest.target, architecture="Qwen3MoeForCausalLM")
    other = Bundle(bundle.root, replace(bundle.manifest, target=info))
    with pytest.raises(PlanError, match="Qwen3MoeForCausalLM is a mixture .* pass the checkpoint"):
        bundle_facts(other)


def test_what_a_plan_asks_that_the_graphs_were_not_made_for(bundle: Bundle) -> None:
    own = bundle.manifest.plan
    assert differences(bundle, own) == []
    assert differences(bundle, replace(own, tree=TreePlan(1, 2, 2))) == []
    other = replace(own, max_seq_len=256, lowering="portable")
    assert [each.split(",")[0] for each in differences(bundle, other)] == [
        "the bundle was exported with max_seq_len 128",
        "the bundle was exported with lowering ort",
    ]


def test_a_manifest_with_a_plan_that_nothing_runs_is_refused(
    bundle: Bundle, tmp_path: Path
) -> None:
    plan: Plan = replace(bundle.manifest.plan, batch=8)
    with pytest.raises(Exception, match="plan: batch is 8, but every backend drafts for one"):
        tiny.edited_bundle(bundle, tmp_path / "edited", plan=plan)
