"""Check that ONNX Runtime's CUDA provider can run an ONNX graph without the CPU.

The provider has kernels for nearly all operators. It still computes on the CPU what depends on
shapes, and what it must read before it launches a kernel (the shape of a Reshape, the ends of a
Slice). Such nodes cannot be captured in a CUDA graph. Nodes whose inputs are all constants are
allowed, because they are folded when the graph is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from eagle3.plans.lint.tensorrt_lint import MAX_SHOWN, nodes_of, read_graph, say_node
from eagle3.runtime.errors import BuildError

# Operators whose results are on the host, or that decide on the host what runs next.
_ON_HOST = frozenset({"Shape", "Size", "NonZero", "Unique", "If", "Loop", "Scan"})
MAX_JOINED = 32
"""Maximum number of inputs of a Concat. With more, the provider uploads their addresses during the
call from host memory that it reuses, which must not happen in a captured call."""

# Operator -> indices of the inputs that the host reads before it launches the kernel.
_READ_BY_HOST = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}


def lint_ort_cuda(path: Path) -> None:
    """Raise BuildError, with the nodes, if part of the graph at `path` would run on the host."""
    model = read_graph(path)
    faults = [*_faults(model)]
    if faults:
        more = f"; and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
        raise BuildError(
            f"{path} cannot run on ONNX Runtime's CUDA provider without the CPU:"
            f" {'; '.join(faults[:MAX_SHOWN])}{more}; use a TensorRT backend for this model"
        )


def _faults(model: onnx.ModelProto) -> Iterator[str]:
    nodes = [*nodes_of(model.graph)]
    fixed = {tensor.name for tensor in model.graph.initializer} | {""}
    inputs = {v.name for v in model.graph.input if len(v.type.tensor_type.shape.dim) == 1}
    for node in nodes:  # in topological order, so `fixed` is complete for each node's inputs
        if node.domain not in ("", "ai.onnx"):
            yield f"{say_node(node)} is of domain {node.domain}, export with --lowering portable"
        elif set(node.input) <= fixed or _is_batch(node, inputs):
            fixed.update(node.output)  # folded when the graph is loaded
        elif node.op_type in _ON_HOST:
            yield f"{say_node(node)} runs on the CPU"
        elif node.op_type == "Concat" and len(node.input) > MAX_JOINED:
            yield f"{say_node(node)} has {len(node.input)} inputs, more than {MAX_JOINED}"
        for index in _READ_BY_HOST.get(node.op_type, ()):
            if index < len(node.input) and node.input[index] not in fixed:
                yield f"{say_node(node)} reads {node.input[index]!r}, which is not a constant"


def _is_batch(node: onnx.NodeProto, inputs: set[str]) -> bool:
    """Return whether `node` reads the batch size from the shape of one of `inputs`.

    `inputs` are the graph inputs with one dimension, the batch. The runtime loads the graph for one
    sequence, so such a Shape is folded. The Shape of an input with more dimensions is not.
    """
    return node.op_type == "Shape" and node.input[0] in inputs
