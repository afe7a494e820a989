"""Joins products of the same rows: q, k and v of a layer become one product, gate and up another.

One product reads its rows once, and is one call of a kernel instead of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle3.export.graphs.weights import initializer

JOINED = "+"
"""Between the names of joined weights, in the name of their initializer."""


def join_products(model: ir.Model) -> int:
    """Join the MatMuls of one value x [..,K] with different weights [K,Mi] into one MatMul and one
    Split. In place; returns the number of joined products.

    The weights must be laid out already (`store_for_matmul`). Biases are joined if all products
    have one. Products that choose experts stay alone.
    """
    groups: dict[tuple[int, ir.DataType | None], list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type == "MatMul" and node.inputs[0] is not None and _own_weight(node):
            weight = node.inputs[1]
            assert weight is not None
            groups.setdefault((id(node.inputs[0]), weight.dtype), []).append(node)
    joined = [each for each in groups.values() if len(each) > 1]
    for products in joined:
        _join(model, products)
    return len(joined)


def _own_weight(product: ir.Node) -> bool:
    """Return whether a MatMul has a constant matrix that nothing else reads, and chooses no
    experts.
    """
    weight = product.inputs[1]
    return (
        weight is not None
        and weight.is_initializer()
        and weight.const_value is not None
        and len(weight.const_value.shape) == 2
        and len(list(weight.uses())) == 1
        and not chooses_experts(product)
    )


def chooses_experts(product: ir.Node) -> bool:
    """Return whether a top-k reads the product: it is the router of a mixture of experts."""
    seen: set[ir.Node] = set()
    waiting = [product]
    while waiting:
        for value in waiting.pop().outputs:
            for node in value.consumers():
                if node.op_type == "TopK":
                    return True
                if node not in seen and node.op_type in _OF_ROUTERS:
                    seen.add(node)
                    waiting.append(node)
    return False


# What can be between the product of a router and its top-k.
_OF_ROUTERS = frozenset(
    ("Add", "Cast", "Clip", "Div", "Exp", "Identity", "Mul", "Reshape", "Sigmoid", "Softmax")
    + ("Softplus", "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where")
)


def _join(model: ir.Model, products: Sequence[ir.Node]) -> None:
    ends = [_end(product) for product in products]
    biases = [end.inputs[1] for end in ends] if all(e.op_type == "Add" for e in ends) else []
    if not biases:
        ends = list(products)
    weights = [product.inputs[1] for product in products]
    x = products[0].inputs[0]
    nodes = [ir.node("MatMul", [x, _side_by_side(model, weights)])]
    if biases:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], _side_by_side(model, biases)]))
    sizes = ir.tensor([_width(weight) for weight in weights], dtype=ir.DataType.INT64)
    nodes.append(ir.node("Constant", [], {"value": sizes}))
    inputs = [nodes[-2].outputs[0], nodes[-1].outputs[0]]
    nodes.append(ir.node("Split", inputs, {"axis": -1}, num_outputs=len(products)))
    old, new = [end.outputs[0] for end in ends], list(nodes[-1].outputs)
    for before, after in zip(old, new, strict=True):
        after.shape, after.type = before.shape, before.type
    gone = [*products, *(end for end in ends if end not in products)]
    ir.convenience.replace_nodes_and_values(model.graph, products[0], gone, nodes, old, new)
    for value in {*weights, *biases}:
        if value is not None and not list(value.uses()):
            model.graph.initializers.pop(str(value.name))


def _end(product: ir.Node) -> ir.Node:
    """Return the Add of a product's bias, or the product itself if it has none."""
    users = list(product.outputs[0].consumers())
    if len(users) == 1 and users[0].op_type == "Add":
        first, bias = users[0].inputs
        tensor = None if bias is None or not bias.is_initializer() else bias.const_value
        if first is product.outputs[0] and tensor is not None and len(tensor.shape) == 1:
            return users[0]
    return product


def _width(weight: ir.Value | None) -> int:
    assert weight is not None and weight.const_value is not None
    return int(weight.const_value.shape.numpy()[-1])


def _side_by_side(model: ir.Model, parts: Sequence[ir.Value | None]) -> ir.Value:
    """Return an initializer that contains `parts` along their last dimension."""
    tensors = [part.const_value for part in parts if part is not None]
    names = [str(part.name) for part in parts if part is not None]
    first = tensors[0]
    assert first is not None

    def read() -> ir.Tensor[Any]:
        arrays = [tensor.numpy() for tensor in tensors if tensor is not None]
        return ir.Tensor(np.concatenate(arrays, axis=-1), dtype=first.dtype)

    shape = [*first.shape.numpy()[:-1], sum(map(_width, parts))]
    return initializer(model, JOINED.join(names), shape, first.dtype, read)
