"""A draft's whole growth as one graph: extension, every depth, top-k, rerank.

The head is not traced again: the graph contains copies of the layer that `DraftGraph` was traced
into, one for the extension and one for every depth below the first, over one set of weights. The
extension rows write the draft's cache, as a call of `draft` does, so both engines can be used on
one cache. The tree's own rows never enter it: their keys and values are beside it inside the
graph, and a row attends to the used part of the cache and to its ancestors.

Inputs: features [B,N,F]; next_ids [B,N] int64, the token of position i + 1 for row i; that of the
last used row is the root; num_rows [B] int64, rows in use, at least 1: the rows after them are
padding, which can hold anything and whose slots the next call overwrites; past_len [B] int64, at
most S - N; past_k.0, past_v.0 [B,Hkv,S,D].
Outputs: tokens [B,M] int64, ids of the target; parents [B,M] int64, -1 for the root; positions
[B,M] int64; tree_mask [B,M,M] bool, ancestors and the node itself; num_nodes [B] int64;
present_k.0, present_v.0. Absent nodes come last: token 0 under node 0, at the root's position,
visible only to themselves.

Letters: B batch, N extension rows, F feature size, d hidden size, K top-k, M nodes including the
root, S slots of the draft's cache, Hkv its heads, D their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle3.export.draft_graphs.expand_rerank import (
    GrownTree,
    TreeGrowth,
    best_by_rank,
    best_by_top_k,
    ordered_by_id,
)
from eagle3.export.draft_graphs.growth_attention import (
    Attend,
    GrowthAttention,
    LayerSizes,
    picked_rows,
)
from eagle3.export.graphs.attention import PLACEHOLDER, Lowering
from eagle3.export.graphs.graph_builder import GraphBuilder, Resolve
from eagle3.plans.tree_plan import TreePlan

# the first opset with TensorScatter, which writes the rows of several sequences at once
_OPSET = 24


def growth_graph(
    draft: ir.Model,
    fuse: ir.Model | None,
    target_ids: np.ndarray,
    lowering: Lowering,
    tree: TreePlan,
) -> ir.Model:
    """Return the engine `draft_tree`.

    draft: the traced `DraftGraph` with its attention not lowered. fuse: the engine `draft_fuse`,
    if the head has one. target_ids [Vd] int64. tree: K, D and M - 1 in use, with K at most Vd.
    """
    opsets = {"": _OPSET, "com.microsoft": 1} if lowering.fuses else {"": _OPSET}
    add = GraphBuilder("draft_tree", opsets)
    sizes = LayerSizes.of(draft)
    call = _call(add, draft, fuse, sizes)
    layer = _Layer(add, draft, tree.draft_top_k, lowering)
    attention = GrowthAttention(add, sizes, call.past, call.past_len, lowering)
    best = best_by_top_k if lowering.reads_used_slots else best_by_rank
    unique = len(np.unique(target_ids)) == len(target_ids)
    growth = TreeGrowth(add, call.root, tree, best, unique=unique)
    grown = _grow(add, layer, attention, growth, call, sizes, tree)
    _declare_outputs(add, grown, attention, sizes, tree.num_draft_tokens + 1)
    return add.model()


@dataclass(frozen=True)
class _Call:
    """The inputs of the call, with padding made harmless. [B,1] has one row per sequence.

    ids, positions [B,N]; hidden [B,N,d], fused; past_len [B]; used [B,1]: slots in use after the
    extension, which is the root's position; last [B,1]: the last row in use; root [B,1].
    """

    ids: ir.Value
    positions: ir.Value
    hidden: ir.Value
    past_len: ir.Value
    used: ir.Value
    last: ir.Value
    root: ir.Value
    past: tuple[ir.Value, ir.Value]


def _call(add: GraphBuilder, draft: ir.Model, fuse: ir.Model | None, sizes: LayerSizes) -> _Call:
    by_name = {value.name: value for value in [*draft.graph.inputs, *(fuse or draft).graph.inputs]}
    source = by_name["features" if fuse is not None else "hidden"]
    assert source.shape is not None
    int64 = ir.DataType.INT64
    features = add.input("features", sizes.dtype, "B", "N", int(source.shape[2]))  # type: ignore[arg-type]
    next_ids = add.input("next_ids", int64, "B", "N")
    num_rows, past_len = add.input("num_rows", int64, "B"), add.input("past_len", int64, "B")
    past = tuple(add.input(f"past_{kind}.0", sizes.dtype, *sizes.cache) for kind in "kv")
    # Counted on the device, because a shape would be read on the host.
    rows = add("Sub", add("CumSum", add("Add", add("Mul", next_ids, 0), 1), 1), 1)  # [B,N]
    in_use = add("Less", rows, add("Unsqueeze", num_rows, [1]))
    ids = add("Where", in_use, next_ids, 0)
    # Padding must stay finite: masked keys have weight 0, but 0 times NaN is NaN.
    features = add("Where", add("Unsqueeze", in_use, [2]), features, sizes.number(0))
    if fuse is not None:
        (features,) = add.copy(fuse, {"features": features}, ["hidden"], lambda *_: None)
    first, last = add("Unsqueeze", past_len, [1]), add("Unsqueeze", add("Sub", num_rows, 1), [1])
    return _Call(
        ids=ids,
        positions=add("Add", first, rows),
        hidden=features,
        past_len=past_len,
        used=add("Add", add("Add", first, last), 1),
        last=last,
        root=add("GatherElements", ids, last, axis=1),
        past=(past[0], past[1]),
    )


def _grow(
    add: GraphBuilder,
    layer: _Layer,
    attention: GrowthAttention,
    growth: TreeGrowth,
    call: _Call,
    sizes: LayerSizes,
    tree: TreePlan,
) -> GrownTree:
    """Write the extension, whose last row gives the root's candidates, then one step per depth."""
    given = {
        "input_ids": call.ids,
        "position_ids": call.positions,
        "hidden": call.hidden,
        "past_len": call.past_len,
    }
    attend = attention.extend(call.positions, call.used)
    ids, log_q, hidden = layer.run({**given, "logit_rows": call.last}, attend)
    growth.add(ids, log_q)
    hidden = picked_rows(add, hidden, call.last)
    for depth in range(1, tree.draft_depth):
        frontier = growth.next_frontier()
        hidden = picked_rows(add, hidden, frontier.parent_slots)
        # Like padding: an absent node's row must stay finite.
        present = add("Unsqueeze", frontier.present, [2])
        ahead = np.full((1, tree.draft_top_k), depth - 1)
        given = {
            "input_ids": frontier.tokens,
            "position_ids": add("Add", call.used, ahead),
            "hidden": add("Where", present, hidden, sizes.number(0)),
            "past_len": call.past_len,
        }
        attend = attention.step(frontier.parent_slots, tree.draft_top_k)
        ids, log_q, hidden = layer.run(given, attend)
        growth.add(ids, log_q)
    return growth.finish(call.used)


def _declare_outputs(
    add: GraphBuilder,
    grown: GrownTree,
    attention: GrowthAttention,
    sizes: LayerSizes,
    num_nodes: int,
) -> None:
    of_node, int64 = ("B", num_nodes), ir.DataType.INT64
    add.output(grown.tokens, "tokens", int64, *of_node)
    add.output(grown.parents, "parents", int64, *of_node)
    add.output(grown.positions, "positions", int64, *of_node)
    add.output(grown.tree_mask, "tree_mask", ir.DataType.BOOL, *of_node, num_nodes)
    add.output(grown.num_nodes, "num_nodes", int64, "B")
    for kind, present in zip("kv", attention.present, strict=True):
        add.output(present, f"present_{kind}.0", sizes.dtype, *sizes.cache)


class _Layer:
    """Copies of the traced head. Each copy is a call of it."""

    def __init__(self, add: GraphBuilder, draft: ir.Model, top_k: int, lowering: Lowering) -> None:
        self._add, self._draft, self._top_k = add, draft, top_k
        self._order_ties = not lowering.reads_used_slots  # ONNX Runtime orders ties itself
        self._pick = _pick_of(draft)

    def run(
        self, given: Mapping[str, ir.Value], attend: Attend
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Insert one call. Inputs and outputs as in DraftGraph; without logit_rows all rows get
        candidates.

        Returns top_ids and top_log_probs [B,M,K], and hidden_out [B,N,d].
        """

        def rewrite(node: ir.Node, resolve: Resolve) -> list[ir.Value] | None:
            if (node.domain, node.op_type) == PLACEHOLDER:
                return [attend(*(resolve(value) for value in node.inputs[:3]))]
            if node is self._pick and "logit_rows" not in given:
                return [resolve(node.inputs[0])]
            if node.op_type == "TopK":
                return self._best(resolve(node.inputs[0]))
            return None

        outputs = ["top_ids", "top_log_probs", "hidden_out"]
        ids, log_q, hidden = self._add.copy(self._draft, given, outputs, rewrite)
        return ids, log_q, hidden

    def _best(self, log_q: ir.Value) -> list[ir.Value]:
        """Return the K best of each row, where K is a constant."""
        top, ids = self._add("TopK", log_q, [self._top_k], outputs=2)
        return [top, ordered_by_id(self._add, ids, top, self._top_k) if self._order_ties else ids]


def _pick_of(draft: ir.Model) -> ir.Node:
    """Return the node that picks the rows that get logits."""
    reached = {value for value in draft.graph.inputs if value.name == "logit_rows"}
    for node in draft.graph:
        if node.op_type == "GatherND" and node.inputs[1] in reached:
            return node
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    raise AssertionError("the draft's graph picks no rows")
