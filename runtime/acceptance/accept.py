"""Acceptance: which draft tokens a round keeps. Pure functions, all of them exact.

Where it sits: after the target verified a `Tree`, before anything is committed (docs/method.md,
section 4). p is the target's distribution at a node, from `sampling.target_probs`; q is the one
that a node's children were sampled from. The result is distributed as p, whatever the draft.

Letters: V target vocabulary.
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

    path: accepted node indices from the root's child downwards; the root is not in it.
    token: the one token that comes from the target itself (correction or bonus).
    """

    path: tuple[int, ...]
    token: int


@dataclass(frozen=True)
class Settled:
    """An accepted path, up to the last token that plain decoding would have computed bit for bit.

    path, token: as in `Accepted`. carried: accepted tokens behind `token`, to be verified again.
    """

    path: tuple[int, ...]
    token: int
    carried: tuple[int, ...] = ()


def settle(tree: Tree, accepted: Accepted) -> Settled:
    """Cuts a path at the first node that does not stand right behind its parent.

    Nodes 1, 2, 3 .. fill the slots that plain decoding fills, so their rows have the same bits. A
    node behind a gap is chosen by such a row, but its own row sums over other slots and may round
    otherwise: what that row chose is almost certain, so it is carried into the next round as a
    chain in front of the tree, and committed by the row it gets there.
    """
    path = accepted.path
    exact = next((i for i, node in enumerate(path) if node != i + 1), len(path))
    if exact == len(path):
        return Settled(path, accepted.token)
    behind = [tree.token_list[node] for node in path[exact:]]
    return Settled(path[:exact], behind[0], (*behind[1:], accepted.token))


@dataclass(frozen=True, eq=False)
class _Step:
    """What trying one node's children gave: a child, or what to draw from instead.

    instead: weights [V], not normalised; None with a child.
    """

    child: int | None
    instead: Floats | None = None


def accept_by_token(tree: Tree, choose: Callable[[int], int]) -> Accepted:
    """Walk down while the target's own token is a child: greedy and `coupled`.

    `choose(node)` returns the target's token after that node (argmax, or inverse CDF at u_t). It
    must not depend on the tree; it is called for visited nodes only.
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
    """Speculative sampling over a tree (Leviathan et al., algorithm 1; several children each).

    `target_p(node)` returns p float32 [V]; it is called for visited nodes only, once each, and
    its array is not written. Nodes in `tree.q` had their children sampled from that q, in order
    and without replacement; the others have deterministic candidates.
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
    """Deterministic candidates: q is a point mass, so x is accepted with p(x), else removed."""
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
        # The last one was all that p had left: its ratio is 1, and only rounding rejected it.
        return _Step(rejected[-1])
    return _Step(None, rest)


def _try_samples(tree: Tree, node: int, p: Floats, q: Float32s, rng: np.random.Generator) -> _Step:
    """Children sampled from q: accept x with min(1, p(x)/q(x)), else p becomes the residual."""
    p_mass, q_mass = _mass(p), _mass(q)
    for child in tree.children(node):
        token = tree.token_list[child]
        if q[token] == 0.0:
            # q, maybe drawn empty by now, cannot have given it: passing it over keeps the law p.
            continue
        if rng.random() * (float(q[token]) / q_mass) < float(p[token]) / p_mass:
            return _Step(child)
        p = _residual(p, p_mass, q, q_mass)
        q = _without(q, token)
        p_mass, q_mass = _mass(p), _mass(q)
    return _Step(None, p)


def _residual(p: Floats, p_mass: float, q: Float32s, q_mass: float) -> Floats:
    """max(0, p - q) of the normalised p and q, float64 [V]: what p still needs after a rejection.

    No residual at all means p = q up to rounding: the draw had the law p already and was rejected
    by rounding alone, so its replacement must have the law p too. That is the p of *this* step,
    what the siblings before have left, and not the node's own p: that one would hand out again
    the mass that their acceptance has already used.
    """
    rest = np.divide(p, p_mass, dtype=np.float64)
    rest -= np.divide(q, q_mass, dtype=np.float64)
    np.maximum(rest, 0.0, out=rest)
    return rest if rest.any() else p


def _without(q: Float32s, token: int) -> Float32s:
    """q [V] as it is once `token` was drawn from it; not renormalised."""
    rest = q.copy()
    rest[token] = 0.0
    return rest


def _mass(weights: Floats) -> float:
    return float(weights.sum(dtype=np.float64))
