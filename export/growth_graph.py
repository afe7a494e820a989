"""A draft's whole growth as one graph: extension, every depth, top-k, rerank.

The extension rows write the draft's cache, as a call of `DraftGraph` does, so both may take turns on
one cache. The tree's own rows never enter it: their keys and values stand beside it inside the
graph, and a row attends to the cache's used part and to its ancestors.

Letters: B batch, N extension rows, F feature size, K top-k, D depth (of a head dimension where it
stands in a cache's shape), M nodes, root included, C slots of the cache that are read, R tree rows
so far, Hq and Hkv heads, G = Hq / Hkv.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.onnx.ops as onnx_ops
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import Tensor, nn

from eagle3.export.attention import MASKED, MASKED_FLOAT16, Lowering
from eagle3.export.head_config import Head
from eagle3.export.head_graph import Attend, Eagle1Head, EagleHead
from eagle3.export.onnx_graph import trace
from eagle3.export.target import caches
from eagle3.export.target_graph import KvShape
from eagle3.export.tree_growth import (
    GrownTree,
    TreeGrowth,
    best_by_rank,
    best_by_top_k,
    ordered_by_id,
)
from eagle3.plans.plan import TreePlan

OUTPUTS = ("tokens", "parents", "positions", "tree_mask", "num_nodes")


class GrowthGraph(nn.Module):
    """Extends the draft's cache by the pending rows and grows a tree of static size.

    tree: K, D and M - 1 as they are in use, K at most Vd. Inputs: features [B,N,F]; next_ids [B,N]
    int64, row i's token of position i + 1, that of the last used row is the root; num_rows [B]
    int64, rows in use, 1 or more: those behind are padding, whose slots the next call overwrites;
    past_len [B] int64; past_k, past_v [B,Hkv,S,D].
    Outputs: tokens [B,M] int64, the target's ids; parents [B,M] int64, -1 for the root; positions
    [B,M] int64; tree_mask [B,M,M] bool, ancestors and the node itself; num_nodes [B] int64. Nodes
    that are not there come last: token 0 under node 0, at the root's position, seen by themselves.
    """

    def __init__(
        self,
        head: EagleHead | Eagle1Head,
        embedding: Tensor,
        target_ids: np.ndarray,
        lowering: Lowering,
        tree: TreePlan,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.head = head  # names as in DraftGraph: both engines may read one file of weights
        rows, width = embedding.shape
        self.embed = nn.Embedding(rows, width, _weight=embedding, _freeze=True)
        if tied:
            self.embed.weight = head.lm_head.weight
        self.register_buffer("target_ids", torch.from_numpy(target_ids.copy()))
        self.lowering, self.tree = lowering, tree
        self.full_vocab = bool(np.array_equal(target_ids, np.arange(len(target_ids))))
        self.unique = len(np.unique(target_ids)) == len(target_ids)

    def forward(
        self,
        features: Tensor,
        next_ids: Tensor,
        num_rows: Tensor,
        past_len: Tensor,
        past_k: list[Tensor],
        past_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        rows = torch.arange(next_ids.shape[1])[None, :]
        in_use = rows < num_rows[:, None]
        ids = torch.where(in_use, next_ids, 0)
        features = torch.where(in_use[..., None], features, 0.0)
        last = num_rows - 1
        prefix = _Prefix(past_len, num_rows, past_k[0], past_v[0], self.lowering)
        positions = past_len[:, None] + rows
        attend = prefix.extend(positions)
        out = self.head(self.embed(ids), self.head.fuse(features), positions, attend)
        grown = self._grow(
            root=ids.gather(1, last[:, None])[:, 0],
            root_position=past_len + num_rows,
            out=_rows(out, last[:, None]),
            prefix=prefix,
        )
        return (*(getattr(grown, name) for name in OUTPUTS), prefix.present_k, prefix.present_v)

    def _grow(self, root: Tensor, root_position: Tensor, out: Tensor, prefix: _Prefix) -> GrownTree:
        """The tree under `root`, whose row gave out [B,1,d]."""
        best = best_by_top_k if self.lowering.reads_used_slots else best_by_rank
        growth = TreeGrowth(root, self.tree, best, unique=self.unique)
        growth.add(*self._candidates(out))
        beside = _TreeRows(prefix)
        for depth in range(1, self.tree.draft_depth):
            frontier = growth.next_frontier()
            hidden = _rows(self.head.feed_back(out), frontier.parent_slots)
            # An absent row must stay finite: masked keys have weight 0, but 0 times NaN is NaN.
            hidden = torch.where(frontier.present[..., None], hidden, 0.0)
            positions = (root_position[:, None] + (depth - 1)).expand_as(frontier.tokens)
            attend = beside.step(frontier.parent_slots)
            out = self.head(self.embed(frontier.tokens), hidden, positions, attend)
            growth.add(*self._candidates(out))
        return growth.finish(root_position)

    def _candidates(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """out [B,F,d] -> the target's ids [B,F,K] and log q float32, best first."""
        log_probs = torch.log_softmax(self.head.logits(out), -1)
        top, ids = log_probs.topk(self.tree.draft_top_k, dim=-1)
        if not self.lowering.reads_used_slots:  # ONNX Runtime orders ties itself
            ids = ordered_by_id(ids, top)
        if not self.full_vocab:
            ids = self.target_ids[ids]  # type: ignore[index]
        return ids, top


class _Prefix:
    """The draft's cache in one call: kept rows, then the extension's.

    `ort` reads the used C = max(past_len + num_rows) slots, `portable` all C = S.
    """

    def __init__(
        self,
        past_len: Tensor,
        num_rows: Tensor,
        past_k: Tensor,
        past_v: Tensor,
        lowering: Lowering,
    ) -> None:
        self._past, self._past_len = (past_k, past_v), past_len
        self._capacity = past_k.shape[2]
        self.used = past_len + num_rows  # [B]
        self._num_slots = self._capacity
        if lowering.reads_used_slots:
            self._num_slots = self.used.max().item()  # type: ignore[assignment]
            torch._check(self._num_slots >= 1)  # type: ignore[no-untyped-call]
            torch._check(self._num_slots <= self._capacity)  # type: ignore[no-untyped-call]
        self.masked = MASKED_FLOAT16 if past_k.dtype == torch.float16 else MASKED

    def extend(self, positions: Tensor) -> Attend:
        """Attention of the extension rows, at positions [B,N]: writes the cache, then reads it."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.present_k, self.present_v = (
                self._written(past, new) for past, new in zip(self._past, (k, v), strict=True)
            )
            self.keys, self.values = (
                x.narrow(2, 0, self._num_slots) for x in (self.present_k, self.present_v)
            )
            slots = torch.arange(self._num_slots)
            causal = self.bias(slots <= positions[:, :, None], q.dtype)  # [B,N,C]
            self.seen = self.bias(slots < self.used[:, None, None], q.dtype)  # [B,1,C]
            groups = q.shape[1] // k.shape[1]
            weights = torch.softmax(self.scores(_fold(q, k.shape[1]), _tiled(causal, groups)), -1)
            return _unfold(_product(weights, self.values), q)

        return attend

    def scores(self, q: Tensor, bias: Tensor) -> Tensor:
        """q [B,Hkv,Q,D] scaled, bias [B,1 or Q,C] -> [B,Hkv,Q,C]."""
        return _product(q, self.keys.transpose(-1, -2)) + bias[:, None]

    def bias(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive: 0 where allowed."""
        return torch.where(allowed, 0.0, self.masked).to(dtype)

    def _written(self, past: Tensor, new: Tensor) -> Tensor:
        """past [B,Hkv,S,D] with new rows [B,Hkv,N,D] in slots past_len .., the memory they share."""
        return onnx_ops.symbolic(
            "TensorScatter",
            [past, new, self._past_len],
            attrs={"axis": 2, "mode": "linear"},
            dtype=past.dtype,
            shape=past.shape,
            version=24,
        )


@dataclass
class _TreeRows:
    """Keys and values of the tree's rows so far [B,Hkv,R,D], and what the newest K may see."""

    prefix: _Prefix
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    bias: Tensor | None = None  # [B,K,R]

    def step(self, parent_slots: Tensor) -> Attend:
        """Attention of K new rows, children of the slots [B,K] of the step before."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = self._extended(parent_slots, q.dtype)
            self.keys.append(k)
            self.values.append(v)
            folded = _fold(q, k.shape[1])
            prefix = self.prefix.scores(folded, self.prefix.seen)
            beside = _product(folded, torch.cat(self.keys, 2).transpose(-1, -2))
            beside = beside + _tiled(bias, q.shape[1] // k.shape[1])[:, None]
            weights = torch.softmax(torch.cat([prefix, beside], -1), -1)
            of_prefix = weights.narrow(-1, 0, prefix.shape[-1])
            of_tree = weights.narrow(-1, prefix.shape[-1], beside.shape[-1])
            out = _product(of_prefix, self.prefix.values)
            return _unfold(out + _product(of_tree, torch.cat(self.values, 2)), q)

        return attend

    def _extended(self, parent_slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[B,K,R+K]: what the parents saw, then each row itself."""
        batch, top_k = parent_slots.shape
        itself = self.prefix.bias(torch.eye(top_k, dtype=torch.bool), dtype)
        itself = itself[None].expand(batch, -1, -1)
        if self.bias is None:
            self.bias = itself
        else:
            self.bias = torch.cat([_rows(self.bias, parent_slots), itself], -1)
        return self.bias


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B,R,w], index [B,K] int64 -> [B,K,w]."""
    batch, count, width = x.shape
    flat = index + torch.arange(batch)[:, None] * count
    return nn.functional.embedding(flat, x.reshape(batch * count, width))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [B,H,N,D] times b [B,H,D,C]. PyTorch's matmul would restrict N by what its strides are."""
    shape = (*a.shape[:-1], b.shape[-1])
    return onnx_ops.symbolic("MatMul", [a, b], dtype=a.dtype, shape=shape, version=24)


def _fold(q: Tensor, num_kv_heads: int) -> Tensor:
    """q [B,Hq,N,D] -> [B,Hkv,G*N,D], scaled: heads that share keys become rows."""
    batch, _, _, head_dim = q.shape
    return (q * head_dim**-0.5).contiguous().reshape(batch, num_kv_heads, -1, head_dim)


def _unfold(out: Tensor, q: Tensor) -> Tensor:
    """[B,Hkv,G*N,D] -> [B,N,Hq,D]."""
    batch, heads, rows, head_dim = q.shape
    by_head = out.reshape(batch, out.shape[1], heads // out.shape[1], rows, head_dim)
    return by_head.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, head_dim)


def _tiled(bias: Tensor, groups: int) -> Tensor:
    """[B,N,C] -> [B,G*N,C], as `_fold` orders rows."""
    return bias if groups == 1 else torch.cat([bias] * groups, 1)


def trace_growth(
    head: Head,
    module: EagleHead | Eagle1Head,
    embedding: Tensor,
    lowering: Lowering,
    capacity: int,
    tree: TreePlan,
    *,
    tied: bool,
) -> ir.Model:
    """Engine `draft_tree`; capacity: slots S of the draft's cache. Raises UnsupportedModel."""
    graph = GrowthGraph(module, embedding, head.target_ids, lowering, tree, tied)
    outputs = [*OUTPUTS, "present_k.0", "present_v.0"]
    # TensorScatter, which takes several sequences at once, is of opset 24.
    lowering = replace(lowering, opset=max(lowering.opset, 24))
    model = trace(graph, _inputs(head, module, capacity), outputs, lowering, "draft_tree")
    # Every depth has brought its own Transpose of every weight; `store_for_matmul` wants one.
    CommonSubexpressionEliminationPass()(model)
    return model


def _inputs(
    head: Head, module: EagleHead | Eagle1Head, capacity: int
) -> dict[str, tuple[Any, str]]:
    batch, rows = 2, 5
    config, dtype = head.config, module.fc.weight.dtype
    width = module.fc.in_features if isinstance(module, EagleHead) else config.hidden_size
    kv = KvShape(1, config.num_kv_heads, config.head_dim)
    return {
        "features": (torch.zeros(batch, rows, width, dtype=dtype), f"B N {width}"),
        "next_ids": (torch.zeros(batch, rows, dtype=torch.int64), "B N"),
        "num_rows": (torch.full((batch,), 2, dtype=torch.int64), "B"),
        "past_len": (torch.full((batch,), 2, dtype=torch.int64), "B"),
        **caches(kv, capacity, dtype, batch),
    }
