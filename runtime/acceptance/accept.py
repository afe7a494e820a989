"""Acceptance: decide which draft tokens a round keeps.

These functions run after the target has verified a `Tree` and before anything is committed
(docs/method.md, section 4). They have no state, and they are exact: the result is distributed as p,
whatever the draft proposed.

Letters: p target distribution at a node (from `sampling.target_probs`), q distribution from which a
node's children were sampled, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.acceptance.sampling import sample_inverse_cdf
from eagle3.runtime.trees.tree import Tree

Float32s = NDArray[np.float32]
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Accepted:
    """The outcome of one round: len(path) + 1 new tokens.

    path: indices of the accepted nodes, from the root's child downwards, without the root.
    token: the one token that comes from the target itself (correction or bonus).
    """

    path: tuple[int, ...]
    token: int


@dataclass(frozen=True)
class Settled:
    """An accepted path, cut after the last token that is bit-identical to plain decoding.

    path, token: as in `Accepted`.
    carried: accepted tokens that follow `token` and must be verified again.
    """

    path: tuple[int, ...]
    token: int
    carried: tuple[int, ...] = ()


def settle(tree: Tree, accepted: Accepted) -> Settled:
    """Cut an accepted path at the first node that does not directly follow its parent.

    Nodes 1, 2, 3, ... fill the cache slots that plain decoding fills, so their rows are
    bit-identical to plain decoding. The first node after a gap was still chosen by such a row and
    becomes `token`. Its own row, however, sums over other slots and may round differently. The
    tokens chosen from there on are almost certainly right, so they are carried into the next round
    as a chain in front of the tree, and are committed based on the rows they get there.
    """
    path = accepted.path
    exact = next((i for i, node in enumerate(path) if node != i + 1), len(path))
    if exact == len(path):
        return Settled(path, accepted.token)
    behind = [tree.token_list[node] for node in path[exact:]]
    return Settled(path[:exact], behind[0], (*behind[1:], accepted.token))


@dataclass(frozen=True, eq=False)
class _Step:
    """The result of trying the children of one node.

    child: the accepted child, or None if all were rejected.
    instead: if no child was accepted, the weights [V] to draw the token from, not normalized.
    """

    child: int | None
    instead: Floats | None = None


def accept_by_token(tree: Tree, choose: Callable[[int], int]) -> Accepted:
    """Walk down the tree while the target's own token is a child (greedy and `coupled`).

    choose: returns the target's token after a node (the argmax, or the inverse CDF at u_t). Its
    result must not depend on the tree. It is called for visited nodes only.
    """
    node = 0
    path: list[int] = []
    while True:
        token = choose(node)
        child = tree.child_with_token(node, token)
        if child is None:
            return Accepted(tuple(path), token)
        path.append(child)
        node = child


def accept_rejection(
    tree: Tree, target_p: Callable[[int], Float32s], rng: np.random.Generator
) -> Accepted:
    """Apply speculative sampling to a tree (`rejection` rule).

    This is algorithm 1 of Leviathan et al., extended to several children per node. The children of
    a node in `tree.q` must have been sampled from that q, in order and without replacement; those
    of other nodes are deterministic candidates.

    target_p: returns p float32 [V] of a node. It is called once for every visited node, and only
    for those; the array is not modified.
    """
    node = 0
    path: list[int] = []
    while True:
        p = target_p(node)
        q = None if tree.q is None else tree.q.get(node)
        if q is None:
            step = _try_candidates(tree, node, p, rng)
        else:
            step = _try_samples(tree, node, p, q, rng)
        if step.child is None:
            assert step.instead is not None
            return Accepted(tuple(path), sample_inverse_cdf(step.instead, rng.random()))
        path.append(step.child)
        node = step.child


def _try_candidates(tree: Tree, node: int, p: Float32s, rng: np.random.Generator) -> _Step:
    """Try deterministic candidates: accept x with probability p(x), otherwise remove it from p.

    q is a point mass here, so min(1, p(x)/q(x)) = p(x).
    """
    mass = _mass(p)
    rejected: list[int] = []
    for child in tree.children(node):
        token = tree.token_list[child]
        weight = float(p[token])
        if rng.random() * mass < weight:
            return _Step(child)
        if weight > 0.0:
            rejected.append(child)
            mass -= weight
    if not rejected:
        return _Step(None, p)
    rest = p.copy()
    rest[[tree.token_list[child] for child in rejected]] = 0.0
    if not rest.any():
        # The last rejected token had all the mass that was left. Its ratio is 1, so only rounding
        # rejected it.
        return _Step(rejected[-1])
    return _Step(None, rest)


def _try_samples(tree: Tree, node: int, p: Floats, q: Float32s, rng: np.random.Generator) -> _Step:
    """Try sampled children: accept x with probability min(1, p(x)/q(x)).

    After a rejection, p becomes the residual and x is removed from q.
    """
    p_mass, q_mass = _mass(p), _mass(q)
    for child in tree.children(node):
        token = tree.token_list[child]
        if q[token] == 0.0:
            # This child cannot have been drawn from q (which may have no mass left). Skipping it
            # keeps the result distributed as p.
            continue
        if rng.random() * (float(q[token]) / q_mass) < float(p[token]) / p_mass:
            return _Step(child)
        p = _residual(p, p_mass, q, q_mass)
        q = _without(q, token)
        p_mass, q_mass = _mass(p), _mass(q)
    return _Step(None, p)


def _residual(p: Floats, p_mass: float, q: Float32s, q_mass: float) -> Floats:
    """Return max(0, p - q) of the normalized p and q, float64 [V]: the residual of a rejection.

    If the residual is 0 everywhere, p is returned. p then equals q up to rounding: the draft token
    was already distributed as p and only rounding rejected it, so its replacement must be
    distributed as p too. This p is the one of *this* step, which earlier siblings have reduced. The
    node's own p would assign again the mass that the acceptance of those siblings has already used.
    """
    rest = np.divide(p, p_mass, dtype=np.float64)
    rest -= np.divide(q, q_mass, dtype=np.float64)
    np.maximum(rest, 0.0, out=rest)
    return rest if rest.any() else p


def _without(q: Float32s, token: int) -> Float32s:
    """Return q [V] with `token` removed, not renormalized."""
    rest = q.copy()
    rest[token] = 0.0
    return rest


def _mass(weights: Floats) -> float:
    return float(weights.sum(dtype=np.float64))
