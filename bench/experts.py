"""Ways to write a mixture of experts into a graph: milliseconds, and bits, by rows of a call.

    python bench/experts.py [--experts 8] [--per-row 2] [--hidden 1024] [--width 1792] [--threads 1]

One layer of experts with gated SiLU on ONNX Runtime's CPU kernels, random float32 weights and
routing. grouped: rows sorted by expert, one product an expert (what `ort` bundles hold); dense: all
experts on all rows (`portable`); gathered: weights picked for each row and choice; operator: ONNX
Runtime's `MoE`. Printed is the best of five runs for each number of rows, and the largest
difference between a row of that call and the same row alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import onnxruntime

from eagle3.export.graphs.attention import Nodes

ROWS = (1, 2, 6, 12, 16, 64)


class Experts:
    """Random weights [E,K,M], and a graph for each way to use them.

    Letters: R rows, k experts per row, E experts, d hidden, I width. Graph inputs: x [R,d], chosen
    [R,k] int64, weights [R,k]; output [R,d].
    """

    def __init__(self, num_experts: int, per_row: int, hidden: int, width: int) -> None:
        rng = np.random.default_rng(0)
        self.e, self.k, self.d, self.i = num_experts, per_row, hidden, width
        shapes = (num_experts, hidden, 2 * width), (num_experts, width, hidden)
        self.up, self.down = (
            (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32) for shape in shapes
        )

    def session(self, write: Callable[..., Any], threads: int) -> onnxruntime.InferenceSession:
        """write(nodes, constant, x, chosen, weights) -> the output value."""
        kinds = {"x": (ir.DataType.FLOAT, self.d), "chosen": (ir.DataType.INT64, self.k)}
        kinds["weights"] = (ir.DataType.FLOAT, self.k)
        inputs = [
            ir.Value(name=name, shape=ir.Shape(["R", n]), type=ir.TensorType(dtype))
            for name, (dtype, n) in kinds.items()
        ]
        nodes, constants = Nodes({}), []

        def constant(array: Any) -> ir.Value:
            tensor = ir.tensor(np.ascontiguousarray(array))
            name = f"c{len(constants)}"
            shape, kind = ir.Shape(tensor.shape), ir.TensorType(tensor.dtype)
            constants.append(ir.Value(name=name, shape=shape, type=kind, const_value=tensor))
            return constants[-1]

        out = write(nodes, constant, *inputs)
        out.type, out.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["R", self.d])
        opsets = {"": 21, "com.microsoft": 1}
        graph = ir.Graph(
            inputs, [out], nodes=nodes.nodes, initializers=constants, opset_imports=opsets
        )
        proto = ir.to_proto(ir.Model(graph, ir_version=10))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), options, ["CPUExecutionProvider"]
        )

    def gated(self, nodes: Nodes, product: Any) -> Any:
        gate, up = nodes.add("Split", product, outputs=2, axis=-1, num_outputs=2)
        return nodes.add("Mul", nodes.add("Mul", gate, nodes.add("Sigmoid", gate)), up)

    def routing(self, nodes: Nodes, chosen: Any, weights: Any) -> Any:
        """[R,E]"""
        shape = nodes.add("Concat", nodes.add("Shape", chosen, end=1), nodes.ints([self.e]), axis=0)
        return nodes.add(
            "ScatterElements", nodes.add("ConstantOfShape", shape), chosen, weights, axis=1
        )

    def grouped(self, nodes: Nodes, constant: Any, x: Any, chosen: Any, weights: Any) -> Any:
        flat = nodes.add("Reshape", chosen, nodes.ints([-1]))
        size = nodes.add("Shape", flat)
        by_expert, order = nodes.add("TopK", flat, size, outputs=2, axis=0, largest=0)
        same = nodes.add(
            "Equal", nodes.add("Unsqueeze", by_expert, nodes.ints([1])), constant(np.arange(self.e))
        )
        ones = nodes.add("Cast", same, to=ir.DataType.INT64)
        counts = nodes.add("ReduceSum", ones, nodes.ints([0]), keepdims=0)

        def product(rows: Any, matrices: Any) -> Any:
            parts = nodes.add("Split", rows, counts, outputs=self.e, axis=0)
            each = [
                nodes.add("MatMul", part, constant(matrix))
                for part, matrix in zip(parts, matrices, strict=True)
            ]
            return nodes.add("Concat", *each, axis=0)

        rows = nodes.add("Gather", x, nodes.add("Div", order, nodes.ints([self.k])))
        out = product(self.gated(nodes, product(rows, self.up)), self.down)
        _, back = nodes.add("TopK", order, size, outputs=2, axis=0, largest=0)
        return self.weighted(nodes, nodes.add("Gather", out, back), weights)

    def weighted(self, nodes: Nodes, out: Any, weights: Any) -> Any:
        """[R*k,d] -> [R,d]"""
        each = nodes.add("Reshape", out, nodes.ints([-1, self.k, self.d]))
        each = nodes.add("Mul", each, nodes.add("Unsqueeze", weights, nodes.ints([-1])))
        return nodes.add("ReduceSum", each, nodes.ints([1]), keepdims=0)

    def dense(self, nodes: Nodes, constant: Any, x: Any, chosen: Any, weights: Any) -> Any:
        inner = self.gated(nodes, nodes.add("MatMul", x, constant(self.up)))
        out = nodes.add("MatMul", inner, constant(self.down))
        routing = nodes.add("Transpose", self.routing(nodes, chosen, weights), perm=[1, 0])
        out = nodes.add("Mul", out, nodes.add("Unsqueeze", routing, nodes.ints([-1])))
        return nodes.add("ReduceSum", out, nodes.ints([0]), keepdims=0)

    def gathered(self, nodes: Nodes, constant: Any, x: Any, chosen: Any, weights: Any) -> Any:
        flat = nodes.add("Reshape", chosen, nodes.ints([-1]))
        rows = nodes.add(
            "Expand", nodes.add("Unsqueeze", x, nodes.ints([1])), nodes.ints([1, self.k, 1])
        )
        rows = nodes.add("Reshape", rows, nodes.ints([-1, 1, self.d]))
        inner = self.gated(
            nodes, nodes.add("MatMul", rows, nodes.add("Gather", constant(self.up), flat))
        )
        out = nodes.add("MatMul", inner, nodes.add("Gather", constant(self.down), flat))
        return self.weighted(nodes, out, weights)

    def operator(self, nodes: Nodes, constant: Any, x: Any, chosen: Any, weights: Any) -> Any:
        """A logarithm cancels the operator's softmax, because the weights are already
        normalized.
        """
        logs = nodes.add("Log", self.routing(nodes, chosen, weights))
        logs = nodes.add("Max", logs, constant(np.float32(-1e4)))
        gates = self.up.transpose(0, 2, 1).reshape(self.e, 2, self.i, self.d).transpose(0, 2, 1, 3)
        up = constant(gates.reshape(self.e, 2 * self.i, self.d))
        down = constant(self.down.transpose(0, 2, 1))
        return nodes.add(
            "com.microsoft::MoE", x, logs, up, None, down, None,
            k=self.k, activation_type="swiglu", swiglu_fusion=1, normalize_routing_weights=1,
            activation_alpha=1.0, activation_beta=0.0,
        )  # fmt: skip

    def inputs(self, rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(rows)
        weights = rng.random((rows, self.k)).astype(np.float32)
        return {
            "x": rng.standard_normal((rows, self.d)).astype(np.float32),
            "chosen": np.stack([rng.permutation(self.e)[: self.k] for _ in range(rows)]),
            "weights": weights / weights.sum(1, keepdims=True),
        }


def best_ms(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def alone(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> np.ndarray:
    rows = range(len(feeds["x"]))
    each = [session.run(None, {n: v[i : i + 1] for n, v in feeds.items()})[0] for i in rows]
    return np.concatenate(each)


@click.command(help=__doc__)
@click.option("--experts", default=8)
@click.option("--per-row", default=2)
@click.option("--hidden", default=1024)
@click.option("--width", default=1792)
@click.option("--threads", default=1)
def main(experts: int, per_row: int, hidden: int, width: int, threads: int) -> None:
    layer = Experts(experts, per_row, hidden, width)
    expected = None
    for write in (layer.grouped, layer.dense, layer.gathered, layer.operator):
        session = layer.session(write, threads)
        cells = []
        for rows in ROWS:
            feeds = layer.inputs(rows)
            ms, out = best_ms(session, feeds), session.run(None, feeds)[0]
            cells.append(f"{rows}: {ms:.1f} ({np.abs(out - alone(session, feeds)).max():.0e})")
        expected = out if expected is None else expected
        assert np.abs(out - expected).max() < 1e-4, "the ways disagree"
        click.echo(f"{write.__name__:9} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
