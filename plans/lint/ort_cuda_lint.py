"""Reads an ONNX graph before ONNX Runtime's CUDA provider does, and names what would stay on the
host.

The provider has kernels for nearly everything, but what is computed from shapes runs on the CPU, as
does what a kernel must know before it is launched (the target of a Reshape, the ends of a Slice).
A CUDA graph cannot hold such a node; where its inputs are constants there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from eagle3.plans.lint.tensorrt_lint import MAX_SHOWN, nodes_of, read_graph, say_node
from eagle3.runtime.errors import BuildError

# Their results lie on the host, or decide on the host what runs next.
_ON_HOST = frozenset({"Shape", "Size", "NonZero", "Unique", "If", "Loop", "Scan"})
MAX_JOINED = 32
"""Inputs of a Concat; the addresses of more are uploaded in a call, from memory that is reused."""

# Operator -> the inputs that the host reads before it launches the kernel.
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
    """Raises BuildError that names the nodes of the graph at `path` that would run on the host."""
    model = read_graph(path)
    faults = [*_faults(model)]
    if faults:
        more = f"; and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
        raise BuildError(
            f"{path} cannot run on ONNX Runtime's CUDA provider without the CPU:"
            f" {'; '.join(faults[:MAX_SHOWN])}{more}; choose a TensorRT backend for this model"
        )


def _faults(model: onnx.ModelProto) -> Iterator[str]:
    nodes = [*nodes_of(model.graph)]
    fixed = {tensor.name for tensor in model.graph.initializer} | {""}
    inputs = {v.name for v in model.graph.input if len(v.type.tensor_type.shape.dim) == 1}
    for node in nodes:  # inputs stand before the nodes that read them
        if node.domain not in ("", "ai.onnx"):
            yield f"{say_node(node)} is of {node.domain}, export with --lowering portable"
        elif set(node.input) <= fixed or _is_batch(node, inputs):
            fixed.update(node.output)  # folded when it is loaded
        elif node.op_type in _ON_HOST:
            yield f"{say_node(node)} runs there"
        elif node.op_type == "Concat" and len(node.input) > MAX_JOINED:
            yield f"{say_node(node)} joins {len(node.input)} inputs, more than {MAX_JOINED}"
        for index in _READ_BY_HOST.get(node.op_type, ()):
            if index < len(node.input) and node.input[index] not in fixed:
                yield f"{say_node(node)} waits for {node.input[index]!r}, which is no constant"


def _is_batch(node: onnx.NodeProto, inputs: set[str]) -> bool:
    """The batch, read off one of `inputs`, which have no other dimension: the runtime loads the
    graph for one sequence. Off an input of more dimensions it would not be folded."""
    return node.op_type == "Shape" and node.input[0] in inputs
