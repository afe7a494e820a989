"""Views, gathers and expansions of a traced graph that need no shape when it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from eagle3.export.graphs import attention, lowerings
from eagle3.export.graphs import tracer as onnx_graph
from eagle3.export.graphs.attention import key_window
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.shapes import fix_shapes
from eagle3.export.graphs.tracer import trace
from eagle3.export.graphs.weights import store_for_matmul


class Views(nn.Module):
    """Splits heads, joins them, folds rows into sequences."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, _ = x.shape
        heads = x.view(batch, rows, 2, -1).transpose(1, 2)
        return heads.transpose(1, 2).reshape(batch, rows, 8), x.view(batch, rows * 8)


class Rows(nn.Module):
    """Picks rows, as before lm_head."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[-1]))


class Turns(nn.Module):
    """RoPE's angles: frequencies, expanded to the batch, times positions."""

    def forward(self, positions: Tensor) -> Tensor:
        rates = torch.arange(1.0, 4.0)[None, :, None].expand(positions.shape[0], -1, 1)
        return (rates @ positions[:, None, :].float()).transpose(1, 2)


class Sums(nn.Module):
    """An expansion that something other than a MatMul reads: it stays."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, x.shape[1], -1).cumsum(1)


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[3, 0, 3], [4, 4, 1]])
CASES: dict[str, tuple[nn.Module, dict[str, tuple[Any, str]], dict[str, int]]] = {
    "views": (Views(), {"x": (X, "B N 8")}, {"Shape": 0, "Reshape": 3}),
    "rows": (Rows(), {"x": (X, "B N 8"), "rows": (INDEX, "B M")}, {"Shape": 0, "GatherND": 1}),
    "turns": (Turns(), {"p": (INDEX, "B M")}, {"Shape": 0, "Expand": 0, "MatMul": 1}),
    "sums": (Sums(), {"x": (X, "B N 8")}, {"Expand": 1}),
}


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    data = ir.serde.serialize_model(model).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_the_graph_says_the_same_without_shapes(name: str) -> None:
    module, inputs, expected = CASES[name]
    outputs = ["y", "z"] if name == "views" else ["y"]
    model = trace(module, inputs, outputs, LOWERINGS["portable"], name)
    counts = [node.op_type for node in model.graph]
    assert {op: counts.count(op) for op in expected} == expected
    for size in (0, 1):  # other sizes than it was traced with
        args = [value[:, : value.shape[1] - size].contiguous() for value, _ in inputs.values()]
        if name == "rows":
            args[1] = args[1].clamp(max=args[0].shape[1] - 1)
        found = run(model, {k: a.numpy() for k, a in zip(inputs, args, strict=True)})
        wanted = module(*args)
        for mine, theirs in zip(found, wanted if name == "views" else [wanted], strict=True):
            np.testing.assert_array_equal(mine, theirs.numpy())


def test_without_it_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the numbers above are held against."""
    monkeypatch.setattr(onnx_graph, "fix_shapes", lambda model: None)
    for name in ("views", "turns"):
        module, inputs, _ = CASES[name]
        outputs = ["y", "z"] if name == "views" else ["y"]
        model = trace(module, inputs, outputs, LOWERINGS["portable"], name)
        assert "Shape" in [node.op_type for node in model.graph]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_window_of_tree_rows_stands_where_its_slots_are(rows: int) -> None:
    """By the definition: slot c is the prefix, window row c - first, or nobody's."""
    batch, window, slots = 2, 4, 12
    generator = np.random.default_rng(1)
    mask = generator.random((batch, rows, window)) < 0.5
    positions = generator.integers(5, 9, (batch, window))
    past = np.array([5, 7])
    found = key_window(
        torch.tensor(mask),
        torch.zeros((batch, rows), dtype=torch.int64),
        torch.tensor(past),
        slots,
        torch.tensor(positions),
    )
    for b in range(batch):
        first = past[b] + rows - window
        for c in range(slots):
            w = c - first
            seen = [c < first or (0 <= w < window and bool(mask[b, i, w])) for i in range(rows)]
            assert found.visible[b, 0, :, c].tolist() == seen
            if w < window:
                stands = c if w < 0 else positions[b, w]
                assert found.key_positions[b, 0, 0, c] == stands


def test_a_sink_stays_beside_a_score_of_minus_infinity() -> None:
    """As float16 gives it where q k^T overflows: such a slot has no weight, and the others have."""
    nodes, kind = attention.Nodes({}), ir.DataType.FLOAT
    scores, bias, sinks, probs = (
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        for name, shape in (
            ("scores", [1, 2, "N", 3]),
            ("bias", [1, 1, "N", 3]),
            ("sinks", [2]),
            ("probs", [1, 2, "N", 3]),
        )
    )
    out = lowerings._softmax(nodes, scores, bias, sinks, kind)
    out.name, out.type, out.shape = probs.name, probs.type, probs.shape
    inputs = [scores, bias, sinks]
    graph = ir.Graph(inputs, [out], nodes=nodes.nodes, opset_imports={"": 24}, name="sinks")
    feeds = [np.zeros((1, 2, 1, 3)), np.zeros((1, 1, 1, 3)), np.zeros(2)]
    feeds[0][0, 0, 0, 0] = -np.inf
    arrays = {v.name: x.astype(np.float32) for v, x in zip(inputs, feeds, strict=True)}
    (found,) = run(ir.Model(graph, ir_version=10), arrays)  # type: ignore[arg-type]
    np.testing.assert_allclose(found[0, :, 0], [[0, 1 / 3, 1 / 3], [1 / 4] * 3], rtol=1e-6)


def test_dimensions_without_a_name_are_not_the_same() -> None:
    """[?,4] -> [?,2] need not keep its first dimension."""
    types = {"x": ir.DataType.FLOAT, "to": ir.DataType.INT64}
    x, to = (ir.Value(name=name, type=ir.TensorType(kind)) for name, kind in types.items())
    x.shape, to.shape = ir.Shape([None, 4]), ir.Shape([2])
    view = ir.node("Reshape", [x, to])
    (y,) = view.outputs
    y.name, y.shape, y.type = "y", ir.Shape([None, 2]), x.type
    graph = ir.Graph([x, to], [y], nodes=[view], opset_imports={"": 24}, name="views")
    model = ir.Model(graph, ir_version=10)
    fix_shapes(model)
    (found,) = run(model, {"x": np.zeros((3, 4), np.float32), "to": np.array([6, 2])})
    assert found.shape == (6, 2)


def test_a_tied_weight_of_rows_without_a_batch_is_left_to_matmul() -> None:
    """Its product is no [B,-1,V]."""
    kind = ir.DataType.FLOAT
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    weight = ir.Value(name="w", shape=ir.Shape([4, 3]), type=ir.TensorType(kind))
    weight.const_value = ir.tensor(table, name="w")
    ids = ir.Value(name="ids", shape=ir.Shape(["N"]), type=ir.TensorType(ir.DataType.INT64))
    rows = ir.node("Gather", [weight, ids], {"axis": 0})
    turned = ir.node("Transpose", [weight], {"perm": [1, 0]})
    x, turned_weight = rows.outputs[0], turned.outputs[0]
    x.shape, x.type = ir.Shape(["N", 3]), weight.type
    product = ir.node("MatMul", [x, turned_weight])
    (y,) = product.outputs
    y.name, y.shape, y.type = "y", ir.Shape(["N", 4]), weight.type
    graph = ir.Graph([ids], [y], nodes=[rows, turned, product], opset_imports={"": 24}, name="tied")
    graph.register_initializer(weight)
    model = ir.Model(graph, ir_version=10)
    store_for_matmul(model)
    (found,) = run(model, {"ids": np.array([2, 0])})
    np.testing.assert_array_equal(found, table[[2, 0]] @ table.T)
