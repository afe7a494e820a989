"""The two lowerings of cached attention: GroupQueryAttention, and opset 24's Attention."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from eagle3.export.graphs.attention import PLACEHOLDER, Lowering, Nodes


def _group_query_attention(
    nodes: Nodes, placeholder: ir.Node
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`com.microsoft.GroupQueryAttention`: reads the used part of the cache and updates it in
    place.

    For a single row the operator uses another kernel, which rounds differently than the same row
    among others. A call of one row therefore gets a second row, whose output is dropped and whose
    slot, after the last one, the next call overwrites. The bits of a row then do not depend on the
    width of its call.

    The operator also rotates q and k if their tables are constants, and splits the product of
    joined weights (`joined_products.py`).
    """
    q, k, v, past_k, past_v, past_len, total_len, bias, sinks = _inputs(placeholder)
    heads, kv_heads, head_dim = _sizes(placeholder)
    assert q is not None and k is not None and v is not None and bias is not None
    if not nodes.once:
        _write_row_counts(nodes, bias, past_len, total_len)
    tables: list[ir.Value | None] = [None, None, None]
    rotary = _rotary_of(q, k) if head_dim % 16 == 0 else None  # the operator's condition
    if rotary is not None:
        (q, k), (rows, cos, sin) = rotary
        if rows.name not in nodes.once:
            nodes.once[str(rows.name)] = _with_extra_row(nodes, rows)
        tables = [cos, sin, nodes.once[str(rows.name)]]
    by_row = [
        _by_row(nodes, x, count, head_dim)
        for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
    ]
    joined = _joined(by_row)
    inputs = [_with_extra_row(nodes, x) for x in ([joined] if joined is not None else by_row)]
    mask = f"bias {bias.name}"
    if mask not in nodes.once:
        sides = nodes.add("Concat", nodes.ints([0] * 6), *[nodes.once["extra"]] * 2, axis=0)
        nodes.once[mask] = nodes.add("Pad", bias, sides)
    out, present_k, present_v = nodes.add(
        "com.microsoft::GroupQueryAttention",
        *inputs,
        *[None] * (3 - len(inputs)),
        past_k,
        past_v,
        nodes.once["last_slot"],
        nodes.once["total_len"],
        *tables,
        nodes.once[mask],
        sinks,
        outputs=3,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=placeholder.attributes["scale"].as_float(),
        softcap=placeholder.attributes["softcap"].as_float(),
        do_rotary=int(rotary is not None),
    )
    asked = nodes.add("Slice", out, nodes.ints([0]), nodes.once["rows"], nodes.ints([1]))
    asked.shape, asked.type = ir.Shape(["B", "N", heads * head_dim]), q.type
    _drop_flattening(placeholder.outputs[0], asked, heads * head_dim)
    by_head = nodes.add("Reshape", asked, nodes.ints([0, 0, heads, head_dim]))
    return by_head, present_k, present_v


def _rotary_of(
    q: ir.Value, k: ir.Value
) -> tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value, ir.Value]] | None:
    """Return q and k before their rotary embeddings, with the positions and tables of both; None
    unless both read the same constant tables.
    """
    producers = [x.producer() for x in (q, k)]
    if any(node is None or node.op_type != "RotaryEmbedding" for node in producers):
        return None
    (q_in, *of_q), (k_in, *of_k) = (node.inputs for node in producers)  # type: ignore[union-attr]
    tables = [None if x is None else ir.convenience.get_const_tensor(x) for x in of_q[1:]]
    if of_q != of_k or any(table is None for table in tables):
        return None
    return (q_in, k_in), tuple(of_q)  # type: ignore[return-value]


def _by_row(nodes: Nodes, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
    """[B,H,N,D] -> [B,N,H*D], without nodes where the graph already contains it."""
    by_row: ir.Value
    transpose = x.producer()
    if transpose is None or transpose.op_type != "Transpose" or transpose.inputs[0] is None:
        by_row = nodes.add("Transpose", x, perm=[0, 2, 1, 3])
    else:
        by_row = transpose.inputs[0]
        reshape = by_row.producer()
        if reshape is not None and _target(reshape) == [0, 0, heads, head_dim]:
            assert reshape.inputs[0] is not None
            return reshape.inputs[0]
    flat: ir.Value = nodes.add("Reshape", by_row, nodes.ints([0, 0, -1]))
    return flat


def _target(reshape: ir.Node) -> list[int] | None:
    """Return the constant target of a Reshape, None for other nodes and other targets."""
    if reshape.op_type != "Reshape" or reshape.inputs[1] is None:
        return None
    tensor = ir.convenience.get_const_tensor(reshape.inputs[1])
    return None if tensor is None else [int(dim) for dim in tensor.numpy()]


def _joined(parts: list[ir.Value]) -> ir.Value | None:
    """Return the value of which `parts` are all pieces, in order; None if there is none."""
    split = parts[0].producer()
    if split is None or split.op_type != "Split" or list(split.outputs) != parts:
        return None
    return split.inputs[0]


def _with_extra_row(nodes: Nodes, x: ir.Value) -> ir.Value:
    """Return x [B,N,..] with the extra row of a call of one row, a copy of the first."""
    extra = nodes.add("Slice", x, nodes.ints([0]), nodes.once["extra"], nodes.ints([1]))
    return nodes.add("Concat", x, extra, axis=1)  # type: ignore[no-any-return]


def _drop_flattening(by_head: ir.Value, by_row: ir.Value, width: int) -> None:
    """Let the Reshapes of by_head [B,N,H,D] to [B,N,H*D] be `by_row` itself."""
    for user, _ in list(by_head.uses()):
        if _target(user) in ([0, 0, width], [0, 0, -1]):
            user.outputs[0].replace_all_uses_with(by_row)


def _write_row_counts(
    nodes: Nodes, bias: ir.Value, past_len: ir.Value | None, total_len: ir.Value | None
) -> None:
    """Write what all layers share: rows N, extra rows (1 for one row of one sequence), last slot,
    length.

    Several sequences get no extra row: GroupQueryAttention accepts them with one row each, or not
    at all.
    """
    nodes.once["rows"] = nodes.add("Shape", bias, start=2, end=3)
    calls = nodes.add("Mul", nodes.once["rows"], nodes.add("Shape", bias, start=0, end=1))
    single = nodes.add("Equal", calls, nodes.ints([1]))
    nodes.once["extra"] = nodes.add("Cast", single, to=ir.DataType.INT64)
    written = nodes.add("Add", nodes.once["rows"], nodes.once["extra"])
    last_slot = nodes.add("Sub", nodes.add("Add", past_len, written), nodes.ints([1]))
    nodes.once["last_slot"] = nodes.add("Cast", last_slot, to=ir.DataType.INT32)
    extra = nodes.add("Squeeze", nodes.once["extra"])
    length = nodes.add("Add", total_len, extra)
    nodes.once["total_len"] = nodes.add("Cast", length, to=ir.DataType.INT32)


def _scatter_attention(nodes: Nodes, placeholder: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`TensorScatter` and `Attention` of opset 24: standard ONNX, which reads the whole cache."""
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
    """Attention [B,Hq,N,D] over presents [B,Hkv,S,D] in single steps, for softcaps and sinks.

    The Attention operator has no sinks, and TensorRT refuses its softcap. Heads that share keys
    are folded into rows, so that keys are not repeated. softmax runs in float32.
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
    """Return the probabilities of scores + bias [B,Hq,N,S]. sinks [Hq] are an extra column, which
    is dropped.

    The column takes its shape from the bias, which is finite: 0 times a score of -inf would be
    NaN.
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
    """Replace every placeholder by the lowering's nodes, and add the presents to the outputs.

    The presents follow the other outputs: present_k.0 ..., then present_v.0 ... Returns the number
    of lowered layers.
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


def _inputs(placeholder: ir.Node) -> list[ir.Value | None]:
    """Return the placeholder's nine inputs; an absent last one is None."""
    inputs = list(placeholder.inputs)
    return inputs + [None] * (9 - len(inputs))


def _sizes(placeholder: ir.Node) -> list[int]:
    """Return heads, kv_heads and head_dim."""
    return [placeholder.attributes[name].as_int() for name in ("heads", "kv_heads", "head_dim")]
