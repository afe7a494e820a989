"""Traces a draft head into its engines: `draft`, `draft_fuse` if the head fuses features, and
`draft_tree`, which grows a whole tree.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from eagle3.export.draft_graphs.growth_graph import growth_graph
from eagle3.export.draft_graphs.head_modules import (
    DraftGraph,
    Eagle1Head,
    EagleHead,
    FuseGraph,
    build_eagle1_head,
    build_head,
)
from eagle3.export.graphs.attention import Lowering
from eagle3.export.graphs.tracer import lower, trace, trace_unlowered
from eagle3.export.heads.head_config import Head
from eagle3.export.targets.target import Target, caches, lm_head_weight
from eagle3.export.targets.target_graph import KvShape
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import UnsupportedModel


def head_module(head: Head, target: Target) -> EagleHead | Eagle1Head:
    """Return the module that computes a head of `target`, with its weights, in the
    target's dtype.
    """
    if head.config.method == "eagle1":
        return build_eagle1_head(head, lm_head_weight(target), target.model.dtype)
    return build_head(head, target.model.dtype)


def trace_draft_engines(
    head: Head,
    module: EagleHead | Eagle1Head,
    embedding: torch.Tensor,
    lowering: Lowering,
    capacity: int,
    tree: TreePlan | None,
    *,
    may_tie: bool,
) -> dict[str, ir.Model]:
    """Return engine name -> model. DRAFT_ENGINES of the runtime lists the required engines.

    embedding [V,d]: the table that the head reads. capacity: slots of the draft's cache. tree: the
    tree of `draft_tree` (`growth_engine.grown_tree`), or None for no such engine. may_tie: keep an
    lm_head that is the embedding as one tensor in the graph. Raises UnsupportedModel.
    """
    if lowering.fuses and head.config.head_dim % 8:
        raise UnsupportedModel(
            f"the head's head_dim is {head.config.head_dim}: the {lowering.name} lowering's "
            "attention takes multiples of 8; export it with --lowering portable"
        )
    is_tied = module.lm_head.weight.data_ptr() == embedding.data_ptr()
    graph = DraftGraph(module, embedding, head.target_ids, lowering, tied=may_tie and is_tied)
    outputs = ["logits", "top_log_probs", "top_ids", "hidden_out"]
    draft = trace_unlowered(graph, _inputs(head, module, capacity), outputs, lowering, "draft")
    fuse = None if isinstance(module, Eagle1Head) else _trace_fuse(module, lowering)
    fused = {} if fuse is None else {"draft_fuse": fuse}
    grown = {}
    if tree is not None:  # before the draft's own attention is lowered
        grown["draft_tree"] = growth_graph(draft, fuse, head.target_ids, lowering, tree)
    return {**fused, "draft": lower(draft, lowering), **grown}


def _trace_fuse(module: EagleHead, lowering: Lowering) -> ir.Model:
    """Trace features [B,N,F] -> hidden [B,N,d]."""
    width, dtype = module.fc.in_features, module.fc.weight.dtype
    features = torch.zeros(2, 5, width, dtype=dtype)
    inputs: dict[str, tuple[Any, str]] = {"features": (features, f"B N {width}")}
    return trace(FuseGraph(module), inputs, ["hidden"], lowering, "draft_fuse")


def _inputs(
    head: Head, module: EagleHead | Eagle1Head, capacity: int
) -> dict[str, tuple[Any, str]]:
    batch, rows, window, picked = 2, 5, 7, 3
    config, dtype = head.config, module.fc.weight.dtype
    kv = KvShape(1, config.num_kv_heads, config.head_dim)
    mask = torch.ones(batch, rows, window, dtype=torch.bool)
    return {
        "input_ids": (torch.zeros(batch, rows, dtype=torch.int64), "B N"),
        "position_ids": (torch.arange(rows).repeat(batch, 1), "B N"),
        "hidden": (
            torch.zeros(batch, rows, config.hidden_size, dtype=dtype),
            f"B N {config.hidden_size}",
        ),
        "tree_mask": (mask, "B N W"),
        "past_len": (torch.full((batch,), 2, dtype=torch.int64), "B"),
        "logit_rows": (torch.zeros(batch, picked, dtype=torch.int64), "B M"),
        "top_k": (torch.full((1,), 3, dtype=torch.int64), "1"),
        **caches(kv, capacity, dtype, batch),
    }
