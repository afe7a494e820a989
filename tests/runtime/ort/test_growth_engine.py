"""The engine that grows a whole tree: the trees of the stepwise draft, over the same cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import eagle3
from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.errors import BundleError
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.ort.growth_engine import GrowthEngine, grown_tree
from eagle3.runtime.stats import Clock

ENGINE = "eagle3.draft_tree"
PROMPT = list(range(5, 30))


class Pair:
    """A drafter that may grow in one call and one that never does, told the same."""

    def __init__(self, bundle: Bundle) -> None:
        self.clock, name = Clock(), next(iter(bundle.manifest.drafts))
        self.drafters = []
        for has_growth in (True, False):
            engine = DraftEngine(bundle, 1, self.clock, name)
            growth = GrowthEngine(bundle, name, engine, 1, self.clock) if has_growth else None
            names = (name, engine, bundle.target_ids(name), bundle.manifest.target.vocab_size)
            self.drafters.append(EagleDrafter(*names, growth))

    def tell(self, name: str, *args: Any) -> None:
        for drafter in self.drafters:
            getattr(drafter, name)(*args)

    def propose(self, root: int, tree: TreePlan) -> int:
        """Both propose the same; how many nodes."""
        ours, theirs = (drafter.propose(DraftRequest(root, tree)) for drafter in self.drafters)
        ours.validate()
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.parents.tolist() == theirs.parents.tolist()
        return ours.num_nodes


@pytest.mark.parametrize("name", ["bundle", "windowed_bundle"])
def test_both_ways_take_turns_on_one_cache(name: str, request: pytest.FixtureRequest) -> None:
    """Rounds of a request, in either lowering: rows kept, rows taken back, trees cut by a limit
    and grown again. A cut in depth is grown a level a call, whose rows stand where the graph
    writes next.
    """
    bundle: Bundle = request.getfixturevalue(name)
    rng, pair, own = np.random.default_rng(0), Pair(bundle), bundle.manifest.plan.tree
    vocab = bundle.manifest.target.vocab_size
    pair.tell("reset")
    pair.tell("observe", rng.integers(0, vocab, 16), rng.normal(size=(16, 96)).astype(np.float32))
    for i in range(40):
        count = int(rng.integers(1, 4))
        tokens = rng.integers(0, vocab, count)
        pair.tell("observe", tokens, rng.normal(size=(count, 96)).astype(np.float32))
        depth = own.draft_depth if i % 3 else int(rng.integers(1, own.draft_depth))
        nodes = int(rng.integers(1, own.num_draft_tokens + 1))
        tree = replace(own, draft_depth=depth, num_draft_tokens=nodes)
        num_nodes = pair.propose(int(rng.integers(0, vocab)), tree)
        assert num_nodes == 1 + min(nodes, tree.num_candidates)
        if i % 4 == 0:
            pair.tell("rewind", 1)
    assert pair.clock.calls[ENGINE] == 26  # of 40


def test_int8_weights_grow_the_same_trees(
    shallow: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    """And they are in the files of the other engines: the graph brings none of its own."""
    plan = tiny.tiny_plan(draft_weights="int8")
    options: dict[str, Any] = {"draft_vocab_size": 40, "aux_layer_ids": (0, 1, 2)}
    head = tiny.save_head(tmp_path / "head", shallow, **options)
    bundle = tiny.export_tiny(shallow_folder, head, tmp_path / "bundle", plan)
    rng, pair = np.random.default_rng(1), Pair(bundle)
    pair.tell("reset")
    for _ in range(12):
        pair.tell("observe", rng.integers(0, 64, 3), rng.normal(size=(3, 96)).astype(np.float32))
        pair.propose(int(rng.integers(0, 64)), plan.tree)
    own, draft = (bundle.root / f"{name}.onnx.data" for name in (ENGINE, "eagle3.draft"))
    assert not own.exists() or own.stat().st_size < draft.stat().st_size / 8


def test_a_request_grows_in_one_call_a_round(engine: eagle3.Engine) -> None:
    """But for the last rounds, whose trees are cut to what is left of the tokens."""
    before = dict(engine._clock.calls)
    result = engine.generate(PROMPT, max_new_tokens=24, logit_bias={1: -100.0}, drafter="eagle3")
    calls = {name: count - before.get(name, 0) for name, count in engine._clock.calls.items()}
    assert calls[ENGINE] >= result.stats.rounds - 3
    plain = engine.generate(PROMPT, max_new_tokens=24, logit_bias={1: -100.0}, drafter="none")
    assert result.token_ids == plain.token_ids


def test_a_bundle_without_the_engine_grows_a_level_a_call(
    engine: eagle3.Engine, bundle: Bundle, tmp_path: Path
) -> None:
    engines = {name: e for name, e in bundle.manifest.engines.items() if name != ENGINE}
    older = tiny.edited_bundle(
        bundle, tmp_path / "older", {f"{ENGINE}.onnx": None}, engines=engines
    )
    other = eagle3.load(older.root, threads=1)
    options: dict[str, Any] = {"max_new_tokens": 16, "logit_bias": {1: -100.0}}
    ours, theirs = (each.generate(PROMPT, **options) for each in (engine, other))
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.acceptance_length == theirs.stats.acceptance_length


def test_a_graph_for_another_number_of_nodes_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    info = replace(bundle.manifest.drafts["eagle3"], tree=TreePlan(3, 3, 5))
    other = tiny.edited_bundle(bundle, tmp_path / "other", drafts={"eagle3": info})
    with pytest.raises(BundleError, match=r"draft_tree.*output tokens int64 \[B, 6\]"):
        eagle3.load(other.root, threads=1)


@pytest.mark.parametrize(
    ("asked", "vocab", "grown"),
    [
        ((3, 3, 6), 40, (3, 3, 6)),
        ((8, 5, 4), 40, (4, 4, 4)),  # more children or levels than nodes change nothing
        ((8, 2, 60), 5, (5, 2, 60)),  # nor more than there are tokens
        ((1, 17, 17), 40, None),
        ((40, 3, 64), 40, None),
    ],
)
def test_sizes_in_use(asked: tuple[int, ...], vocab: int, grown: tuple[int, ...] | None) -> None:
    plan = Plan(tree=TreePlan(*asked))
    expected = None if grown is None else TreePlan(*grown)
    assert grown_tree(plan.tree, vocab) == expected
