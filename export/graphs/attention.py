"""How attention is written into the graph: two lowerings of one contract.

A transformers model and the draft head hand their rotated q, k, v to `CachedCall.attend`, which
leaves one placeholder node in the trace. A lowering replaces it by ONNX nodes over a static cache
that past and present share.

Letters: B batch, N rows in a call, W window of rows a tree mask covers, S cache capacity,
T = longest prefix + N, Hq and Hkv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops as onnx_ops
from torch import Tensor

# Finite: a row of -inf only would turn into NaN in some kernels. Far below any score: it is added.
MASKED, MASKED_FLOAT16 = -1e30, -65504.0

MaskRule = Callable[[Any, Any, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> allowed


@dataclass
class KeyWindow:
    """Which cache slots the N rows of a call may see, and at which position each slot stands.

    visible [B,1,N,C] bool, key_positions [B,1,1,C] int64, query_positions [B,1,N,1] int64, where C
    is T (`ort`) or S (`portable`).
    """

    visible: Tensor
    key_positions: Tensor
    query_positions: Tensor

    def bias(self, rule: MaskRule | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [B,1,N,C]: 0 where a row may look, MASKED or MASKED_FLOAT16 elsewhere.

        `rule` is transformers' own mask function (causal, sliding window, chunked, ...), evaluated
        on positions, so whatever an architecture restricts is restricted here too.
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
    """Reads a call's small inputs: the committed prefix is visible, the last W slots by the mask.

    tree_mask [B,N,W] bool (row i may see window slot w), position_ids [B,N] int64, past_len [B]
    int64 (slots filled before the call), num_slots C, window_positions [B,W] int64 or None. The
    window ends with this call's rows, so it starts at past_len + N - W; a window wider than N holds
    the draft's tree rows of earlier steps. Without `window_positions` no rule may read positions.
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
    """0, 1, 2, ... along the last dimension of x [B,W], int64; counted where x is and not read off
    its shape, which a GPU would have to ask the host for."""
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
        """Emits one placeholder node: q [B,Hq,N,D], k, v [B,Hkv,N,D], bias [B,1,N,C] -> [B,N,Hq,D].

        Scores s = scale * q k^T become softcap * tanh(s / softcap) where softcap is not 0; then
        bias is added. sinks [Hq]: a further score of each head, which only takes probability away.
        The placeholder computes nothing in PyTorch; `lower_attention` turns it into real nodes.
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
    `fuses`: ONNX Runtime's own operators may stand for groups of standard ones.
    `groups_experts`: shapes inside the graph may depend on data, so that an expert runs on the rows
    that chose it and on no others (`export/experts.py`).
    `write`: the nodes for one placeholder; returns its output and the two presents.
    """

    name: str
    opset: int
    reads_used_slots: bool
    fuses: bool
    groups_experts: bool
    write: Callable[[Nodes, ir.Node], tuple[ir.Value, ir.Value, ir.Value]]

    def num_slots(self, call: CachedCall, num_rows: int) -> int:
        """Columns C of the mask; in a trace a symbol where it is T."""
        capacity = call.past_k[0].shape[2]
        if not self.reads_used_slots:
            return capacity
        total: int = call.total_len.item()  # type: ignore[assignment]  # a symbol in a trace
        torch._check(total >= num_rows)  # type: ignore[no-untyped-call]
        torch._check(total <= capacity)  # type: ignore[no-untyped-call]
        return total


class Nodes:
    """Collects the nodes that replace a placeholder; `once` holds values that layers share."""

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


def _inputs(placeholder: ir.Node) -> list[ir.Value | None]:
    """The placeholder's nine inputs; an absent last one is None."""
    inputs = list(placeholder.inputs)
    return inputs + [None] * (9 - len(inputs))


def _sizes(placeholder: ir.Node) -> list[int]:
    """heads, kv_heads, head_dim."""
    return [placeholder.attributes[name].as_int() for name in ("heads", "kv_heads", "head_dim")]


def _group_query_attention(
    nodes: Nodes, placeholder: ir.Node
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`com.microsoft.GroupQueryAttention`: reads the used part of the cache, writes in place.

    A single row takes another kernel there than the same row among others and rounds differently.
    Therefore a call of one row gets a second, whose output is dropped and whose slot, behind the
    last one, the next call overwrites: then a row's bits do not depend on how wide its call was.
    """
    q, k, v, past_k, past_v, past_len, total_len, bias, sinks = _inputs(placeholder)
    heads, kv_heads, head_dim = _sizes(placeholder)
    assert q is not None and bias is not None
    if not nodes.once:
        _write_row_counts(nodes, q, past_len, total_len)
    flat = []
    for x in (q, k, v):
        by_row = nodes.add("Transpose", x, perm=[0, 2, 1, 3])
        by_row = nodes.add("Reshape", by_row, nodes.ints([0, 0, -1]))
        extra = nodes.add("Slice", by_row, nodes.ints([0]), nodes.once["extra"], nodes.ints([1]))
        flat.append(nodes.add("Concat", by_row, extra, axis=1))
    mask = f"bias {bias.name}"
    if mask not in nodes.once:
        sides = nodes.add("Concat", nodes.ints([0] * 6), *[nodes.once["extra"]] * 2, axis=0)
        nodes.once[mask] = nodes.add("Pad", bias, sides)
    out, present_k, present_v = nodes.add(
        "com.microsoft::GroupQueryAttention",
        *flat,
        past_k,
        past_v,
        nodes.once["last_slot"],
        nodes.once["total_len"],
        None,
        None,
        None,
        nodes.once[mask],
        sinks,
        outputs=3,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=placeholder.attributes["scale"].as_float(),
        softcap=placeholder.attributes["softcap"].as_float(),
    )
    asked = nodes.add("Slice", out, nodes.ints([0]), nodes.once["rows"], nodes.ints([1]))
    by_head = nodes.add("Reshape", asked, nodes.ints([0, 0, heads, head_dim]))
    return by_head, present_k, present_v


def _write_row_counts(
    nodes: Nodes, q: ir.Value, past_len: ir.Value | None, total_len: ir.Value | None
) -> None:
    """What all layers share: rows N, extra rows (1 for one row of one sequence), last slot, length.

    Several sequences get none: GroupQueryAttention takes them with one row each, or not at all.
    """
    nodes.once["rows"] = nodes.add("Shape", q, start=2, end=3)
    calls = nodes.add("Mul", nodes.once["rows"], nodes.add("Shape", q, start=0, end=1))
    single = nodes.add("Equal", calls, nodes.ints([1]))
    nodes.once["extra"] = nodes.add("Cast", single, to=ir.DataType.INT64)
    written = nodes.add("Add", nodes.once["rows"], nodes.once["extra"])
    last_slot = nodes.add("Sub", nodes.add("Add", past_len, written), nodes.ints([1]))
    nodes.once["last_slot"] = nodes.add("Cast", last_slot, to=ir.DataType.INT32)
    extra = nodes.add("Squeeze", nodes.once["extra"])
    length = nodes.add("Add", total_len, extra)
    nodes.once["total_len"] = nodes.add("Cast", length, to=ir.DataType.INT32)


def _scatter_attention(nodes: Nodes, placeholder: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`TensorScatter` and `Attention` of opset 24: standard ONNX, reads all of the cache."""
    q, k, v, past_k, past_v, past_len, _, bias, sinks = _inputs(placeholder)
    present_k = nodes.add("TensorScatter", past_k, k, past_len, axis=2, mode="linear")
    present_v = nodes.add("TensorScatter", past_v, v, past_len, axis=2, mode="linear")
    scale = placeholder.attributes["scale"].as_float()
    if sinks is None and placeholder.attributes["softcap"].as_float() == 0.0:
        out = nodes.add("Attention", q, present_k, present_v, bias, scale=scale)
    else:
        out = _written_out(nodes, placeholder, present_k, present_v)
    return nodes.add("Transpose", out, perm=[0, 2, 1, 3]), present_k, present_v


def _written_out(nodes: Nodes, placeholder: ir.Node, k: ir.Value, v: ir.Value) -> ir.Value:
    """Attention [B,Hq,N,D] over presents [B,Hkv,S,D] in single steps, for a softcap or sinks.

    The Attention operator has no sinks, and TensorRT refuses its softcap. The heads that share keys
    are folded into rows, so that keys are not repeated; softmax runs in float32.
    """
    q, _, _, past, *_, bias, sinks = _inputs(placeholder)
    heads, kv_heads, head_dim = _sizes(placeholder)
    assert q is not None and q.dtype is not None and past is not None and past.shape is not None
    slots = past.shape[2]
    assert isinstance(slots, int)
    folded = nodes.add("Reshape", q, nodes.ints([0, kv_heads, -1, head_dim]))
    scale = nodes.number(placeholder.attributes["scale"].as_float(), q.dtype)
    keys = nodes.add("Transpose", k, perm=[0, 1, 3, 2])
    scores = nodes.add("MatMul", nodes.add("Mul", folded, scale), keys)
    scores = nodes.add("Reshape", scores, nodes.ints([0, heads, -1, slots]))  # [B,Hq,N,S]
    softcap = placeholder.attributes["softcap"].as_float()
    if softcap:
        cap = nodes.number(softcap, q.dtype)
        scores = nodes.add("Mul", nodes.add("Tanh", nodes.add("Div", scores, cap)), cap)
    probs = _softmax(nodes, scores, bias, sinks, q.dtype)
    out = nodes.add("MatMul", nodes.add("Reshape", probs, nodes.ints([0, kv_heads, -1, slots])), v)
    return nodes.add("Reshape", out, nodes.ints([0, heads, -1, head_dim]))  # type: ignore[no-any-return]


def _softmax(
    nodes: Nodes,
    scores: ir.Value,
    bias: ir.Value | None,
    sinks: ir.Value | None,
    dtype: ir.DataType,
) -> ir.Value:
    """Probabilities of scores + bias [B,Hq,N,S]; sinks [Hq] are a column more, which is dropped.

    The column has its rows from the bias, which is finite: 0 times a score of -inf is NaN.
    """

    def wide(x: ir.Value | None) -> Any:
        return x if dtype == ir.DataType.FLOAT else nodes.add("Cast", x, to=ir.DataType.FLOAT)

    bias = wide(bias)
    scores = nodes.add("Add", wide(scores), bias)
    if sinks is not None:
        first = nodes.add("Slice", bias, nodes.ints([0]), nodes.ints([1]), nodes.ints([3]))
        by_head = nodes.add("Reshape", wide(sinks), nodes.ints([1, -1, 1, 1]))
        zeros = nodes.add("Mul", first, nodes.number(0.0, ir.DataType.FLOAT))  # [B,1,N,1]
        scores = nodes.add("Concat", nodes.add("Add", zeros, by_head), scores, axis=-1)
    probs = nodes.add("Softmax", scores, axis=-1)
    if sinks is not None:
        bounds = [nodes.ints([1]), nodes.ints([(1 << 63) - 1]), nodes.ints([3])]
        probs = nodes.add("Slice", probs, *bounds)
    return probs if dtype == ir.DataType.FLOAT else nodes.add("Cast", probs, to=dtype)  # type: ignore[no-any-return]


def lower_attention(model: ir.Model, lowering: Lowering) -> int:
    """Replaces every placeholder by the lowering's nodes and adds the presents to the outputs.

    The presents follow the other outputs: present_k.0 .., then present_v.0 ... Returns how many
    layers were lowered.
    """
    presents: dict[str, ir.Value] = {}
    once: dict[str, ir.Value] = {}
    for placeholder in [n for n in model.graph if (n.domain, n.op_type) == PLACEHOLDER]:
        nodes = Nodes(once)
        out, *written = lowering.write(nodes, placeholder)
        layer = placeholder.attributes["layer"].as_int()
        for kind, past, present in zip("kv", placeholder.inputs[3:5], written, strict=True):
            assert past is not None
            present.name, present.shape, present.type = (
                f"present_{kind}.{layer}",
                past.shape,
                past.type,
            )
            presents[present.name] = present
        old = placeholder.outputs[0]
        out.shape, out.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(
            model.graph, placeholder, [placeholder], nodes.nodes, [old], [out]
        )
    num_layers = len(presents) // 2
    model.graph.outputs.extend(
        presents[f"present_{x}.{i}"] for x in "kv" for i in range(num_layers)
    )
    model.opset_imports.pop(PLACEHOLDER[0], None)
    if lowering.fuses:
        model.opset_imports["com.microsoft"] = 1
    return num_layers


LOWERINGS: dict[str, Lowering] = {
    "ort": Lowering("ort", 21, True, True, True, _group_query_attention),
    "portable": Lowering("portable", 24, False, False, False, _scatter_attention),
}
