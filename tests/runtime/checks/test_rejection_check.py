"""Run the chi-square tests of `rejection` on tables of p and q.

They must pass for the exact rule and fail for each of several wrong rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle3.runtime.acceptance import accept
from eagle3.runtime.checks import rejection_check
from eagle3.runtime.checks.rejection_check import SIGNIFICANCE, _Proposal, _tests
from eagle3.runtime.trees.tree import Tree

WALKS = 4000


def tables(count: int, seed: int) -> list[Any]:
    """Return `count` random distributions over 12 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(12, 0.7)).astype(np.float32) for _ in range(count)]


def candidates() -> _Proposal:
    """Return a tree of deterministic candidates: three under the root, two under its best child."""
    p = tables(6, seed=1)
    best = np.argsort(-p[0])
    below = np.argsort(-p[1])
    tokens = np.array([0, *best[:3], *below[:2]], np.int64)
    return _Proposal(Tree(tokens, np.array([-1, 0, 0, 0, 1, 1], np.int32)), p)


def sampled_chain() -> _Proposal:
    """Return a chain that was sampled from distributions q that differ from p."""
    p, q = tables(4, seed=2), tables(3, seed=3)
    tokens = [int(np.argmax(np.minimum(p[0], q[0]))), 5, 6]
    return _Proposal(Tree.chain(0, tokens, dict(enumerate(q))), p)


def p_values(proposal: _Proposal) -> dict[int, float]:
    return {token: value for token, (_, _, value) in _tests(proposal, WALKS)}


@pytest.mark.parametrize("proposal", [candidates(), sampled_chain()], ids=["tree", "chain"])
def test_the_exact_rule_passes_at_both_tokens(proposal: _Proposal) -> None:
    found = p_values(proposal)
    assert set(found) == {1, 2}
    assert min(found.values()) > 1e-3


def test_candidates_that_stay_in_the_residual_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(tree: Tree, node: int, p: Any, rng: np.random.Generator) -> Any:
        for child in tree.children(node):
            if rng.random() < p[tree.token_list[child]]:
                return accept._Step(child)
        return accept._Step(None, p)

    monkeypatch.setattr(accept, "_try_candidates", keeping)
    assert p_values(candidates())[1] < SIGNIFICANCE


def test_a_residual_that_is_not_subtracted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_residual", lambda p, p_mass, q, q_mass: p)
    assert p_values(sampled_chain())[1] < SIGNIFICANCE


def test_a_p_of_the_wrong_node_fails_at_the_second_token(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = accept.accept_rejection
    monkeypatch.setattr(
        accept, "accept_rejection", lambda tree, p, rng: walk(tree, lambda node: p(0), rng)
    )
    found = p_values(candidates())
    assert found[1] > 1e-3
    assert found[2] < SIGNIFICANCE


def test_a_draft_that_proposed_nothing_has_no_tests() -> None:
    assert not list(_tests(_Proposal(Tree.root_only(3), tables(1, seed=0)), 10))


def test_a_redrawn_chain_keeps_the_law_of_q() -> None:
    proposal = sampled_chain()
    assert proposal.tree.q is not None
    rng = np.random.default_rng(0)
    trees = [proposal.drawn(rng)[0] for _ in range(WALKS)]
    counts = np.bincount([tree.token_list[1] for tree in trees], minlength=12)
    assert rejection_check.chi_square.p_value(counts, proposal.tree.q[0])[0] > 1e-3
    for tree in trees[:50]:
        tree.validate()
        shared = tree.token_list[1:-1]
        assert shared == proposal.tree.token_list[1 : 1 + len(shared)]
