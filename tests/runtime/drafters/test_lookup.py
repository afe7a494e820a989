"""Prompt lookup: the index against a search of the whole text, the drafter in real rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import eagle3
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.drafters.lookup import LookupDrafter, NgramIndex

NO_EOS: dict[str, Any] = {"max_new_tokens": 90, "logit_bias": {1: -100.0}}
COUPLED: dict[str, Any] = {"temperature": 0.7, "acceptance": "coupled", "seed": 3}
TREES = [(1, 1, 1), (1, 5, 5), (3, 3, 6), (4, 8, 16), (8, 2, 1)]


def searched(text: Sequence[int], max_ngram: int, num_tokens: int) -> list[int]:
    """What followed the longest earlier match of the end of `text`, the newest if there are many.

    A copy that reaches the end of the text reads on in what it copied.
    """
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if list(text[start : start + size]) == list(text[-size:]):
                whole = list(text)
                for i in range(num_tokens):
                    whole.append(whole[start + size + i])
                return whole[len(text) :]
    return []


few_tokens = st.integers(0, 3)


@given(
    text=st.lists(few_tokens, max_size=60),
    root=few_tokens,
    max_ngram=st.integers(1, 8),
    num_tokens=st.integers(1, 9),
)
def test_the_longest_and_newest_match_is_continued(
    text: list[int], root: int, max_ngram: int, num_tokens: int
) -> None:
    index = NgramIndex(max_ngram)
    for token in text:
        index.append(token)
    expected = searched([*text, root], max_ngram, num_tokens)
    assert index.continuation(root, num_tokens) == expected
    assert index.continuation(root, num_tokens) == expected, "asking changes nothing"
    assert len(expected) == (num_tokens if root in text else 0)


@given(steps=st.lists(st.tuples(st.lists(few_tokens, max_size=12), st.integers(0, 12))))
def test_dropped_tokens_leave_nothing_behind(steps: list[tuple[list[int], int]]) -> None:
    index, text = NgramIndex(4), []
    for tokens, num_dropped in steps:
        for token in tokens:
            index.append(token)
        text += tokens
        num_dropped = min(num_dropped, len(text))
        index.drop(num_dropped)
        text = text[: len(text) - num_dropped]
    fresh = NgramIndex(4)
    for token in text:
        fresh.append(token)
    assert vars(index) == vars(fresh)


def test_the_newest_of_equal_matches_wins() -> None:
    index = NgramIndex(8)
    for token in [5, 6, 1, 9, 5, 6, 2, 9, 5]:
        index.append(token)
    assert index.continuation(6, 3) == [2, 9, 5]
    assert index.continuation(7, 3) == []


def test_a_longer_match_beats_a_newer_one() -> None:
    index = NgramIndex(8)
    for token in [4, 5, 6, 1, 9, 6, 2, 4, 5]:
        index.append(token)
    assert index.continuation(6, 2) == [1, 9]


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    index = NgramIndex(8)
    for token in [7, 1, 2, 3, 1, 2, 3, 1]:
        index.append(token)
    assert index.continuation(2, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_observe_rewind_and_reset() -> None:
    drafter = LookupDrafter()
    plan = TreePlan(3, 4, 10)

    def proposed(root: int, plan: TreePlan = plan) -> list[int]:
        tree = drafter.propose(DraftRequest(root, plan))
        tree.validate()
        assert tree.q is None and tree.parents.tolist() == list(range(-1, tree.num_draft_tokens))
        return tree.tokens.tolist()

    assert proposed(5) == [5]
    drafter.observe(np.array([5, 6, 7]), None)
    assert proposed(5) == [5, 6, 7, 5, 6]
    assert proposed(5, TreePlan(1, 9, 2)) == [5, 6, 7], "no more than the nodes asked for"
    drafter.observe(np.array([5, 8]), np.zeros((2, 4), np.float32))
    assert proposed(5) == [5, 8, 5, 8, 5]
    drafter.rewind(2)
    assert proposed(5) == [5, 6, 7, 5, 6]
    drafter.reset()
    assert proposed(5) == [5]


# In real rounds


@pytest.fixture(scope="module")
def featureless(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As exported without a draft: the target gives no features."""
    target = replace(bundle.manifest.target, aux_layer_ids=(), feature_size=0)
    folder = tmp_path_factory.mktemp("featureless") / "bundle"
    yield eagle3.load(tiny.edited_bundle(bundle, folder, drafts={}, target=target).root, threads=1)


@pytest.mark.parametrize("rule", [{}, COUPLED])
@pytest.mark.parametrize("features", [True, False])
def test_the_text_is_that_of_plain_decoding(
    engine: eagle3.Engine, featureless: eagle3.Engine, rule: dict[str, Any], features: bool
) -> None:
    used = engine if features else featureless
    accepted = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(2, 64, 20).tolist() * 2
        options = {**NO_EOS, "max_new_tokens": 80, **rule}
        expected = used.generate(prompt, drafter="none", **options).token_ids
        for tree in TREES:
            result = used.generate(prompt, drafter="lookup", tree=TreePlan(*tree), **options)
            assert result.token_ids == expected
            accepted += len(expected) - 1 - result.stats.rounds
    assert accepted > 20, "a draft that is never accepted tests nothing"


def test_a_bundle_without_draft_has_it_but_decodes_plainly(featureless: eagle3.Engine) -> None:
    assert featureless.drafters == ["none", "lookup"]
    assert featureless.generate([3, 4], max_new_tokens=4).stats.drafter == "none"


def test_a_text_that_repeats_itself_is_accepted_whole(engine: eagle3.Engine) -> None:
    """The target is made to say one token again and again."""
    options: dict[str, Any] = {"max_new_tokens": 61, "logit_bias": {7: 1000.0}}
    options["tree"] = TreePlan(1, 5, 5)
    result = engine.generate([3, 4], drafter="lookup", **options)
    assert result.token_ids == [7] * 61
    # The first round has seen no 7 before its root; each later one takes 5 and adds one.
    assert result.stats.rounds == 1 + 10


@pytest.mark.parametrize("length", [1, 2, 100, 118, 119, 120, 125, 126, 127, 128])
def test_around_the_context_limit(engine: eagle3.Engine, length: int) -> None:
    prompt = (list(range(2, 12)) * 13)[:length]
    options = {**NO_EOS, "max_new_tokens": 40}
    plain = engine.generate(prompt, drafter="none", **options)
    drafted = engine.generate(prompt, drafter="lookup", tree=TreePlan(1, 9, 9), **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == plain.finish_reason


def test_the_second_request_knows_nothing_of_the_first(engine: eagle3.Engine) -> None:
    options = {**NO_EOS, "max_new_tokens": 30, "drafter": "lookup"}
    first = engine.generate([3, 4], **options)
    engine.generate([9, 8, 7] * 5, **options)
    again = engine.generate([3, 4], **options)
    assert again.token_ids == first.token_ids
    assert again.stats.proposed_by_position == first.stats.proposed_by_position


def test_it_needs_no_engine(bundle: Bundle, tmp_path: Path) -> None:
    """Also where the draft's files are gone: only a drafter that is used is loaded."""
    manifest = bundle.manifest
    engines = {"target": manifest.engines["target"]}
    files = {name: None for name in manifest.files if name.startswith("eagle3.")}
    plain = tiny.edited_bundle(bundle, tmp_path / "b", files, drafts={}, engines=engines)
    engine = eagle3.load(plain.root, threads=1)
    engine.generate([3, 4, 3], max_new_tokens=8, drafter="lookup")
    assert set(engine._clock.calls) == {"target"}
