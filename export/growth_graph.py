"""A draft's whole growth as one graph: extension, every depth, top-k, rerank.

The head is not traced for it: the graph holds copies of the layer that `DraftGraph` was traced
into, one for the extension and one for every depth below the first, over one set of weights. The
extension rows write the draft's cache, as a call of `draft` does, so both may take turns on one
cache. The tree's own rows never enter it: their keys and values stand beside it inside the graph,
and a row attends to the used part of the cache and to its ancestors.

Inputs: features [B,N,F]; next_ids [B,N] int64, row i's token of position i + 1, that of the last
used row is the root; num_rows [B] int64, rows in use, 1 or more: those behind are padding, whose
slots the next call overwrites; past_len [B] int64; past_k.0, past_v.0 [B,Hkv,S,D].
Outputs: tokens [B,M] int64, the target's ids; parents [B,M] int64, -1 for the root; positions [B,M]
int64; tree_mask [B,M,M] bool, ancestors and the node itself; num_nodes [B] int64; present_k.0,
present_v.0. Nodes that are not there come last: token 0 under node 0, at the root's position, seen
by themselves alone.

Letters: B batch, N extension rows, F feature size, K top-k, M nodes, root included, C slots of the
cache that are read, R tree rows so far, Hq and Hkv heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle3.export.attention import MASKED, MASKED_FLOAT16, PLACEHOLDER, Lowering
from eagle3.export.graph_builder import GraphBuilder, Resolve
from eagle3.export.head_config import Head
from eagle3.export.tree_growth import (
    Frontier,
    GrownTree,
    TreeGrowth,
    best_by_rank,
    best_by_top_k,
    ordered_by_id,
)
from eagle3.plans.plan import TreePlan

_OPSET = 24  # the first with TensorScatter, which writes the rows of several sequences at once

Attend = Callable[[ir.Value, ir.Value, ir.Value], ir.Value]
"""q [B,Hq,N,D], k, v [B,Hkv,N,D] after RoPE -> [B,N,Hq,D]"""


def growth_graph(
    draft: ir.Model, fuse: ir.Model | None, head: Head, lowering: Lowering, tree: TreePlan
) -> ir.Model:
    """Engine `draft_tree`.

    draft: `DraftGraph`, traced, its attention not lowered; fuse: `draft_fuse` where the head has
    one. tree: K, D and M - 1 as they are in use, K at most Vd.
    """
    add = GraphBuilder("draft_tree", {"": _OPSET, **({"com.microsoft": 1} if lowering.fuses else {})})
    sizes = _Sizes.of(draft, head)
    call = _Call.of(add, draft, fuse, sizes)
    layer = _Layer(add, draft, tree.draft_top_k, lowering)
    grown = _grow(add, layer, call, _Cache(add, call, sizes, lowering), head, lowering, tree)
    return _finished(add, grown, call, tree)
