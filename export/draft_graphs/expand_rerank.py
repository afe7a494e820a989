"""EAGLE-2's expand and rerank as ONNX nodes: the computation of `trees/dynamic.py` in a graph.

Shapes are static and only indices depend on data: every depth has K frontier nodes. Nodes that the
numpy builder would not have are *absent*: they rank last, and nothing below them is kept.
`DynamicTree` is the reference, and the trees are equal node for node.

Letters: B batch, K top-k, F frontier nodes (1 at the root, K below it), C candidates of all
depths, M nodes of the tree including the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle3.export.graphs.graph_builder import GraphBuilder
from eagle3.plans.tree_plan import TreePlan

_ABSENT = float("-inf")  # below every candidate's value, which is finite
_LARGEST = float(np.finfo(np.float32).max)

Best = Callable[[GraphBuilder, ir.Value, int, int], ir.Value]
"""(builder, values [B,size] without NaN, size, count) -> int64 [B,count]: the indices of the
largest values, largest first; of equal values the lower index first.
"""


def best_by_top_k(add: GraphBuilder, values: ir.Value, size: int, count: int) -> ir.Value:
    """One TopK: ONNX specifies the lower index first, and ONNX Runtime implements it."""
    _, indices = add("TopK", values, [count], outputs=2)
    return indices  # type: ignore[no-any-return]


def best_by_rank(add: GraphBuilder, values: ir.Value, size: int, count: int) -> ir.Value:
    """Compare all pairs, which is exact on every device. TensorRT's TopK does not specify which of
    two equal values comes first.
    """
    index = np.arange(size)
    mine, other = add("Unsqueeze", values, [2]), add("Unsqueeze", values, [1])
    tied = add("And", add("Equal", other, mine), index[None, :] < index[:, None])
    ahead = add("Or", add("Greater", other, mine), tied)
    return _placed(add, add.value(index[None, None]), _count(add, ahead, 2), count)


def ordered_by_id(add: GraphBuilder, ids: ir.Value, values: ir.Value, size: int) -> ir.Value:
    """Order ids [B,F,K] of a row's top K, with values [B,F,K] best first: of equal values the
    lower id first, which ONNX specifies for TopK and TensorRT does not.

    If values tie for the last place, TopK's choice stays. The ids of a row with NaN are undefined.
    """
    mine, other = add("Unsqueeze", values, [3]), add("Unsqueeze", values, [2])
    my_id, other_id = add("Unsqueeze", ids, [3]), add("Unsqueeze", ids, [2])
    tied = add("And", add("Equal", other, mine), add("Less", other_id, my_id))
    rank = _count(add, add("Or", add("Greater", other, mine), tied), 3)
    return _placed(add, other_id, rank, size)


def _count(add: GraphBuilder, flags: ir.Value, axis: int) -> ir.Value:
    """Return how many values are True along an axis, int64."""
    ones = add("Cast", flags, to=ir.DataType.INT64)
    return add("ReduceSum", ones, [axis], keepdims=0)  # type: ignore[no-any-return]


def _placed(add: GraphBuilder, what: ir.Value, rank: ir.Value, count: int) -> ir.Value:
    """Return int64 [..,count] with, at index r, the value of rank r; what [..,1,size], rank
    [..,size].
    """
    at = add("Equal", add("Unsqueeze", rank, [-2]), np.arange(count)[:, None])  # [..,count,size]
    return add("ReduceSum", add("Where", at, what, 0), [-1], keepdims=0)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GraphFrontier:
    """The nodes that the draft runs next, best first; absent ones come last.

    tokens [B,F] int64 (target vocabulary, 0 if absent); parent_slots [B,F] int64, the slot of the
    parent in the previous frontier; present [B,F] bool; values [B,F] float32, -inf if absent.
    """

    tokens: ir.Value
    parent_slots: ir.Value
    present: ir.Value
    values: ir.Value


@dataclass(frozen=True)
class GrownTree:
    """The outputs of the graph, see `growth_graph`."""

    tokens: ir.Value
    parents: ir.Value
    positions: ir.Value
    tree_mask: ir.Value
    num_nodes: ir.Value


class TreeGrowth:
    """Expand, one depth at a time, then rerank. The methods are those of DynamicTree.

    root [B,1] int64: the root's token. tree: the sizes in use. unique: a row never contains a
    token twice, so siblings need not be compared.
    """

    def __init__(
        self, add: GraphBuilder, root: ir.Value, tree: TreePlan, best: Best, *, unique: bool
    ) -> None:
        self._op, self._tree, self._best, self._unique = add, tree, best, unique
        zero = add("Mul", root, 0)  # [B,1]
        value = add("Cast", zero, to=ir.DataType.FLOAT)
        self._above, self._above_index = value, zero  # of the frontier: values, candidates [B,F]
        # Per candidate so far, [B, some] each. Candidate 0 is the root, its own parent here.
        self._tokens, self._parents, self._values = [root], [zero], [value]
        self._width, self._size = 1, 1  # F; candidates so far

    def add(self, top_ids: ir.Value, top_log_probs: ir.Value) -> None:
        """Add row f of ids (target vocabulary) and log q float32, both [B,F,K], to frontier node
        f.
        """
        op, top_k = self._op, self._tree.draft_top_k
        above = op("Unsqueeze", self._above, [2])
        sums = op("Add", above, top_log_probs)
        usable = op("LessOrEqual", op("Abs", sums), _LARGEST)  # False for NaN
        if not self._unique:
            usable = op("And", usable, op("Not", _repeated(op, top_ids, usable, top_k)))
        # log q <= 0 up to rounding: a child must not rank above its parent.
        values = op("Where", usable, op("Min", sums, above), _ABSENT)
        parents = op("Expand", op("Unsqueeze", self._above_index, [2]), [1, 1, top_k])
        for kept, new in (
            (self._tokens, top_ids),
            (self._parents, parents),
            (self._values, values),
        ):
            kept.append(op("Reshape", new, [0, self._width * top_k]))
        self._size += self._width * top_k

    def next_frontier(self) -> GraphFrontier:
        """Return the K candidates of highest value of those added last."""
        op, top_k = self._op, self._tree.draft_top_k
        tokens, values, size = self._tokens[-1], self._values[-1], self._width * top_k
        best = self._best(op, values, size, top_k)
        chosen = op("GatherElements", values, best, axis=1)
        present = op("Greater", chosen, _ABSENT)
        self._above, self._above_index = chosen, op("Add", best, self._size - size)
        self._width = top_k
        return GraphFrontier(
            tokens=op("Where", present, op("GatherElements", tokens, best, axis=1), 0),
            parent_slots=op("Div", best, top_k),
            present=present,
            values=chosen,
        )

    def finish(self, root_position: ir.Value) -> GrownTree:
        """Return the M candidates of highest value as a tree, in that order. root_position [B,1]
        int64.
        """
        op, num_nodes = self._op, self._tree.num_draft_tokens + 1
        node = np.arange(num_nodes)
        tokens, parents, values = (
            self._all(self._tokens, 0),
            self._all(self._parents, 0),
            self._all(self._values, _ABSENT),
        )
        order = self._best(op, values, max(self._size, num_nodes), num_nodes)
        kept = op("Greater", op("GatherElements", values, order, axis=1), _ABSENT)
        # A parent's value is at least its child's, so it is kept and comes first.
        theirs = op("Unsqueeze", op("GatherElements", parents, order, axis=1), [2])
        is_parent = op("Equal", theirs, op("Unsqueeze", order, [1]))  # [B,M,M]
        has_one = op("Unsqueeze", op("And", kept, (node > 0)[None]), [2])
        is_parent = op("And", is_parent, has_one)
        found = op("ReduceSum", op("Where", is_parent, node, 0), [2], keepdims=0)
        mask = _reachable(op, is_parent, num_nodes, self._tree.draft_depth)
        depths = op("Sub", _count(op, mask, 2), 1)
        return GrownTree(
            tokens=op("Where", kept, op("GatherElements", tokens, order, axis=1), 0),
            parents=op("Sub", found, (node == 0).astype(np.int64)[None]),
            positions=op("Add", root_position, depths),
            tree_mask=mask,
            num_nodes=_count(op, kept, 1),
        )

    def _all(self, of_depths: list[ir.Value], absent: int | float) -> ir.Value:
        """Return [B, at least M]: a tree can have fewer candidates than room for them."""
        joined = self._op("Concat", *of_depths, axis=1)
        missing = self._tree.num_draft_tokens + 1 - self._size
        if missing > 0:
            joined = self._op("Pad", joined, [0, 0, 0, missing], absent)
        return joined  # type: ignore[no-any-return]


def _repeated(add: GraphBuilder, ids: ir.Value, usable: ir.Value, top_k: int) -> ir.Value:
    """Return bool [B,F,K]: a usable candidate of the same row before it has the same token."""
    place = np.arange(top_k)
    equal = add("Equal", add("Unsqueeze", ids, [2]), add("Unsqueeze", ids, [3]))
    first = add("And", add("Unsqueeze", usable, [2]), place[None, :] < place[:, None])
    return add("Greater", _count(add, add("And", equal, first), 3), 0)  # type: ignore[no-any-return]


def _reachable(add: GraphBuilder, is_parent: ir.Value, num_nodes: int, depth: int) -> ir.Value:
    """Return bool [B,M,M]: j is i or an ancestor of i, at most `depth` edges away.

    (I + P)^n counts paths of at most n edges; n doubles with every product.
    """
    itself = np.eye(num_nodes, dtype=np.float32)
    steps = add("Add", add("Cast", is_parent, to=ir.DataType.FLOAT), itself)
    edges = 1
    while edges < depth:
        steps = add("Min", add("MatMul", steps, steps), 1.0)
        edges *= 2
    return add("Greater", steps, 0.5)  # type: ignore[no-any-return]
