"""The layout of weights in a graph: stored as MatMul reads them, tied weights once, int8 on
request.

It also finds the embedding and the lm_head, which a draft can share with its target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle3.export.graphs.shapes import batch_target, constant
from eagle3.runtime.errors import ExportError

# Rows of a weight [K,N] that share one scale. The largest block that divides K is used.
_BLOCKS = (128, 64, 32)
# A weight `w` in int8 is two initializers, `w.int8` and `w.scale`.
INT8, SCALE = ".int8", ".scale"


def _replace(node: ir.Node, nodes: list[ir.Node], out: ir.Value) -> None:
    old, graph = node.outputs[0], node.graph
    assert graph is not None and isinstance(graph, ir.Graph)
    out.shape, out.type = old.shape, old.type
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [old], [out])


def store_for_matmul(model: ir.Model) -> None:
    """Remove every Transpose of a weight.

    A weight that only feeds MatMul is stored as [K,N], one of several experts as [E,K,N]. A weight
    that also feeds a Gather (an embedding tied to lm_head) stays [N,K], is stored once, and its
    MatMul becomes a Gemm that reads it in this layout.
    """
    for node in [n for n in model.graph if n.op_type == "Transpose"]:
        weight = node.inputs[0]
        if weight is None or not weight.is_initializer() or weight.const_value is None:
            continue
        users = [use.node for use in node.outputs[0].uses()]
        if not swaps_last_two(node) or any(u.op_type != "MatMul" for u in users):
            continue
        if len(list(weight.uses())) == 1:
            _transpose_in_place(model, node, weight)
        elif len(weight.const_value.shape) == 2 and all(map(_multiplies_rows, users)):
            for user in users:
                _matmul_to_gemm(model.graph, user, weight)
            model.graph.remove(node, safe=True)


def _multiplies_rows(matmul: ir.Node) -> bool:
    """Return whether the input may be [B,N,K]; a trace does not keep all intermediate shapes."""
    x = matmul.inputs[0]
    return x is not None and (x.shape is None or len(x.shape) == 3)


def swaps_last_two(transpose: ir.Node) -> bool:
    """Return whether a Transpose is [..,N,K] -> [..,K,N] with at most one leading dimension."""
    perm = transpose.attributes.get("perm")
    value = transpose.inputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    order = list(perm.as_ints()) if perm is not None else [*range(rank)][::-1]
    return order in ([1, 0], [0, 2, 1])


def initializer(
    model: ir.Model,
    name: str,
    shape: Sequence[int],
    dtype: ir.DataType,
    read: Callable[[], ir.Tensor[Any]],
) -> ir.Value:
    """Return a new initializer whose tensor `read` creates when it is written to disk."""
    dims = ir.Shape(shape)
    lazy = ir.LazyTensor(read, dtype=dtype, shape=dims, name=name)
    value = ir.Value(name=name, shape=dims, type=ir.TensorType(dtype), const_value=lazy)
    model.graph.register_initializer(value)
    return value


def _transpose_in_place(model: ir.Model, node: ir.Node, weight: ir.Value) -> None:
    tensor = weight.const_value
    assert tensor is not None and weight.name is not None
    *front, rows, columns = tensor.shape.numpy()

    def transposed() -> ir.Tensor[Any]:
        turned = np.ascontiguousarray(tensor.numpy().swapaxes(-1, -2))
        return ir.Tensor(turned, dtype=tensor.dtype)

    shape = (*front, columns, rows)
    stored = initializer(model, f"{weight.name}.T", shape, tensor.dtype, transposed)
    node.outputs[0].replace_all_uses_with(stored)
    model.graph.remove(node, safe=True)
    model.graph.initializers.pop(weight.name)


def _matmul_to_gemm(graph: ir.Graph, matmul: ir.Node, weight: ir.Value) -> None:
    """Replace x [B,N,K] @ weight.T, weight [V,K], by Reshape, Gemm(transB), Reshape."""
    x = matmul.inputs[0]
    assert weight.const_value is not None
    width, depth = weight.const_value.shape.numpy()
    flat_shape = constant([-1, depth])
    flat = ir.node("Reshape", [x, flat_shape.outputs[0]])
    flat.outputs[0].shape = ir.Shape([None, depth])
    flat.outputs[0].type = ir.TensorType(weight.const_value.dtype)
    gemm = ir.node("Gemm", [flat.outputs[0], weight], {"transB": 1})
    target = batch_target(graph, [-1, width])
    out = ir.node("Reshape", [gemm.outputs[0], target[-1].outputs[0]])
    _replace(matmul, [flat_shape, flat, gemm, *target, out], out.outputs[0])


def embedding_name(model: ir.Model) -> str:
    """Return the embedding table: the initializer that `Gather(input_ids)` reads.

    Raises ExportError if there is none.
    """
    for node in (n for n in model.graph if n.op_type == "Gather"):
        table, ids = node.inputs
        if table is None or ids is None or ids.name != "input_ids":
            continue
        if table.is_initializer():
            return str(table.name)
    raise ExportError(f"the graph of {model.graph.name} has no embedding lookup of input_ids")


def shared_embedding(own: ir.Model, theirs: ir.Model) -> dict[str, str]:
    """Return the initializers of the embedding in the graph `own`, and those of `theirs` that
    contain the same values.

    Raises ExportError if a graph has no embedding.
    """
    pairs = {embedding_name(own): embedding_name(theirs)}
    for mine, other in list(pairs.items()):
        if other.endswith(INT8):
            pairs[mine.removesuffix(INT8) + SCALE] = other.removesuffix(INT8) + SCALE
    return pairs


def lm_head_name(model: ir.Model) -> str | None:
    """Return the initializer whose product is `logits`; None if it is stored otherwise, as int8
    is.
    """
    value = next(out for out in model.graph.outputs if out.name == "logits")
    while (node := value.producer()) is not None and node.inputs[0] is not None:
        if node.op_type in ("MatMul", "Gemm"):
            weight = node.inputs[1]
            return weight.name if weight is not None and weight.is_initializer() else None
        value = node.inputs[0]
    return None


def int8_block(depth: int) -> int | None:
    """Return the rows that share a scale in a weight of `depth` rows, or None if no block divides
    it.
    """
    return next((block for block in _BLOCKS if depth % block == 0), None)


def quantize_int8(model: ir.Model) -> int:
    """Store the weights of MatMuls as int8 with one scale per block of rows and column.

    weight [K,N] becomes int8 [K,N] and scales [K/block,N] of its dtype, with a DequantizeLinear
    before the MatMul, which ONNX Runtime fuses into one kernel. Symmetric, without zero points.
    Returns the number of weights stored as int8.
    """
    count = 0
    for matmul in [n for n in model.graph if n.op_type == "MatMul"]:
        weight = matmul.inputs[1]
        if weight is None or not weight.is_initializer() or weight.const_value is None:
            continue
        assert weight.name is not None
        shape = weight.const_value.shape.numpy()
        if len(shape) != 2:
            continue
        block = int8_block(shape[0])
        if block is None:
            continue
        _dequantize_in_front(model, matmul, weight, block)
        count += 1
    return count


def unshare_int8(model: ir.Model) -> None:
    """Give every DequantizeLinear its own initializers, which stay one tensor in the file.

    ONNX Runtime fuses it with its MatMul only if nothing else reads the weight. The copies are
    named `NAME#1`, `NAME#2`, ...
    """
    seen: Counter[str | None] = Counter()
    for node in [n for n in model.graph if n.op_type == "DequantizeLinear"]:
        copy = seen[node.inputs[0].name]  # type: ignore[union-attr]
        seen[node.inputs[0].name] += 1  # type: ignore[union-attr]
        for place, value in enumerate(node.inputs[:2] if copy else ()):
            assert value is not None
            own = ir.Value(
                name=f"{value.name}#{copy}",
                shape=value.shape,
                type=value.type,
                const_value=value.const_value,
            )
            model.graph.register_initializer(own)
            node.replace_input_with(place, own)


def _dequantize_in_front(model: ir.Model, matmul: ir.Node, weight: ir.Value, block: int) -> None:
    name = weight.name
    assert name is not None
    if name + INT8 not in model.graph.initializers:  # another MatMul can read the same weight
        _store_int8(model, weight, block)
    stored = [model.graph.initializers[name + suffix] for suffix in (INT8, SCALE)]
    dequantize = ir.node("DequantizeLinear", stored, {"axis": 0, "block_size": block})
    model.graph.insert_before(matmul, dequantize)
    matmul.replace_input_with(1, dequantize.outputs[0])
    if not list(weight.uses()):
        model.graph.initializers.pop(name)


def _store_int8(model: ir.Model, weight: ir.Value, block: int) -> None:
    tensor, name = weight.const_value, weight.name
    assert tensor is not None and name is not None
    quantized, scales = block_int8(tensor.numpy(), block)
    for suffix, array in ((INT8, quantized), (SCALE, scales)):
        value = ir.Value(name=name + suffix, const_value=ir.tensor(array, name=name + suffix))
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(value.const_value.dtype)  # type: ignore[union-attr]
        model.graph.register_initializer(value)


def block_int8(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize weight [K,N] of any float dtype to int8 [K,N] and scales [K/block,N] of that dtype.

    |error| <= scale / 2. A scale that its dtype cannot represent is rounded up, never to 0.
    """
    depth, width = weight.shape
    blocks = weight.astype(np.float32).reshape(depth // block, block, width)
    exact = np.maximum(np.abs(blocks).max(axis=1), 1e-12) / np.float32(127)
    scales = exact.astype(weight.dtype)
    above = np.nextafter(scales, np.array(np.inf, weight.dtype))
    scales = np.where(scales.astype(np.float32) < exact, above, scales)
    steps = blocks / scales.astype(np.float32)[:, None, :]
    quantized = np.clip(np.rint(steps), -127, 127).astype(np.int8)
    return quantized.reshape(depth, width), scales


@dataclass(frozen=True)
class StoredGraph:
    """A graph whose weights are stored in a file, by initializer name, for reference from another
    graph.
    """

    graph: ir.Model
    weights: Mapping[str, ir.ExternalTensor]

    @classmethod
    def load(cls, path: Path) -> StoredGraph:
        """Read the graph `path`. The weights stay on disk."""
        graph = ir.load(path)
        tensors = {name: value.const_value for name, value in graph.graph.initializers.items()}
        return cls(graph, {n: t for n, t in tensors.items() if isinstance(t, ir.ExternalTensor)})
