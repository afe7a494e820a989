"""Trees of every policy in real rounds: budgets, the context's end, drafts without numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import eagle3
from eagle3.plans.tree_paths import STATIC_TREES
from eagle3.plans.tree_plan import TreePlan, TreeRequest
from eagle3.runtime.drafters.base import Drafter, DraftRequest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.ort.draft_engine import DraftEngine, DraftOutput
from eagle3.runtime.trees.tree import Tree

NO_EOS: dict[str, Any] = {"max_new_tokens": 40, "logit_bias": {1: -100.0}}
RULES: list[dict[str, Any]] = [{}, {"temperature": 0.8, "acceptance": "coupled", "seed": 3}]
CHAIN = [[0], [0, 0], [0, 0, 0]]
WIDE = [[rank] for rank in range(12)]
TREES: dict[str, TreeRequest] = {
    "eagle1": "eagle1",
    "chain": CHAIN,
    "wide": WIDE,
    "deep first": [[0], [0, 0], [0, 0, 0], [0, 0, 1], [1], [1, 0]],
    "more top-k than nodes": TreePlan(8, 1, 1),
    "few nodes": TreePlan(6, 4, 2),
    "more nodes than candidates": TreePlan(2, 2, 30),
    "more depth than nodes": TreePlan(3, 20, 5),
    "more nodes than paths": TreePlan(32, 20, 32, STATIC_TREES["eagle1"]),
    "few of the paths": TreePlan(4, 5, 3, STATIC_TREES["eagle1"]),
    "paths cut to a chain": TreePlan(1, 3, 25, STATIC_TREES["eagle1"]),
}


def prompts() -> Iterator[list[int]]:
    rng = np.random.default_rng(5)
    return (rng.integers(2, 64, 12).tolist() for _ in range(2))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("rule", RULES)
def test_the_text_is_that_of_plain_decoding(
    engine: eagle3.Engine, name: str, rule: dict[str, Any]
) -> None:
    for prompt in prompts():
        plain = engine.generate(prompt, drafter="none", **NO_EOS, **rule)
        drafted = engine.generate(prompt, tree=TREES[name], **NO_EOS, **rule)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.plain_rounds <= 1, "the last round has no room for a tree"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["eagle1", "chain", "deep first"])
def test_deep_paths_are_accepted(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, name: str, rule: dict[str, Any]
) -> None:
    """The random head is helped: the right token stands at some rank of its candidates."""
    for prompt in prompts():
        plain = engine.generate(prompt, drafter="none", **NO_EOS, **rule)
        with monkeypatch.context() as patch:
            help_the_head(patch, prompt + plain.token_ids)
            drafted = engine.generate(prompt, tree=TREES[name], **NO_EOS, **rule)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.acceptance_length > 1.3
        assert drafted.stats.accepted_by_position[1] > 0


def help_the_head(patch: pytest.MonkeyPatch, text: list[int]) -> None:
    """Puts the token that `text` has at a candidate's position into a random column."""
    rng = np.random.default_rng(0)
    extend, step = DraftEngine.extend, DraftEngine.step

    def helped(out: DraftOutput, position: int) -> DraftOutput:
        for row in out.top_ids if position < len(text) else ():
            column = int(rng.integers(min(row.size, 2)))
            row[row == text[position]] = row[column]
            row[column] = text[position]
        return out

    def helped_extend(self: DraftEngine, *args: Any) -> DraftOutput:
        out = extend(self, *args)
        return helped(out, self.num_rows + 1)

    def helped_step(self: DraftEngine, ids: Any, hidden: Any, depth: int, *rest: Any) -> Any:
        return helped(step(self, ids, hidden, depth, *rest), self.num_rows + depth + 1)

    patch.setattr(DraftEngine, "extend", helped_extend)
    patch.setattr(DraftEngine, "step", helped_step)


@pytest.mark.parametrize("length", [*range(98, 128, 4), 125, 126, 127])
def test_a_static_tree_at_the_context_limit_shrinks(engine: eagle3.Engine, length: int) -> None:
    prompt = np.random.default_rng(length).integers(2, 64, length).tolist()
    options = {**NO_EOS, "max_new_tokens": 60}
    plain = engine.generate(prompt, drafter="none", **options)
    drafted = engine.generate(prompt, tree="eagle1", **options)
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 128 - length
    assert drafted.finish_reason == plain.finish_reason == "length"


@pytest.mark.parametrize("limit", range(1, 9))
def test_max_new_tokens_cut_the_levels(engine: eagle3.Engine, limit: int) -> None:
    prompt = next(prompts())
    options = {**NO_EOS, "max_new_tokens": limit}
    plain = engine.generate(prompt, drafter="none", **options)
    assert engine.generate(prompt, tree="eagle1", **options).token_ids == plain.token_ids


def test_static_ranks_beyond_the_draft_vocabulary_are_left_out(
    small_engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head knows 8 tokens: of 12 ranks there are 8, and no token twice."""
    trees = proposals(monkeypatch)
    options: dict[str, Any] = {"max_new_tokens": 12, "logit_bias": {1: -100.0}}
    plain = small_engine.generate([3, 4], drafter="none", **options)
    assert small_engine.generate([3, 4], tree=WIDE, **options).token_ids == plain.token_ids
    assert {tree.num_draft_tokens for tree in trees} == {8}


@pytest.mark.parametrize("tree", ["eagle1", TreePlan(3, 5, 12)], ids=["static", "dynamic"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rule", [*RULES, {"temperature": 0.8}])
def test_a_draft_without_numbers_ends_the_tree_there(
    engine: eagle3.Engine,
    monkeypatch: pytest.MonkeyPatch,
    tree: TreeRequest,
    bad: float,
    rule: dict[str, Any],
) -> None:
    """From the second step on the head gives no numbers; the levels before it stay."""
    step = DraftEngine.step

    def broken(self: DraftEngine, ids: Any, hidden: Any, depth: int, *rest: Any) -> Any:
        out = step(self, ids, hidden, depth, *rest)
        if depth == 2:
            out.top_log_probs[:] = bad
        return out

    monkeypatch.setattr(DraftEngine, "step", broken)
    trees = proposals(monkeypatch)
    prompt = next(prompts())
    drafted = engine.generate(prompt, tree=tree, **NO_EOS, **rule)
    assert {int(each.depths.max()) for each in trees} == {1, 2}, "1 where 2 tokens are left"
    if rule.get("acceptance") == "coupled" or not rule:
        plain = engine.generate(prompt, drafter="none", **NO_EOS, **rule)
        assert drafted.token_ids == plain.token_ids


def test_a_static_tree_runs_only_nodes_with_children(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, widths = DraftEngine.step, []

    def counted(self: DraftEngine, ids: Any, *rest: Any) -> Any:
        widths.append(len(ids))
        return step(self, ids, *rest)

    monkeypatch.setattr(DraftEngine, "step", counted)
    engine.generate(next(prompts()), tree="eagle1", max_new_tokens=7, logit_bias={1: -100.0})
    assert widths[:4] == [4, 4, 1, 1]


def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """The trees that the head proposes from here on; each is checked as it comes."""
    trees: list[Tree] = []
    propose = EagleDrafter.propose

    def checked(self: Drafter, request: DraftRequest) -> Tree:
        tree = propose(self, request)  # type: ignore[arg-type]
        tree.validate()
        assert tree.num_draft_tokens <= request.tree.num_draft_tokens
        assert tree.depths.max() <= request.tree.draft_depth
        trees.append(tree)
        return tree

    monkeypatch.setattr(EagleDrafter, "propose", checked)
    return trees
