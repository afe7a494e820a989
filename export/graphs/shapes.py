"""Removes shape computations that a traced graph does not need, and that no device can run.

PyTorch computes the target of every view from the shape of an input. A GPU library runs that on
the host, which a CUDA graph cannot contain, although a constant describes the same view.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

_COPIED, _INFERRED, _BATCH = 0, -1, -2  # the first two have the meaning that Reshape gives them


def fix_shapes(model: ir.Model) -> None:
    """Give every Reshape a constant target if its dimensions are numbers, those of its input, or
    at most one other. Drop every Expand that a MatMul or a gather of rows performs by itself. In
    place.

    A Reshape to the batch, one other dimension and numbers reads only the batch, which is also a
    constant when an engine is loaded for one sequence. It needs the shapes that the trace left on
    values; nodes without them stay unchanged.
    """
    targets = _Targets(model.graph)
    for node in list(model.graph):
        if node.op_type == "Reshape":
            targets.fix(node)
        elif node.op_type == "Expand":
            _drop_expand(node)
        elif node.op_type == "GatherElements":
            _gather_rows(model.graph, node)
    RemoveUnusedNodesPass()(model)


class _Targets:
    """The targets of a graph's Reshapes, each created once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._batch = next(iter(_dims(graph.inputs[0])), None)
        self._made: dict[tuple[int, ...], ir.Value] = {}

    def fix(self, node: ir.Node) -> None:
        """Give a Reshape a constant target, if its shapes allow it."""
        source, target = node.inputs
        dims = self._dims(source, node.outputs[0])
        if target is None or target.const_value is not None or dims is None:
            return
        if dims not in self._made:
            nodes = batch_target(self._graph, dims[1:]) if dims[0] == _BATCH else [constant(dims)]
            self._graph.insert_before(node, nodes)
            self._made[dims] = nodes[-1].outputs[0]
        node.replace_input_with(1, self._made[dims])
        node.attributes.pop("allowzero", None)  # here a 0 copies the dimension of the input

    def _dims(self, source: ir.Value | None, result: ir.Value) -> tuple[int, ...] | None:
        """Return numbers that make `source` the shape of `result` for any value of its symbols, or
        None.
        """
        old, new = _dims(source), _dims(result)
        dims = [
            dim if isinstance(dim, int) else _COPIED if old[i : i + 1] == [dim] else _INFERRED
            for i, dim in enumerate(new)
        ]
        if dims.count(_INFERRED) == 2 and new[0] == self._batch:
            dims[0] = _BATCH
        if not old or not new or 0 in new or dims.count(_INFERRED) > 1:
            return None
        return tuple(dims)


def constant(values: Sequence[int]) -> ir.Node:
    """Return an int64 Constant."""
    return ir.node("Constant", [], {"value": ir.tensor([*values], dtype=ir.DataType.INT64)})


def batch_target(graph: ir.Graph, rest: Sequence[int]) -> list[ir.Node]:
    """Return nodes of which the last outputs [B, *rest]. The graph's first input is [B,..].

    B is read from an input [B] if there is one, because ONNX Runtime folds a Shape only if all of
    it is known, which is then the case in a graph for one sequence.
    """
    inputs = list(graph.inputs)
    source = next((x for x in inputs if _dims(x) == _dims(inputs[0])[:1]), inputs[0])
    batch = ir.node("Shape", [source], {"start": 0, "end": 1})
    others = constant(rest)
    joined = ir.node("Concat", [batch.outputs[0], others.outputs[0]], {"axis": 0})
    return [batch, others, joined]


def _gather_rows(graph: ir.Graph, node: ir.Node) -> None:
    """Let GatherND read rows [B,M,1] of x [B,N,d] directly, instead of expanded to [B,M,d]."""
    source, index = node.inputs
    expand = None if index is None else index.producer()
    if source is None or expand is None or expand.op_type != "Expand":
        return
    rows = expand.inputs[0]
    x, few, many = (_dims(value) for value in (source, rows, index))
    by_row = "axis" in node.attributes and node.attributes["axis"].as_int() == 1
    if by_row and len(x) == 3 and few == [x[0], *few[1:2], 1] and many == [*few[:2], x[2]]:
        gather = ir.node("GatherND", [source, rows], {"batch_dims": 1})
        out = gather.outputs[0]
        out.shape, out.type = node.outputs[0].shape, node.outputs[0].type
        old, new = list(node.outputs), [out]
        ir.convenience.replace_nodes_and_values(graph, node, [node], [gather], old, new)


def _drop_expand(node: ir.Node) -> None:
    source, result = node.inputs[0], node.outputs[0]
    if source is not None and all(
        user.op_type == "MatMul"
        and user.inputs[1 - index] is not result
        and _broadcasts(source, result, user.inputs[1 - index])
        for user, index in result.uses()
    ):
        for user, index in list(result.uses()):
            user.replace_input_with(index, source)


def _broadcasts(source: ir.Value, expanded: ir.Value, other: ir.Value | None) -> bool:
    """Return whether a MatMul with `other` has the same result for `source` [..,a,b] as for
    `expanded`: `other` has every dimension that the expansion adds.
    """
    old, new, theirs = (_dims(value) for value in (source, expanded, other))
    same_rank = 2 < len(old) == len(new) == len(theirs)
    return same_rank and old[-2:] == new[-2:] and theirs[:-2] == new[:-2]


def _dims(value: ir.Value | None) -> list[int | ir.SymbolicDim]:
    """Return the shape; [] if it is not completely known, since unnamed dimensions can differ."""
    dims = [] if value is None or value.shape is None else list(value.shape)
    return [] if any(isinstance(d, ir.SymbolicDim) and d.value is None for d in dims) else dims
