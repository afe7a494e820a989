"""Fusion of norms, residual sums and rotary embeddings into fewer, larger nodes.

transformers writes a decoder layer as dozens of small operations. On a CPU a call of one token
spends a tenth of its time between them, and on a GPU each is a kernel. onnxscript finds the
patterns; whatever it does not find stays unchanged, so fusion cannot change what an architecture
computes.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.rotary_embedding import fuse_rotary_embedding
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization

from eagle3.export.graphs.rotary_tables import rotary_tables

_NORM = "SimplifiedLayerNormalization"
_FUSED_ROTARY = ("ai.onnxruntime._fusion", "RotaryEmbedding")


def fuse_for_ort(model: ir.Model) -> None:
    """Fuse in place. It needs the shapes of intermediate values, so it runs right after
    the trace.
    """
    fuse_rms_normalization(model)
    if all(_of_one_dtype(node) for node in model.graph if node.op_type.endswith(_NORM)):
        fuse_skip_rms_normalization(model)
    _fuse_rotary(model, _MicrosoftRotary)


def fuse_standard(model: ir.Model) -> None:
    """Like `fuse_for_ort`, but into standard ONNX operators, which every engine supports.

    Norms stay as single steps but divide by the root, a form that ONNX Runtime fuses when it loads
    the graph.
    """
    _fuse_rotary(model, _StandardRotary)
    for node in [n for n in model.graph if n.op_type == "Reciprocal"]:
        root, inverse = node.inputs[0], node.outputs[0]
        source = None if root is None else root.producer()
        if source is None or source.op_type != "Sqrt":
            continue
        for user, index in list(inverse.uses()):
            if user.op_type == "Mul" and user.inputs[1 - index] is not inverse:
                _divide(model, user, [user.inputs[1 - index], root])


def _divide(model: ir.Model, product: ir.Node, operands: list[ir.Value | None]) -> None:
    quotient = ir.node("Div", operands)
    old, new = product.outputs[0], quotient.outputs[0]
    new.shape, new.type = old.shape, old.type
    ir.convenience.replace_nodes_and_values(
        model.graph, product, [product], [quotient], [old], [new]
    )


def _fuse_rotary(
    model: ir.Model, tables_of: type[_MicrosoftRotary] | type[_StandardRotary]
) -> None:
    fuse_rotary_embedding(model)
    tables: dict[tuple[str | None, ...], _MicrosoftRotary | _StandardRotary] = {}
    for node in [n for n in model.graph if (n.domain, n.op_type) == _FUSED_ROTARY]:
        x, cos, sin = node.inputs
        assert x is not None and cos is not None and sin is not None
        key = (cos.name, sin.name)
        if key not in tables:
            tables[key] = tables_of(model, node, cos, sin)
        rotary = tables[key].node(x)
        old, new = node.outputs[0], rotary.outputs[0]
        new.shape, new.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [rotary], [old], [new])
    model.functions.clear()
    model.opset_imports.pop(_FUSED_ROTARY[0], None)


def _of_one_dtype(norm: ir.Node) -> bool:
    """Return whether a norm's scale has the input's dtype, which the operator with a residual
    requires. In float16 models, the scales of Gemma and GPT-OSS are float32.
    """
    x, scale = norm.inputs[:2]
    return x is not None and scale is not None and x.dtype == scale.dtype


class _StandardRotary:
    """ONNX's RotaryEmbedding. The cos and sin of the rows, [B,N,D/2], are computed once, before
    the first node that uses them.
    """

    def __init__(self, model: ir.Model, before: ir.Node, cos: ir.Value, sin: ir.Value) -> None:
        nodes: list[ir.Node] = []
        assert cos.shape is not None and isinstance(cos.shape[-1], int)
        bounds = [_constant(nodes, [value]) for value in (0, cos.shape[-1] // 2, -1)]
        axis = _constant(nodes, [1])
        self._tables = []
        for table in (cos, sin):  # [B,1,N,D], both halves equal
            nodes.append(ir.node("Slice", [table, *bounds]))
            nodes.append(ir.node("Squeeze", [nodes[-1].outputs[0], axis]))
            self._tables.append(nodes[-1].outputs[0])
        model.graph.insert_before(before, nodes)

    def node(self, x: ir.Value) -> ir.Node:
        """Return the node for x [B,H,N,D]."""
        return ir.node("RotaryEmbedding", [x, *self._tables])


class _MicrosoftRotary:
    """ONNX Runtime's own operator, over tables cos and sin of which each row reads one.

    If the angles depend on positions alone, the tables are constants [S,D/2], one row per position
    of the cache. Otherwise they are computed once per call, before the first node that uses them:
    [B*N,D/2], one row per row of the call.
    """

    def __init__(self, model: ir.Model, before: ir.Node, cos: ir.Value, sin: ir.Value) -> None:
        stored = rotary_tables(model, before, cos, sin)
        if stored is None:
            self._rows, self._cos, self._sin = _tables_of_rows(model, before, cos, sin)
        else:
            self._rows, self._cos, self._sin = stored

    def node(self, x: ir.Value) -> ir.Node:
        """Return the node for x [B,H,N,D]."""
        inputs = [x, self._rows, self._cos, self._sin]
        return ir.node("RotaryEmbedding", inputs, {"interleaved": 0}, domain="com.microsoft")


def _tables_of_rows(
    model: ir.Model, before: ir.Node, cos: ir.Value, sin: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return row numbers [B,N], and cos and sin [B*N,D/2] of a call's rows."""
    nodes: list[ir.Node] = []

    def add(op: str, *inputs: Any, **attributes: Any) -> ir.Value:
        values = [_constant(nodes, x) if isinstance(x, list) else x for x in inputs]
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    assert cos.shape is not None and isinstance(cos.shape[-1], int)
    half = cos.shape[-1] // 2
    tables = [
        add("Reshape", add("Slice", table, [0], [half], [-1]), [-1, half]) for table in (cos, sin)
    ]
    # [B,1,N,D] -> [B,N], counted from 0: the number of rows before each one.
    shape = add("Gather", add("Shape", cos), [0, 2])
    ones = add("Expand", [1], add("Reshape", add("ReduceProd", shape), [1]))
    count = add("Sub", add("CumSum", ones, add("Squeeze", [0])), [1])
    rows = add("Reshape", count, shape)
    model.graph.insert_before(before, nodes)
    return rows, tables[0], tables[1]


def _constant(nodes: list[ir.Node], values: list[int]) -> ir.Value:
    tensor = ir.tensor(values, dtype=ir.DataType.INT64)
    nodes.append(ir.node("Constant", [], {"value": tensor}))
    return nodes[-1].outputs[0]
