"""EAGLE-2's expand and rerank over tensors: what `runtime.tree.DynamicTree` does, for a graph.

Shapes are static, only indices depend on data: every depth has K frontier nodes, of which those
that the numpy builder would not have are *absent*: they rank last, and nothing below them is kept.
`DynamicTree` is the reference; the trees are equal node for node.

Letters: B batch, K top-k, F frontier nodes (1 at the root, K below it), C candidates of all depths,
M nodes of the tree, root included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.plans.plan import TreePlan

_ABSENT = float("-inf")  # below every value there is: a candidate's value is finite
_LARGEST = torch.finfo(torch.float32).max

Best = Callable[[Tensor, int], Tensor]
"""values [B,C] without NaN, count -> int64 [B,count]: where the largest stand, largest first, and
of equal ones the lower index first."""


def best_by_top_k(values: Tensor, count: int) -> Tensor:
    """One TopK: the ONNX operator promises the lower index first, and ONNX Runtime keeps it.

    PyTorch's own topk does not, so this one is for graphs.
    """
    return values.topk(count, dim=-1).indices


def best_by_rank(values: Tensor, count: int) -> Tensor:
    """All pairs are compared: exact wherever it runs. TensorRT's TopK leaves open which of two
    equal values comes first.
    """
    index = torch.arange(values.shape[-1], device=values.device)
    mine, other = values[..., :, None], values[..., None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    rank = ahead.sum(-1)  # [..,C]
    at = rank[..., None, :] == index[:count, None]  # [..,count,C], one True a row
    return torch.where(at, index, 0).sum(-1)


def ordered_by_id(ids: Tensor, values: Tensor) -> Tensor:
    """ids of a row's top K [..,K] int64, values [..,K] best first: of equal values the lower id
    comes first, as ONNX promises of TopK and TensorRT does not.

    Where values tie for the last place, which of them TopK took is left to it. The ids of a row
    with NaN mean nothing afterwards.
    """
    mine, other = values[..., :, None], values[..., None, :]
    lower = ids[..., None, :] < ids[..., :, None]
    rank = ((other > mine) | ((other == mine) & lower)).sum(-1)
    place = torch.arange(ids.shape[-1], device=ids.device)
    at = rank[..., None, :] == place[:, None]  # [..,K,K], row r is True where rank r stands
    return torch.where(at, ids[..., None, :], 0).sum(-1)


@dataclass(frozen=True)
class Frontier:
    """The nodes that the draft runs next, best first; absent ones come last.

    tokens [B,F] int64 (target vocabulary, 0 where absent); parent_slots [B,F] int64, the slot of
    the parent in the frontier before; present [B,F] bool; values [B,F] float32, -inf where absent;
    candidates [B,F] int64, index among all candidates.
    """

    tokens: Tensor
    parent_slots: Tensor
    present: Tensor
    values: Tensor
    candidates: Tensor


@dataclass(frozen=True)
class GrownTree:
    """The graph's outputs, see `growth_graph.GrowthGraph`."""

    tokens: Tensor
    parents: Tensor
    positions: Tensor
    tree_mask: Tensor
    num_nodes: Tensor


class TreeGrowth:
    """Expand, one depth at a time, then rerank; the calls are DynamicTree's.

    root [B] int64: the root's token. tree: its sizes as they are in use. unique: a row never holds
    a token twice, so siblings need not be compared.
    """

    def __init__(self, root: Tensor, tree: TreePlan, best: Best, *, unique: bool) -> None:
        self._tree, self._best, self._unique = tree, best, unique
        one = root[:, None]
        zero, value = torch.zeros_like(one), torch.zeros_like(one, dtype=torch.float32)
        self._frontier = Frontier(one, zero, torch.ones_like(one, dtype=torch.bool), value, zero)
        # Of all candidates so far, [B, some] each; candidate 0 is the root, its own parent here.
        self._tokens, self._parents, self._values = [one], [zero], [value]
        self._size = 1

    def add(self, top_ids: Tensor, top_log_probs: Tensor) -> None:
        """Row f of ids (target vocabulary) and log q float32, both [B,F,K], belongs to node f."""
        above = self._frontier.values[..., None]
        sums = above + top_log_probs
        usable = sums.abs() <= _LARGEST  # False for NaN
        if not self._unique:
            usable = usable & ~_repeated(top_ids, usable)
        # log q <= 0, up to rounding: a child may never rank above its parent.
        values = torch.where(usable, torch.minimum(sums, above), _ABSENT)
        parents = self._frontier.candidates[..., None].expand_as(top_ids)
        self._tokens.append(top_ids.flatten(1))
        self._parents.append(parents.flatten(1))
        self._values.append(values.flatten(1))

    def next_frontier(self) -> Frontier:
        """The K of highest value of the candidates added last."""
        tokens, values, top_k = self._tokens[-1], self._values[-1], self._tree.draft_top_k
        best = self._best(values, top_k)
        chosen = values.gather(1, best)
        present = chosen > _ABSENT
        self._size += tokens.shape[1]
        self._frontier = Frontier(
            tokens=torch.where(present, tokens.gather(1, best), 0),
            parent_slots=best // top_k,
            present=present,
            values=chosen,
            candidates=best + (self._size - tokens.shape[1]),
        )
        return self._frontier

    def finish(self, root_position: Tensor) -> GrownTree:
        """The M candidates of highest value, as a tree in that order; root_position [B] int64."""
        num_nodes = self._tree.num_draft_tokens + 1
        tokens, parents, values = (
            _padded(torch.cat(of_depths, 1), num_nodes, absent)
            for of_depths, absent in (
                (self._tokens, 0),
                (self._parents, 0),
                (self._values, _ABSENT),
            )
        )
        order = self._best(values, num_nodes)
        kept = values.gather(1, order) > _ABSENT
        node = torch.arange(num_nodes, device=order.device)
        below_root = kept & (node > 0)
        is_parent = below_root[..., None] & (
            parents.gather(1, order)[..., None] == order[:, None, :]
        )  # [B,M,M]; a parent's value is at least its child's, so it is kept and comes first
        mask = _reachable(is_parent, self._tree.draft_depth)
        depths = mask.long().sum(-1) - 1
        return GrownTree(
            tokens=torch.where(kept, tokens.gather(1, order), 0),
            parents=torch.where(is_parent, node, 0).sum(-1) - (node == 0).long(),
            positions=root_position[:, None] + depths,
            tree_mask=mask,
            num_nodes=kept.long().sum(-1),
        )


def _repeated(ids: Tensor, usable: Tensor) -> Tensor:
    """bool [..,K]: a usable one of the same row stands before it with the same token."""
    place = torch.arange(ids.shape[-1], device=ids.device)
    before = place[None, :] < place[:, None]
    return ((ids[..., None, :] == ids[..., :, None]) & usable[..., None, :] & before).any(-1)


def _padded(candidates: Tensor, num_nodes: int, absent: float) -> Tensor:
    """At least M candidates: a tree may have fewer than it has room for."""
    missing = num_nodes - candidates.shape[1]
    if missing <= 0:
        return candidates
    return torch.nn.functional.pad(candidates, (0, missing), value=absent)


def _reachable(is_parent: Tensor, depth: int) -> Tensor:
    """bool [B,M,M]: j is i or an ancestor of i, at most `depth` edges away.

    (I + P)^n counts ways of at most n edges, small whole numbers; n doubles with every product.
    """
    steps = is_parent.float() + torch.eye(is_parent.shape[-1], device=is_parent.device)
    edges = 1
    while edges < depth:
        steps = (steps @ steps).clamp(max=1.0)
        edges *= 2
    return steps > 0.5
