"""Attention inside a growth graph: over the draft's cache, and over the tree rows beside it.

Letters: B batch, N rows of an extension, K of a step, C cache slots that are read, S all cache
slots, R tree rows so far, Hq and Hkv heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle3.export.graphs.attention import MASKED, MASKED_FLOAT16, PLACEHOLDER, Lowering
from eagle3.export.graphs.graph_builder import GraphBuilder
from eagle3.plans.lint.ort_cuda_lint import MAX_JOINED

Attend = Callable[[ir.Value, ir.Value, ir.Value], ir.Value]
"""q [B,Hq,N,D], k, v [B,Hkv,N,D] after RoPE -> [B,N,Hq,D]"""

_TO_THE_END = (1 << 63) - 1


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of the traced layer. dtype: of activations and caches."""

    dtype: ir.DataType
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    capacity: int

    @classmethod
    def of(cls, draft: ir.Model) -> LayerSizes:
        (node,) = (n for n in draft.graph if (n.domain, n.op_type) == PLACEHOLDER)
        past = node.inputs[3]
        assert past is not None and past.shape is not None and past.dtype is not None
        return cls(
            dtype=past.dtype,
            num_heads=node.attributes["heads"].as_int(),
            num_kv_heads=node.attributes["kv_heads"].as_int(),
            head_dim=node.attributes["head_dim"].as_int(),
            scale=node.attributes["scale"].as_float(),
            capacity=int(past.shape[2]),  # type: ignore[arg-type]
        )

    @property
    def cache(self) -> tuple[int | str, ...]:
        return ("B", self.num_kv_heads, self.capacity, self.head_dim)

    def number(self, value: float) -> np.ndarray:
        """Return a constant in the activations' dtype."""
        return np.array(value, self.dtype.numpy())


def picked_rows(add: GraphBuilder, x: ir.Value, index: ir.Value) -> ir.Value:
    """x [B,R,w], index [B,K] -> [B,K,w]."""
    return add("GatherND", x, add("Unsqueeze", index, [2]), batch_dims=1)  # type: ignore[no-any-return]


class GrowthAttention:
    """Keys and values of the cache and of the tree rows beside it, and which row sees which.

    `ort` reads the used C = max(used) slots of the cache, `portable` all C = S. Heads that share
    keys become rows: [B,Hq,N,D] is [B,Hkv,G*N,D].
    """

    def __init__(
        self,
        add: GraphBuilder,
        sizes: LayerSizes,
        past: tuple[ir.Value, ir.Value],
        past_len: ir.Value,
        lowering: Lowering,
    ) -> None:
        self._add, self._sizes, self._past, self._past_len = add, sizes, past, past_len
        self._reads_used_slots = lowering.reads_used_slots
        self._groups = sizes.num_heads // sizes.num_kv_heads
        self.present: list[ir.Value] = []
        self._prefix: tuple[ir.Value, ir.Value] | None = None  # keys [B,Hkv,D,C], values
        self._tree: list[ir.Value] = []  # keys, values [B,Hkv,R,D] of the tree rows so far
        self._tree_bias: ir.Value | None = None  # [B,K,R] of the newest K tree rows

    def extend(self, positions: ir.Value, used: ir.Value) -> Attend:
        """Attention of the extension rows: they write the cache, and a row sees the slots up to
        its own.
        """
        add = self._add
        if self._reads_used_slots:
            self._num_slots = add("Reshape", add("ReduceMax", used, keepdims=1), [1])
            end = add("Squeeze", self._num_slots)
        else:
            self._num_slots = add.value([self._sizes.capacity])
            end = add.value(self._sizes.capacity)
        slots = add("Range", 0, end, 1)
        causal = self._bias(add("LessOrEqual", slots, add("Unsqueeze", positions, [2])))
        self._seen = self._bias(add("Less", slots, add("Unsqueeze", used, [2])))  # [B,1,C]

        def attend(q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
            self.present = [
                add("TensorScatter", past, new, self._past_len, axis=2, mode="linear")
                for past, new in zip(self._past, (k, v), strict=True)
            ]
            keys, values = map(self._read, self.present)
            self._prefix = self._turned(keys), values
            scores = self._scores(self._folded(q), self._prefix[0], self._tiled(causal))
            return self._unfolded(add("MatMul", add("Softmax", scores, axis=-1), values))

        return attend

    def _read(self, present: ir.Value) -> ir.Value:
        """Return the slots that are read, [B,Hkv,C,D]."""
        if not self._reads_used_slots:
            return present
        return self._add("Slice", present, [0], self._num_slots, [2])  # type: ignore[no-any-return]

    def step(self, parent_slots: ir.Value, top_k: int) -> Attend:
        """Attention of K tree rows: they see the cache's used slots, their ancestors and
        themselves.

        parent_slots [B,K]: their parents among the rows of the previous step.
        """
        add = self._add
        bias = self._extended(parent_slots, top_k)

        def attend(q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
            assert self._prefix is not None
            self._tree = [
                add("Concat", *self._tree[i : i + 1], new, axis=2) for i, new in enumerate((k, v))
            ]
            rows = self._folded(q)
            prefix = self._scores(rows, self._prefix[0], self._seen)
            beside = self._scores(rows, self._turned(self._tree[0]), self._tiled(bias))
            # One softmax over both. The scores are concatenated, not the keys, which are larger.
            weights = add("Softmax", add("Concat", prefix, beside, axis=-1), axis=-1)
            of_prefix = add("Slice", weights, [0], self._num_slots, [3])
            of_tree = add("Slice", weights, self._num_slots, [_TO_THE_END], [3])
            out = add("MatMul", of_prefix, self._prefix[1])
            return self._unfolded(add("Add", out, add("MatMul", of_tree, self._tree[1])))

        return attend

    def _extended(self, parent_slots: ir.Value, top_k: int) -> ir.Value:
        """Return [B,K,R+K]: what the parents saw, then each row itself."""
        add = self._add
        every = add("Unsqueeze", add("GreaterOrEqual", parent_slots, 0), [2])  # adds dimension B
        itself = self._bias(add("And", every, np.eye(top_k, dtype=np.bool_)[None]))
        seen = () if self._tree_bias is None else (picked_rows(add, self._tree_bias, parent_slots),)
        self._tree_bias = add("Concat", *seen, itself, axis=2)
        return self._tree_bias

    def _bias(self, allowed: ir.Value) -> ir.Value:
        """Return the additive mask: 0 for allowed slots."""
        masked = MASKED_FLOAT16 if self._sizes.dtype == ir.DataType.FLOAT16 else MASKED
        number = self._sizes.number
        return self._add("Where", allowed, number(0), number(masked))  # type: ignore[no-any-return]

    def _scores(self, rows: ir.Value, keys: ir.Value, bias: ir.Value) -> ir.Value:
        """rows [B,Hkv,Q,D], keys [B,Hkv,D,C], bias [B, 1 or Q, C] -> [B,Hkv,Q,C]."""
        product = self._add("MatMul", rows, keys)
        return self._add("Add", product, self._add("Unsqueeze", bias, [1]))  # type: ignore[no-any-return]

    def _turned(self, keys: ir.Value) -> ir.Value:
        return self._add("Transpose", keys, perm=[0, 1, 3, 2])  # type: ignore[no-any-return]

    def _folded(self, q: ir.Value) -> ir.Value:
        """[B,Hq,N,D] -> [B,Hkv,G*N,D], scaled."""
        scaled = self._add("Mul", q, self._sizes.number(self._sizes.scale))
        shape = [0, self._sizes.num_kv_heads, -1, self._sizes.head_dim]
        return self._add("Reshape", scaled, shape)  # type: ignore[no-any-return]

    def _unfolded(self, out: ir.Value) -> ir.Value:
        """[B,Hkv,G*N,D] -> [B,N,Hq,D]."""
        by_head = self._add("Reshape", out, [0, self._sizes.num_heads, -1, self._sizes.head_dim])
        return self._add("Transpose", by_head, perm=[0, 2, 1, 3])  # type: ignore[no-any-return]

    def _tiled(self, bias: ir.Value) -> ir.Value:
        """[B,N,C] -> [B,G*N,C], as `_folded` orders rows."""
        parts = [bias] * self._groups
        while len(parts) > MAX_JOINED:
            firsts = range(0, len(parts), MAX_JOINED)
            groups = [parts[first : first + MAX_JOINED] for first in firsts]
            parts = [self._add("Concat", *group, axis=1) for group in groups]
        return self._add("Concat", *parts, axis=1)  # type: ignore[no-any-return]
