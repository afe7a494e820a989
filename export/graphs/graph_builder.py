"""Writes an ONNX graph node by node, and inserts copies of traced graphs.

A module that runs several times in one graph is traced once, because tracing all of it would take
PyTorch minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Operand = ir.Value | int | float | list[int] | np.ndarray
Resolve = Callable[[ir.Value | None], ir.Value]
"""Maps a value of the copied graph to its copy, which is created on demand."""
Rewrite = Callable[[ir.Node, Resolve], Sequence[ir.Value] | None]
"""Returns replacements for the outputs of a node of the copied graph, or None to copy the node."""

# Weights of at least this size keep their names, by which engines share one file.
_NAMED_BYTES = 1024


class GraphBuilder:
    """A graph under construction. Numbers among a node's inputs become constants: int and lists
    become int64, float becomes float32, arrays keep their dtype.
    """

    def __init__(self, name: str, opsets: Mapping[str, int]) -> None:
        self._graph = ir.Graph([], [], nodes=[], opset_imports=dict(opsets), name=name)
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._weights: dict[ir.Value, ir.Value] = {}
        self._fixed: dict[ir.Value, ir.Value] = {}
        self._num_values = 0

    def model(self) -> ir.Model:
        """Return the finished graph as a model."""
        return ir.Model(self._graph, ir_version=11)

    def input(self, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
        """Add a graph input. A symbolic dimension is a string."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self._graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, *shape: int | str) -> None:
        """Make `value` an output named `name`."""
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(dtype)
        self._graph.outputs.append(value)

    def __call__(self, op: str, *inputs: Operand | None, outputs: int = 1, **attrs: Any) -> Any:
        """Add node "Op" or "domain::Op" and return its output, or a tuple of its outputs."""
        domain, _, name = op.rpartition("::")
        values = [None if x is None else self.value(x) for x in inputs]
        node = self._append(ir.node(name, values, attrs, domain=domain, num_outputs=outputs))
        return node.outputs[0] if outputs == 1 else node.outputs

    def value(self, x: Operand) -> ir.Value:
        """Return x itself, or the constant that holds it."""
        if isinstance(x, ir.Value):
            return x
        dtype = np.float32 if isinstance(x, float) else np.int64
        array = x if isinstance(x, np.ndarray) else np.array(x, dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self._initializer(ir.tensor(array, name=name), name)
        return self._constants[key]

    def copy(
        self,
        model: ir.Model,
        given: Mapping[str, ir.Value],
        outputs: Sequence[str],
        rewrite: Rewrite,
    ) -> list[ir.Value]:
        """Copy what `outputs` of `model` need into this graph, and return the copied outputs.

        given: input of the model -> value in this graph. Nodes that read only weights (a Transpose
        of a weight, for example) are copied once.
        """
        done = {
            value: given[str(value.name)] for value in model.graph.inputs if value.name in given
        }
        wanted = {value.name: value for value in model.graph.outputs}

        def resolve(value: ir.Value | None) -> ir.Value:
            assert value is not None
            if value.is_initializer():
                return self._weight(value)
            found = done.get(value) or self._fixed.get(value)
            if found is None:
                node = value.producer()
                assert node is not None, f"nothing is given for input {value.name}"
                made = rewrite(node, resolve)
                copies = self._copied(node, resolve) if made is None else made
                done.update(zip(node.outputs, copies, strict=True))
                found = done[value]
            return found

        return [resolve(wanted[name]) for name in outputs]

    def _copied(self, node: ir.Node, resolve: Resolve) -> Sequence[ir.Value]:
        inputs = [None if value is None else resolve(value) for value in node.inputs]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            node.attributes.values(),
            num_outputs=len(node.outputs),
        )
        self._append(copy)
        fixed = {*self._weights.values(), *self._fixed.values()}
        if all(value is None or value in fixed for value in inputs):
            self._fixed.update(zip(node.outputs, copy.outputs, strict=True))
        return copy.outputs

    def _append(self, node: ir.Node) -> ir.Node:
        """Append a node and name its outputs, since a name chosen by onnx_ir could be a copied
        weight's.
        """
        for value in node.outputs:
            value.name, self._num_values = f"made_{self._num_values}", self._num_values + 1
        self._graph.append(node)
        return node

    def _weight(self, source: ir.Value) -> ir.Value:
        """Return the initializer that holds the tensor of an initializer of another graph."""
        if source not in self._weights:
            tensor = source.const_value
            assert tensor is not None
            is_small = tensor.nbytes < _NAMED_BYTES
            name = f"small_{len(self._weights)}" if is_small else str(source.name)
            self._weights[source] = self._initializer(tensor, name)
        return self._weights[source]

    def _initializer(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        assert name not in self._graph.initializers, name
        value = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value
