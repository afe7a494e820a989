"""The contract between a traced model and the lowerings of its attention.

A transformers model and the draft heads pass their rotated q, k, v to `CachedCall.attend`, which
leaves one placeholder node in the trace. A lowering (`lowerings.py`) replaces it by ONNX nodes
over a static cache that past and present share.

Letters: B batch, N rows of a call, W rows that a tree mask covers, S cache capacity, T = longest
prefix + N, Hq and Hkv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops as onnx_ops
from torch import Tensor

# Finite, because a row of only -inf becomes NaN in some kernels, and far below any score.
MASKED, MASKED_FLOAT16 = -1e30, -65504.0

MaskRule = Callable[[Any, Any, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> allowed


@dataclass
class KeyWindow:
    """Which cache slots the N rows of a call can see, and the position that each slot holds. (A
    sliding window is the `rule` of `bias`.)

    visible [B,1,N,C] bool, key_positions [B,1,1,C] int64, query_positions [B,1,N,1] int64, where C
    is T (`ort`) or S (`portable`).
    """

    visible: Tensor
    key_positions: Tensor
    query_positions: Tensor

    def bias(self, rule: MaskRule | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B,1,N,C]: 0 for visible slots, otherwise MASKED or
        MASKED_FLOAT16.

        `rule` is transformers' own mask function (causal, sliding window, chunked, ...), evaluated
        on positions, so every restriction of an architecture applies here too.
        """
        allowed = self.visible
        if rule is not None:
            zero = torch.zeros((), dtype=torch.int64)
            allowed = allowed & rule(zero, zero, self.query_positions, self.key_positions)
        masked = MASKED_FLOAT16 if dtype == torch.float16 else MASKED
        return torch.where(allowed, 0.0, masked).to(dtype)


def key_window(
    tree_mask: Tensor,
    position_ids: Tensor,
    past_len: Tensor,
    num_slots: int,
    window_positions: Tensor | None,
) -> KeyWindow:
    """Build the window of a call: the committed prefix is visible, the last W slots by the mask.

    tree_mask [B,N,W] bool (row i sees window slot w), position_ids [B,N] int64, past_len [B] int64
    (slots filled before the call), num_slots C, window_positions [B,W] int64 or None. The window
    ends with this call's rows, so it starts at past_len + N - W; a window wider than N contains
    the draft's tree rows of earlier steps. Without `window_positions` no rule can read positions.
    """
    _, num_rows, window = tree_mask.shape
    slots = torch.arange(num_slots, device=tree_mask.device)[None, :]  # [1,C]
    offset = slots - (past_len[:, None] + (num_rows - window))  # [B,C], < 0 in the prefix
    stands = _numbers(tree_mask[:, 0])[:, :, None] == offset[:, None, :]  # [B,W,C]: w in slot c
    by_mask = torch.matmul(tree_mask.float(), stands.float()) > 0.5
    in_prefix = offset < 0
    positions = slots
    if window_positions is not None:
        in_tree = (stands * window_positions[:, :, None]).sum(1)
        positions = torch.where(in_prefix, slots, in_tree)
    return KeyWindow(
        visible=(in_prefix[:, None] | by_mask)[:, None],
        key_positions=positions[:, None, None, :],
        query_positions=position_ids[:, None, :, None],
    )


def _numbers(x: Tensor) -> Tensor:
    """Return 0, 1, 2, ... along the last dimension of x [B,W], int64. They are counted on the
    device instead of read from the shape, which a GPU would compute on the host.
    """
    return (x.long() * 0 + 1).cumsum(-1) - 1


@dataclass
class CachedCall:
    """The tensors of one traced call: past_k, past_v per layer [B,Hkv,S,D]; past_len [B] int64,
    the slots filled before it; total_len [] int64, max(past_len) + N.
    """

    past_len: Tensor
    total_len: Tensor
    past_k: list[Tensor]
    past_v: list[Tensor]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Emit one placeholder node: q [B,Hq,N,D], k, v [B,Hkv,N,D], bias [B,1,N,C] -> [B,N,Hq,D].

        Scores s = scale * q k^T become softcap * tanh(s / softcap) if softcap is not 0; then bias
        is added. sinks [Hq]: one further score per head, which only takes probability away. The
        placeholder computes nothing in PyTorch; `lower_attention` replaces it by real nodes.
        """
        past = [self.past_k[layer], self.past_v[layer]]
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
        attrs = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return onnx_ops.symbolic(
            f"{PLACEHOLDER[0]}::{PLACEHOLDER[1]}",
            [q, k, v, *past, self.past_len, self.total_len, bias, sinks],
            attrs={**attrs, "scale": scale, "softcap": softcap},
            dtype=q.dtype,
            shape=(q.shape[0], q.shape[2], heads, head_dim),
            version=1,
        )


PLACEHOLDER = ("eagle3", "CachedAttention")


@dataclass(frozen=True)
class Lowering:
    """One way to write cached attention into an ONNX graph.

    `reads_used_slots`: the mask has C = T columns (the used part of the cache) instead of S.
    `fuses`: ONNX Runtime's own operators may replace groups of standard ones.
    `groups_experts`: shapes inside the graph may depend on data, so that an expert runs only on
    the rows that chose it (`experts.py`).
    `write`: writes the nodes for one placeholder and returns its output and the two presents.
    """

    name: str
    opset: int
    reads_used_slots: bool
    fuses: bool
    groups_experts: bool
    write: Callable[[Nodes, ir.Node], tuple[ir.Value, ir.Value, ir.Value]]

    def num_slots(self, call: CachedCall, num_rows: int) -> int:
        """Return the number of columns C of the mask; in a trace, T is a symbol."""
        capacity = call.past_k[0].shape[2]
        if not self.reads_used_slots:
            return capacity
        total: int = call.total_len.item()  # type: ignore[assignment]  # a symbol in a trace
        torch._check(total >= num_rows)  # type: ignore[no-untyped-call]
        torch._check(total <= capacity)  # type: ignore[no-untyped-call]
        return total


class Nodes:
    """Collects the nodes that replace a placeholder. `once` holds values that layers share."""

    def __init__(self, once: dict[str, ir.Value]) -> None:
        self.nodes: list[ir.Node] = []
        self.once = once

    def add(self, op: str, *inputs: ir.Value | None, outputs: int = 1, **attrs: Any) -> Any:
        domain, _, name = op.rpartition("::")
        node = ir.node(name, list(inputs), attrs, domain=domain, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def number(self, value: float, dtype: ir.DataType) -> Any:
        return self.add("Constant", value=ir.tensor(value, dtype=dtype))

    def ints(self, values: list[int], dtype: ir.DataType = ir.DataType.INT64) -> Any:
        tensor = ir.tensor(values, dtype=dtype)
        return self.add("Constant", value=tensor)
