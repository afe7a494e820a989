"""The same bits: what is committed was computed as plain decoding computes it, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from drafting import Forking, using
from hypothesis import given
from hypothesis import strategies as st

import eagle3
from eagle3.runtime.acceptance.accept import Accepted, Settled, settle
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.ort.target_engine import TargetEngine, TargetOutput
from eagle3.runtime.trees.tree import Tree

PROMPT = [4, 9, 2, 33, 17]
NO_EOS = {"logit_bias": {1: -100.0}}
COUPLED = {**NO_EOS, "temperature": 1.0, "acceptance": "coupled", "seed": 5}
RULES: list[dict[str, Any]] = [NO_EOS, COUPLED, {**COUPLED, "repetition_penalty": 1.3}]


@pytest.fixture
def fresh(bundle: Bundle) -> Iterator[eagle3.Engine]:
    yield eagle3.load(bundle.root, threads=2)


def rows(engine: TargetEngine, text: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of `text` as accepted chains of `width` rows."""
    logits, features = [], []
    for past in range(0, len(text), width):
        part = text[past : past + width]
        out = engine.verify(Tree.chain(part[0], part[1:]), past, want_logits=True)
        assert out.logits is not None and out.features is not None
        logits.append(out.logits.copy())
        features.append(out.features.copy())
    return np.concatenate(logits), np.concatenate(features)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 7, 8, 12, 16, 29])
def test_a_row_has_the_same_bits_in_a_call_of_any_width(fresh: eagle3.Engine, width: int) -> None:
    text = np.random.default_rng(0).integers(2, 64, 60).tolist()
    single, wide = rows(fresh.target, text, 1), rows(fresh.target, text, width)
    for narrow, found in zip(single, wide, strict=True):
        np.testing.assert_array_equal(found, narrow)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("hit", [0.5, 0.9, 1.0])
def test_the_cache_holds_plain_decodings_bits(
    fresh: eagle3.Engine, rule: dict[str, Any], hit: float
) -> None:
    options = {"max_new_tokens": 90, **rule}
    plain = fresh.generate(PROMPT, drafter="none", **options)
    text = PROMPT + plain.token_ids
    filled = slice(0, len(text) - 1)
    expected = fresh.target._cache.block[..., filled, :].copy()
    fresh.target.clear()
    with using(fresh, Forking(text, 64, hit)):
        drafted = fresh.generate(
            PROMPT, draft_top_k=4, draft_depth=4, num_draft_tokens=12, **options
        )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.acceptance_length > 1.3, "branches were accepted"
    np.testing.assert_array_equal(fresh.target._cache.block[..., filled, :], expected)


def test_that_test_can_fail(fresh: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cut, rows behind a gap are committed as they are, and their bits differ."""
    monkeypatch.setattr(
        "eagle3.runtime.rounds.host_rounds.settle",
        lambda tree, found: Settled(found.path, found.token),
    )
    plain = fresh.generate(PROMPT, drafter="none", max_new_tokens=90, **NO_EOS)
    text = PROMPT + plain.token_ids
    expected = fresh.target._cache.block[..., : len(text) - 1, :].copy()
    with using(fresh, Forking(text, 64, 0.9)):
        fresh.generate(PROMPT, max_new_tokens=90, draft_top_k=4, draft_depth=4, num_draft_tokens=12)
    found = fresh.target._cache.block[..., : len(text) - 1, :]
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("rule", RULES[:2])
def test_a_carried_token_that_was_wrong_is_dropped(
    fresh: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]
) -> None:
    """Rows behind a gap are made to lie: what they chose is verified again and not believed."""
    options = {"max_new_tokens": 80, **rule}
    plain = fresh.generate(PROMPT, drafter="none", **options)
    verify, lies = fresh.target.verify, 0

    def lying(tree: Tree, past: int, want_logits: bool) -> TargetOutput:
        nonlocal lies
        out = verify(tree, past, want_logits)
        for node in range(tree.num_nodes):
            if tree.path(node) != tuple(range(1, node + 1)):
                lies += 1
                out.next_token[node] = (out.next_token[node] + 7) % 64
                if out.logits is not None:
                    out.logits[node] = np.roll(out.logits[node], 7)
        return out

    monkeypatch.setattr(fresh.target, "verify", lying)
    with using(fresh, Forking(PROMPT + plain.token_ids, 64, 0.9)):
        drafted = fresh.generate(
            PROMPT, draft_top_k=4, draft_depth=4, num_draft_tokens=12, **options
        )
    assert lies > 20
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("rule", RULES[:2])
def test_the_head_carries_and_rewinds_exactly(fresh: eagle3.Engine, rule: dict[str, Any]) -> None:
    """The real drafter: as many rows as committed tokens, and those of carried ones on top."""
    options = {"max_new_tokens": 60, "draft_top_k": 8, "draft_depth": 3, **rule}
    plain = fresh.generate(PROMPT, drafter="none", max_new_tokens=60, **rule)
    drafted = fresh.generate(PROMPT, num_draft_tokens=30, **options)
    assert drafted.token_ids == plain.token_ids
    drafter = fresh.drafter("eagle3")
    assert isinstance(drafter, EagleDrafter)
    observed = drafter._engine.num_rows + drafter._pending
    ahead = len(PROMPT) + 60 - 1
    assert ahead <= observed <= ahead + 3, "one row a committed token, carried ones on top"


@pytest.mark.parametrize(
    ("parents", "path", "token", "expected"),
    [
        ([-1], (), 9, Settled((), 9)),
        ([-1, 0, 1], (1, 2), 9, Settled((1, 2), 9)),
        ([-1, 0, 0], (2,), 9, Settled((), 102, (9,))),
        ([-1, 0, 1, 1, 3], (1, 3, 4), 9, Settled((1,), 103, (104, 9))),
        ([-1, 0, 1, 0, 3], (1,), 9, Settled((1,), 9)),
    ],
)
def test_a_path_is_cut_at_its_first_gap(
    parents: list[int], path: tuple[int, ...], token: int, expected: Settled
) -> None:
    tree = Tree(np.arange(100, 100 + len(parents)), np.array(parents, np.int32))
    assert settle(tree, Accepted(path, token)) == expected


@given(data=st.data(), carried=st.lists(st.integers(0, 50), max_size=4))
def test_laid_out_is_the_same_tree_behind_a_chain(data: st.DataObject, carried: list[int]) -> None:
    size = data.draw(st.integers(1, 12))
    parents = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)]
    tree = Tree(np.arange(100, 100 + size), np.array(parents, np.int32))
    whole = tree.laid_out(7, carried)
    whole.validate()
    before = len(carried)
    assert whole.token_list[: before + 1] == [7, *carried]
    assert whole.path(before) == tuple(range(1, before + 1))

    def paths(each: Tree, first: int) -> list[list[int]]:
        return [each.path_tokens(node) for node in range(first, each.num_nodes)]

    expected = [[*carried, *path] for path in paths(tree, 1)]
    assert sorted(paths(whole, before + 1)) == sorted(expected)
    for node in range(before, whole.num_nodes):
        children = whole.children(node)
        assert not children or children[0] == node + 1, "a first child follows its parent"
        assert list(children) == sorted(children), "children keep their order"
