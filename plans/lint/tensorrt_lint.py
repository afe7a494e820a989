"""Check an ONNX graph for what TensorRT would get wrong without an error.

TensorRT ignores some attributes and inputs (a sliding window, a padded length), turns some cache
updates into a copy of the whole cache, and rejects others with an error that does not name the
node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from eagle3.runtime.errors import BuildError

MAX_OPSET = 24
_CACHE_TYPES = ("FLOAT16", "BFLOAT16", "FLOAT")
MAX_SHOWN = 4
# Indices of Attention's inputs.
_MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = 3, 4, 5, 6

Fault = tuple[str, str]
"""Description of the problem with the node's name, and the remedy."""


@dataclass(frozen=True)
class GraphFacts:
    """Properties of a graph that TensorRT must preserve.

    aliases: present -> past, tensors that share one address. files: weight files, relative to the
    graph's folder.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: Mapping[str, str]
    num_cache_updates: int
    num_attentions: int
    files: tuple[str, ...]


def lint_file(path: Path) -> GraphFacts:
    """Run `lint` on the graph at `path`. Raises BuildError."""
    return lint(read_graph(path), str(path))


def read_graph(path: Path) -> onnx.ModelProto:
    """Load the graph at `path` without external weights. Raises BuildError if that fails."""
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:  # from protobuf or from the file system
        raise BuildError(f"{path} is not a readable ONNX graph: {error}") from error


def lint(model: onnx.ModelProto, where: str) -> GraphFacts:
    """Check a graph for TensorRT and return its facts.

    where: name of the graph in error messages. Raises BuildError with the problem and the remedy of
    each faulty node; the first MAX_SHOWN are listed and the rest counted.
    """
    graph = _Graph(model)
    faults = [*_model_faults(model, graph), *(f for n in graph.nodes for f in _faults(n, graph))]
    if faults:
        shown = "; ".join(f"{what}: {advice}" for what, advice in faults[:MAX_SHOWN])
        more = f"; and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
        raise BuildError(f"{where} cannot be compiled to a plan file: {shown}{more}")
    updates = [node for node in graph.nodes if node.op_type == "TensorScatter"]
    return GraphFacts(
        inputs=tuple(graph.inputs),
        outputs=tuple(graph.outputs),
        aliases={node.output[0]: node.input[0] for node in updates},
        num_cache_updates=len(updates),
        num_attentions=sum(node.op_type == "Attention" for node in graph.nodes),
        files=tuple(sorted(set(_weight_files(model.graph)))),
    )


class _Graph:
    """Lookup tables of a model. `nodes` includes the nodes of subgraphs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        weights = {tensor.name for tensor in model.graph.initializer}
        self.inputs = {v.name: v for v in model.graph.input if v.name not in weights}
        self.outputs = {value.name for value in model.graph.output}
        self.nodes = [*nodes_of(model.graph)]
        # A Shape reads no element, so TensorRT still updates the cache in place.
        readers = (node for node in self.nodes if node.op_type != "Shape")
        self.uses = Counter(name for node in readers for name in node.input)
        self._dtypes = _dtypes(model)

    def dtype(self, name: str) -> str | None:
        """Return the ONNX name of a tensor's type, such as FLOAT16; None if it is not known."""
        return self._dtypes.get(name)

    def shape(self, name: str) -> list[int | str]:
        """Return the shape of a graph input; a symbolic dimension is its name, "" if unnamed."""
        dims = self.inputs[name].type.tensor_type.shape.dim
        return [d.dim_value if d.HasField("dim_value") else str(d.dim_param) for d in dims]


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a graph, including those of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from nodes_of(inner)


def _dtypes(model: onnx.ModelProto) -> dict[str, str]:
    """Return tensor -> ONNX type name, as far as ONNX's shape inference determines it."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # an unknown operator; the types declared in the graph remain usable
        graph = model.graph
    name_of = onnx.TensorProto.DataType.Name
    values = (*graph.input, *graph.output, *graph.value_info)
    known = {v.name: v.type.tensor_type.elem_type for v in values}
    known |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: name_of(dtype) for name, dtype in known.items() if dtype}


def _weight_files(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value


def _model_faults(model: onnx.ModelProto, graph: _Graph) -> Iterator[Fault]:
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > MAX_OPSET:
            yield f"opset {opset.version} is unsupported", f"export it with opset {MAX_OPSET}"
    foreign = [node for node in graph.nodes if node.domain not in ("", "ai.onnx")]
    if foreign:
        names = ", ".join(sorted({f"{node.domain}.{node.op_type}" for node in foreign})[:3])
        yield (
            f"{say_node(foreign[0])} is one of {len(foreign)} nodes with operators that are not"
            f" standard ONNX ({names})",
            "export the bundle again with --lowering portable",
        )


def say_node(node: onnx.NodeProto) -> str:
    """Return the type and name of a node for an error message."""
    return f"{node.op_type} node {node.name or (node.output[0] if node.output else '')!r}"


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def _faults(node: onnx.NodeProto, graph: _Graph) -> Iterator[Fault]:
    if node.domain in ("", "ai.onnx"):
        if node.op_type == "TensorScatter":
            yield from ((f"{say_node(node)} {what}", how) for what, how in _scatter(node, graph))
        if node.op_type == "Attention":
            yield from ((f"{say_node(node)} {what}", how) for what, how in _attention(node, graph))


def _scatter(node: onnx.NodeProto, graph: _Graph) -> Iterator[Fault]:
    """Yield what prevents a TensorScatter from becoming a KVCacheUpdate, which writes in place."""
    attributes = _attributes(node)
    mode = attributes.get("mode", b"linear").decode()
    if mode != "linear":
        yield f"has mode {mode!r}", "use mode 'linear', the only one TensorRT supports for caches"
    past, present = node.input[0], node.output[0]
    if past not in graph.inputs:
        yield f"updates {past!r}, which is not a graph input", "make the cache a graph input"
    else:
        yield from _cache(past, attributes.get("axis", -2), graph)
    if graph.uses[past] > 1:
        yield (
            f"updates {past!r}, which {graph.uses[past] - 1} other nodes read",
            f"let them read {present!r}, because past and present share one memory",
        )
    if present not in graph.outputs:
        yield f"writes {present!r}, which is not a graph output", "make it a graph output"


def _cache(past: str, axis: int, graph: _Graph) -> Iterator[Fault]:
    shape = graph.shape(past)
    if len(shape) != 4:
        yield (
            f"updates {past!r} with {len(shape)} dimensions",
            "a cache must be [B, heads, slots, size]",
        )
    elif not isinstance(shape[2], int):
        yield (
            f"updates {past!r} with the symbolic dimension {shape[2] or '?'!r} for its slots",
            "make the capacity a number",
        )
    if axis not in (2, -2):
        yield f"has axis {axis}", "use axis 2, the slots of [B, heads, slots, size]"
    dtype = graph.dtype(past)
    if dtype not in _CACHE_TYPES:
        yield f"updates {past!r} of type {dtype}", f"use one of {', '.join(_CACHE_TYPES)}"


def _attention(node: onnx.NodeProto, graph: _Graph) -> Iterator[Fault]:
    """Yield what TensorRT ignores or rejects in an Attention node."""
    given = dict(enumerate(node.input))
    attributes = _attributes(node)
    mask = given.get(_MASK, "")
    if given.get(_PAST_KEY) or given.get(_PAST_VALUE):
        yield "has past_key or past_value", "write the cache with a TensorScatter node instead"
    if given.get(_LENGTHS):
        yield "has nonpad_kv_seqlen, which TensorRT ignores", "express it in the mask"
    for name in ("left_window_size", "right_window_size"):
        if attributes.get(name, -1) != -1:
            yield f"has {name}, which TensorRT ignores", "express it in the mask"
    if attributes.get("softcap", 0.0) != 0.0:
        yield (
            f"has softcap {attributes['softcap']:g}, which TensorRT does not support",
            "use another target",
        )
    if "softmax_precision" in attributes:
        yield "has softmax_precision, which TensorRT chooses itself", "remove it"
    if attributes.get("is_causal", 0) and mask:
        yield "has is_causal together with a mask", "express it in the mask alone"
    query, masked = graph.dtype(node.input[0]), graph.dtype(mask) if mask else None
    if mask and masked != query:
        yield (
            f"has a mask of type {masked} for a query of type {query}",
            "give the mask the query's type",
        )
