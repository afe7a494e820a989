"""Writes the products of a graph as products of integers (`columns.py` has the numbers).

One input, rotated and quantized once, serves all of its products. Letters: x [..,K] is the input of
a product, weight [K,N].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle3.export.graphs.joined_products import JOINED, chooses_experts
from eagle3.export.graphs.weights import INT8, SCALE, embedding_name, initializer
from eagle3.export.int8.columns import LARGEST, Int8Rows, hadamard, int8_rows, rotation_block
from eagle3.runtime.errors import ExportError

_ZERO_POINT = 128
_HADAMARD = "hadamard_"


Rounded = Callable[[str], Int8Rows | None]
"""Returns the rounded weight [N,K] of a name; None: round it to the nearest."""


def quantize_products(model: ir.Model, rounded: Rounded = lambda _: None) -> None:
    """Store the weights of all products, and the embedding, as int8. In place.

    The lm_head and an embedding that is tied to it are stored once. Routers of experts stay as
    they are, because their result is a choice.
    """
    writer = _Writer(model, rounded)
    for node in list(model.graph):
        if node.op_type == "Split" and _splits_experts(node):
            writer.experts(node)
    for node in list(model.graph):
        if node.op_type in ("MatMul", "Gemm") and _can_quantize(node):
            writer.product(node)
    for node in list(model.graph):
        if node.op_type == "Gather" and _is_matrix(node.inputs[0]):
            writer.lookup(node)
    writer.guard_logits()
    writer.drop_unused()


def unquantized_names(model: ir.Model) -> list[str]:
    """Return the names of the constant float32 matrices of a graph's products."""
    products = [n for n in model.graph if n.op_type in ("MatMul", "Gemm")]
    names = {str(n.inputs[1].name) for n in products if _is_matrix(n.inputs[1])}  # type: ignore[union-attr]
    return sorted(name for name in names if not name.startswith(_HADAMARD))


def quantize_lookups(model: ir.Model, name: str, target: ir.Model) -> None:
    """Let every lookup in the embedding `name` read int8 values, as those of the graph `target` do.
    In place.

    The initializers `name`.int8 and `name`.scale of the result equal those of `target`.
    """
    table = target.graph.initializers[embedding_name(target)]
    writer = _Writer(model)
    is_tied = any(user.op_type != "Gather" for user in table.consumers())
    for node in list(model.graph):
        if node.op_type == "Gather" and node.inputs[0] is model.graph.initializers.get(name):
            writer.lookup(node, is_tied=is_tied)
    writer.drop_unused()


def _is_matrix(value: ir.Value | None) -> bool:
    return (
        value is not None
        and value.is_initializer()
        and value.const_value is not None
        and len(value.const_value.shape) == 2
        and value.const_value.dtype == ir.DataType.FLOAT
    )


def _can_quantize(product: ir.Node) -> bool:
    x, weight = product.inputs[:2]
    if not _is_matrix(weight) or x is None or x.shape is None or chooses_experts(product):
        return False
    attributes = product.attributes
    plain = all(
        name not in attributes or attributes[name].as_float() == 1.0 for name in ("alpha", "beta")
    )
    return plain and not _flag(product, "transA")


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _splits_experts(split: ir.Node) -> bool:
    """Return whether the rows of a Split go to one product each, whose results are joined."""
    ends: set[ir.Node] = set()
    for out in split.outputs:
        users = list(out.consumers())
        if len(users) != 1 or users[0].op_type != "MatMul" or not _is_matrix(users[0].inputs[1]):
            return False
        ends.update(users[0].outputs[0].consumers())
    return len(ends) == 1 and ends.pop().op_type == "Concat"


@dataclass(frozen=True)
class _Rows:
    """A quantized input: uint8 values with zero point 128, and a scale [..,1] for each row."""

    values: ir.Value
    scales: ir.Value


class _Writer:
    """Replaces nodes of a graph. What several nodes read is written once."""

    def __init__(self, model: ir.Model, rounded: Rounded = lambda _: None) -> None:
        self._model, self._rounded = model, rounded
        self._rows: dict[ir.Value, _Rows] = {}
        self._zero_points: dict[tuple[Any, ...], ir.Value] = {}
        self._constants: dict[str, ir.Value] = {}

    def product(self, node: ir.Node) -> None:
        """Replace x @ weight, or the Gemm of x and the transposed weight, with or without bias."""
        x, weight, *bias = node.inputs
        assert x is not None and weight is not None
        nodes = _Nodes(self._model)
        rows = self._quantized(nodes, x)
        out = self._integer_product(nodes, rows.values, weight, _flag(node, "transB"))
        out = nodes.add("Mul", out, rows.scales)
        if bias and bias[0] is not None:
            out = nodes.add("Add", out, bias[0])
        nodes.replace(node, out)

    def experts(self, split: ir.Node) -> None:
        """Quantize the rows of all experts before they are split, and scale them after they are
        joined.
        """
        x, counts = split.inputs
        assert x is not None
        if x.shape is None:
            x.shape = ir.Shape([None, None])
        products = [next(iter(out.consumers())) for out in split.outputs]
        joined = next(iter(products[0].outputs[0].consumers()))
        nodes = _Nodes(self._model)
        rows = self._quantized(nodes, x, depth=products[0].inputs[1].const_value.shape[0])  # type: ignore[union-attr, arg-type]
        parts = nodes.add("Split", rows.values, counts, outputs=len(products), axis=0)
        outs = [
            self._integer_product(nodes, part, product.inputs[1], False)  # type: ignore[arg-type]
            for part, product in zip(parts, products, strict=True)
        ]
        out = nodes.add("Mul", nodes.add("Concat", *outs, axis=0), rows.scales)
        nodes.replace(joined, out)
        self._model.graph.remove([*products, split], safe=True)

    def lookup(self, node: ir.Node, is_tied: bool | None = None) -> None:
        """Replace the rows that a Gather reads from an embedding [V,K].

        is_tied: the table is stored as a product reads it, rotated and [K,V]; by default it is if
        a product of this graph reads it.
        """
        table, ids = node.inputs
        assert table is not None and table.const_value is not None and ids is not None
        name, depth = str(table.name), int(table.const_value.shape[1])  # type: ignore[arg-type]
        known = self._model.graph.initializers
        if is_tied is None:
            is_tied = name + INT8 in known
        nodes = _Nodes(self._model)
        values, scales = self._stored(table, rotate=is_tied, by_column=is_tied)
        if is_tied:
            columns = nodes.add("Gather", values, ids, axis=1)  # [K,B,N]
            rows = nodes.add("Transpose", columns, perm=[1, 2, 0])
        else:
            rows = nodes.add("Gather", values, ids, axis=0)
        rows = nodes.add("Cast", rows, to=ir.DataType.FLOAT)
        by_id = nodes.add("Unsqueeze", nodes.add("Gather", scales, ids), nodes.ints([-1]))
        out = nodes.add("Mul", rows, by_id)
        if is_tied:
            out = self._rotated(nodes, out, 3, depth)
        nodes.replace(node, out)

    def guard_logits(self) -> None:
        """Make the logits of a sequence NaN if the hidden state of any of its rows is.

        A product of integers is finite whatever it reads, and the greatest of a row is found
        without its NaNs. The hidden state keeps them, because every layer adds to it.
        """
        logits = next((v for v in self._model.graph.outputs if v.name == "logits"), None)
        scales = None if logits is None else self._scales_of(logits)
        if scales is None:
            return
        x = next(x for x, rows in self._rows.items() if rows.scales is scales)
        picked = _picking(x)
        if picked is None:
            return
        hidden, index = picked.inputs
        nodes = _Nodes(self._model)
        zero = self._number(0.0)
        nothing = nodes.add("Mul", nodes.add("ReduceSum", hidden, nodes.ints([1, 2])), zero)
        rows = nodes.add("Mul", nodes.add("Cast", index, to=ir.DataType.FLOAT), zero)  # [B,M,1]
        of_row = nodes.add("Add", rows, nothing)
        if x.shape is not None and len(x.shape) == 2:
            of_row = nodes.add("Reshape", of_row, nodes.ints([-1, 1]))
        users = [(node, i) for node, i in scales.uses() if node.op_type == "Mul"]
        guarded = nodes.add("Add", scales, of_row)
        self._model.graph.insert_before(users[0][0], nodes.nodes)
        for user, place in users:
            user.replace_input_with(place, guarded)

    def _scales_of(self, value: ir.Value) -> ir.Value | None:
        """Return the row scales of the nearest integer product before `value`."""
        all_scales = {rows.scales for rows in self._rows.values()}
        while (node := value.producer()) is not None and node.inputs[0] is not None:
            if len(node.inputs) > 1 and node.inputs[1] in all_scales:
                return node.inputs[1]
            value = node.inputs[0]
        return None

    def drop_unused(self) -> None:
        known = self._model.graph.initializers
        for name in [name for name, value in known.items() if not list(value.uses())]:
            known.pop(name)

    def _quantized(self, nodes: _Nodes, x: ir.Value, depth: int | None = None) -> _Rows:
        """Return x, rotated and quantized; written once for all products of x."""
        if x not in self._rows:
            assert x.shape is not None
            width = x.shape[-1] if depth is None else depth
            if not isinstance(width, int):
                raise ExportError(f"{self._model.graph.name}: the width of {x.name} is not known")
            turned = self._rotated(nodes, x, len(x.shape), width)
            largest = nodes.add("ReduceMax", nodes.add("Abs", turned), nodes.ints([-1]), keepdims=1)
            scales = nodes.add("Mul", largest, self._number(1 / LARGEST))
            zeros = self._zeros(nodes, x, scales)
            attributes = {"axis": len(x.shape) - 1, "block_size": width}
            values = nodes.add("QuantizeLinear", turned, scales, zeros, **attributes)
            self._rows[x] = _Rows(values, scales)
        return self._rows[x]

    def _rotated(self, nodes: _Nodes, x: ir.Value, rank: int, depth: int) -> ir.Value:
        width = rotation_block(depth)
        if width == 1:
            return x
        front = [0] * (rank - 1)
        blocks = nodes.add("Reshape", x, nodes.ints([*front, depth // width, width]))
        turned = nodes.add("MatMul", blocks, self._hadamard(width))
        return nodes.add("Reshape", turned, nodes.ints([*front, depth]))  # type: ignore[no-any-return]

    def _zeros(self, nodes: _Nodes, x: ir.Value, scales: ir.Value) -> ir.Value:
        """Return the zero points of a value's rows: 128 in the shape of its scales.

        Values whose rows have the same named dimensions share them.
        """
        assert x.shape is not None
        front = tuple(d if isinstance(d, int) else d.value for d in list(x.shape)[:-1])
        key = (scales,) if None in front else front
        if key not in self._zero_points:
            value = ir.tensor([_ZERO_POINT], dtype=ir.DataType.UINT8)
            shape = nodes.add("Shape", scales)
            self._zero_points[key] = nodes.add("ConstantOfShape", shape, value=value)
        return self._zero_points[key]

    def _integer_product(
        self, nodes: _Nodes, values: ir.Value, weight: ir.Value, is_transposed: bool
    ) -> ir.Value:
        """values [..,K] uint8 with zero point 128 @ weight -> [..,N], without the rows' scales.

        weight: [K,N], or [N,K] if is_transposed.
        """
        stored, scales = self._stored(weight, rotate=True, by_column=True, turned=not is_transposed)
        inputs = [values, stored, self._number(1.0), scales, self._zero_point()]
        return nodes.add("com.microsoft::MatMulIntegerToFloat", *inputs)  # type: ignore[no-any-return]

    def _stored(
        self, weight: ir.Value, *, rotate: bool, by_column: bool, turned: bool = False
    ) -> tuple[ir.Value, ir.Value]:
        """Return the initializers of a weight's int8 values and scales.

        turned: the weight is [K,N] instead of [N,K]. by_column: store the values as [K,N]. They are
        computed when they are written to disk.
        """
        name, known = str(weight.name), self._model.graph.initializers
        if name + INT8 not in known:
            tensor = weight.const_value
            assert tensor is not None
            rows, depth = (reversed if turned else tuple)(tensor.shape.numpy())

            def quantized() -> Int8Rows:
                parts = [self._rounded(part) if rotate else None for part in name.split(JOINED)]
                done = [part for part in parts if part is not None]
                if len(done) == len(parts):
                    values, scales = zip(*done, strict=True)
                    return np.concatenate(values), np.concatenate(scales)
                array = tensor.numpy()
                return int8_rows(array.T if turned else array, rotate=rotate)

            def values() -> ir.Tensor[Any]:
                stored, kept[:] = (both := quantized())[0], both[1:]
                return ir.Tensor(np.ascontiguousarray(stored.T) if by_column else stored)

            def scales() -> ir.Tensor[Any]:
                return ir.Tensor(kept[0] if kept else quantized()[1])

            kept: list[np.ndarray] = []  # the scales, once the values were written
            shape = (depth, rows) if by_column else (rows, depth)
            initializer(self._model, name + INT8, shape, ir.DataType.INT8, values)
            initializer(self._model, name + SCALE, (rows,), ir.DataType.FLOAT, scales)
        return known[name + INT8], known[name + SCALE]

    def _constant(self, name: str, make: Callable[[], np.ndarray]) -> ir.Value:
        if name not in self._constants:
            array = make()
            dtype = ir.DataType.from_numpy(array.dtype)
            self._constants[name] = initializer(
                self._model, name, array.shape, dtype, lambda: ir.Tensor(array)
            )
        return self._constants[name]

    def _hadamard(self, width: int) -> ir.Value:
        return self._constant(f"{_HADAMARD}{width}", lambda: hadamard(width))

    def _number(self, value: float) -> ir.Value:
        return self._constant(f"int8_number_{value:.4g}", lambda: np.array(value, np.float32))

    def _zero_point(self) -> ir.Value:
        return self._constant("int8_zero_point", lambda: np.array(_ZERO_POINT, np.uint8))


def _picking(x: ir.Value) -> ir.Node | None:
    """Return the GatherND that picks lm_head's input x from the hidden states of all rows."""
    node = x.producer()
    while node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == "GatherND" else None


class _Nodes:
    """Collects the nodes that replace another one."""

    def __init__(self, model: ir.Model) -> None:
        self._graph, self.nodes = model.graph, list[ir.Node]()

    def add(self, op: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: Any) -> Any:
        domain, _, name = op.rpartition("::")
        node = ir.node(name, list(inputs), attributes, domain=domain, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def ints(self, values: Sequence[int]) -> ir.Value:
        return self.add("Constant", value=ir.tensor([*values], dtype=ir.DataType.INT64))  # type: ignore[no-any-return]

    def replace(self, node: ir.Node, out: ir.Value) -> None:
        old = node.outputs[0]
        out.shape, out.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], self.nodes, [old], [out])
