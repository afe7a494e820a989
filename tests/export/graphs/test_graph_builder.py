"""Graphs that are written, and copies of other graphs in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from eagle3.export.graphs.graph_builder import GraphBuilder

WEIGHT = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)


def layer() -> ir.Model:
    """y = x W^T + b, z = 2 y; W has the very name that onnx_ir gives a value."""
    add = GraphBuilder("layer", {"": 21})
    x = add.input("x", ir.DataType.FLOAT, "N", 32)
    unused = add.input("unused", ir.DataType.FLOAT, "N", 32)
    weight = add._initializer(ir.tensor(WEIGHT, name="val_0"), "val_0")
    turned = add("Transpose", weight, perm=[1, 0])
    y = add("Add", add("MatMul", x, turned), np.ones(32, np.float32))
    add.output(y, "y", ir.DataType.FLOAT, "N", 32)
    add.output(add("Mul", y, 2.0), "z", ir.DataType.FLOAT, "N", 32)
    add.output(add("Add", unused, y), "other", ir.DataType.FLOAT, "N", 32)
    return add.model()


def run(model: ir.Model, **feeds: Any) -> Any:
    proto = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(proto).run(None, feeds)[0]


def test_copies_share_what_depends_on_weights_alone() -> None:
    """A layer set in twice: one weight, one Transpose of it, two products, nothing unasked for."""
    add, source = GraphBuilder("twice", {"": 21}), layer()
    x = add.input("x", ir.DataType.FLOAT, "N", 32)
    for _ in range(2):
        (x,) = add.copy(source, {"x": x}, ["y"], lambda *_: None)
    add.output(x, "y", ir.DataType.FLOAT, "N", 32)
    model = add.model()
    ops = [node.op_type for node in model.graph]
    assert ops == ["Transpose", "MatMul", "Add", "MatMul", "Add"]
    assert "val_0" in model.graph.initializers
    rows = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
    expected = (rows @ WEIGHT.T + 1) @ WEIGHT.T + 1
    np.testing.assert_allclose(run(model, x=rows), expected, rtol=1e-4, atol=1e-4)


def test_a_node_can_be_rewritten() -> None:
    add, source = GraphBuilder("other", {"": 21}), layer()
    x = add.input("x", ir.DataType.FLOAT, "N", 32)

    def without_product(node: ir.Node, resolve: Any) -> list[ir.Value] | None:
        return [resolve(node.inputs[0])] if node.op_type == "MatMul" else None

    (z,) = add.copy(source, {"x": x}, ["z"], without_product)
    add.output(z, "z", ir.DataType.FLOAT, "N", 32)
    rows = np.ones((2, 32), np.float32)
    assert np.array_equal(run(add.model(), x=rows), np.full((2, 32), 4, np.float32))


def test_equal_numbers_are_one_constant() -> None:
    add = GraphBuilder("constants", {"": 21})
    assert add.value(3) is add.value(np.array(3))
    assert add.value(3) is not add.value([3])
    assert add.value(3) is not add.value(3.0)
