"""Chi-square tests of the `rejection` rule with a bundle's real logits and proposals.

In a few contexts, the target verifies a tree that a drafter proposed. The acceptance walk is then
repeated many times with different random numbers. Whatever was proposed, the committed tokens must
follow the target's own distribution p (method section 4): the first token follows p of the root,
and the token after an accepted child follows p of that child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.acceptance import accept
from eagle3.runtime.acceptance.sampling import (
    Float32s,
    TokenHistory,
    rejection_rng,
    sample_inverse_cdf,
    target_probs,
)
from eagle3.runtime.checks import chi_square
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.engine import Engine
from eagle3.runtime.params import SamplingParams
from eagle3.runtime.trees.tree import Tree

TEMPERATURE = 1.0
SIGNIFICANCE = 1e-4  # of all tests of a run together

_MIN_SECOND = 500  # walks through a child that are needed to test the token after it


@dataclass(frozen=True)
class RejectionCheck:
    """The result of one chi-square test.

    context: index of the prompt. token: 1 for the first committed token, 2 for the second.
    """

    drafter: str
    tree: TreePlan
    context: int
    token: int
    num_walks: int
    num_cells: int
    p_value: float


@dataclass(frozen=True)
class _Proposal:
    """A verified tree, and the target's distribution p, float32 [V], at each of its nodes."""

    tree: Tree
    p: Sequence[Float32s]

    def drawn(self, rng: np.random.Generator) -> tuple[Tree, int | None]:
        """Return the tree of one walk, and the only first token after which p is known.

        The token is None if p is known after every child of the root. Deterministic candidates
        stay as they are. A sampled chain is drawn again from its own q, as the drafter would do;
        it ends at the first token that differs from the original chain, because q is unknown
        after that token.
        """
        if not self.tree.q:
            return self.tree, None
        tokens: list[int] = []
        q: dict[int, Float32s] = {}
        for node in sorted(self.tree.q):
            q[node] = self.tree.q[node]
            tokens.append(sample_inverse_cdf(q[node], rng.random()))
            if tokens[-1] != self.tree.token_list[node + 1]:
                break
        return Tree.chain(self.tree.token_list[0], tokens, q), self.tree.token_list[1]


def check_rejection(
    engine: Engine,
    drafter: str,
    trees: Sequence[TreePlan],
    contexts: Sequence[Sequence[int]],
    num_walks: int,
    report: Callable[[str], None],
) -> tuple[RejectionCheck, ...]:
    """Run all tests of one drafter: every context (token ids) with every tree.

    num_walks: acceptance walks per context and tree. report: called once per tree.
    """
    checks: list[RejectionCheck] = []
    for tree in trees:
        for index, ids in enumerate(contexts):
            proposal = _propose(engine, drafter, tree, ids)
            for token, (walks, cells, p) in _tests(proposal, num_walks):
                checks.append(RejectionCheck(drafter, tree, index, token, walks, cells, p))
        report(f"rejection, {drafter}, tree {tree_name(tree)}: contexts done: {len(contexts)}")
    return tuple(checks)


def tree_name(tree: TreePlan) -> str:
    """Return a short name of a tree: top-k, depth and tokens, preceded by a static tree's name."""
    sizes = f"{tree.draft_top_k},{tree.draft_depth},{tree.num_draft_tokens}"
    return sizes if tree.static is None else f"{tree.static.name or tree.policy} {sizes}"


def significant(checks: Sequence[RejectionCheck]) -> list[RejectionCheck]:
    """Return the tests that fail, with a Bonferroni correction for the number of tests."""
    return [each for each in checks if each.p_value * len(checks) < SIGNIFICANCE]


def _propose(engine: Engine, name: str, plan: TreePlan, ids: Sequence[int]) -> _Proposal:
    """Prefill a context, let the drafter propose a tree after it, and verify that tree."""
    prompt = np.asarray(ids, np.int64)
    target, params = engine.target, SamplingParams(temperature=TEMPERATURE)
    drafter = engine.drafter(name)
    with engine.turn():
        drafter.reset()
        for start in range(0, len(prompt), target.prefill_chunk):
            part = prompt[start : start + target.prefill_chunk]
            output = target.prefill(part, start, want_logits=True)
            drafter.observe(part, output.features)
        root = int(output.next_token[0])
        request = DraftRequest(root, plan, TEMPERATURE, rejection_rng(0))
        tree = drafter.propose(request)
        output = target.verify(tree, len(prompt), want_logits=True)
        assert output.logits is not None
        history = TokenHistory(target.vocab_size)
        p = [target_probs(row, history, (), params) for row in output.logits]
    return _Proposal(tree, p)


def _tests(proposal: _Proposal, num_walks: int) -> Iterator[tuple[int, tuple[int, int, float]]]:
    """Yield (which token, (walks, cells, p-value)) for each test of one proposal.

    Yields nothing if the tree consists of its root only.
    """
    if proposal.tree.num_draft_tokens == 0:
        return
    first, behind = _walk(proposal, num_walks)
    yield 1, _test(first, proposal.p[0])
    child = max(behind, key=lambda node: len(behind[node]), default=0)
    if child and len(behind[child]) >= _MIN_SECOND:
        yield 2, _test(behind[child], proposal.p[child])


def _walk(proposal: _Proposal, num_walks: int) -> tuple[list[int], Mapping[int, list[int]]]:
    """Return the first tokens of all walks, and the second tokens by accepted child node."""
    first: list[int] = []
    behind: dict[int, list[int]] = {}
    p = proposal.p
    for seed in range(num_walks):
        rng = rejection_rng(seed)
        tree, known = proposal.drawn(rng)
        # A redrawn chain can end in a token that the target did not see there. The p of the node
        # it replaces is then used, because what is committed after that token is not tested.
        result = accept.accept_rejection(tree, p.__getitem__, rng)
        tokens = [*(tree.token_list[node] for node in result.path), result.token]
        first.append(tokens[0])
        if result.path and known in (None, tokens[0]):
            behind.setdefault(result.path[0], []).append(tokens[1])
    return first, behind


def _test(tokens: list[int], p: Float32s) -> tuple[int, int, float]:
    counts: NDArray[np.int64] = np.bincount(tokens, minlength=p.size)
    value, cells = chi_square.p_value(counts, p)
    return len(tokens), cells, value
