"""Parse an ONNX graph with TensorRT, and compare the network with the graph.

The parser can drop an input or turn a cache update into a copy without an error. The network is
therefore checked layer by layer before it is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.plans.lint.tensorrt_lint import GraphFacts
from eagle3.plans.tensorrt.build_log import Log
from eagle3.plans.tensorrt.build_request import SHAPE_INPUTS
from eagle3.plans.tensorrt.library import Library
from eagle3.runtime.errors import BuildError

Parsed = tuple[Any, Any, Any]
"""Builder, network and parser, as polygraphy returns them. The parser owns the weights that the
network reads, so it must outlive the network."""


def parse(polygraphy: Any, library: Library, path: Path, log: Log) -> Parsed:
    """Parse an ONNX file to a strongly typed network, in which tensors keep the graph's types.

    Raises BuildError, with the parser's messages, if that fails.
    """
    trt = polygraphy.backend.trt
    try:
        parsed: Parsed = trt.network_from_onnx_path(str(path), strongly_typed=True)
    except polygraphy.exception.PolygraphyException as error:
        raise BuildError(
            f"{library.name} {library.version} cannot read {path}: {log.errors()}"
        ) from error
    return parsed


def check_network(network: Any, library: Library, facts: GraphFacts, where: str) -> Counter[str]:
    """Check that a network matches its graph, and return the number of layers by type.

    where: name of the graph in error messages. Raises BuildError if an input was dropped or no
    output depends on it, if the outputs differ, if other inputs than SHAPE_INPUTS are read on the
    host, or if a cache update or attention became another layer.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    counts: Counter[str] = Counter(layer.type.name for layer in layers)
    inputs = {x.name: x for x in map(network.get_input, range(network.num_inputs))}
    outputs = [network.get_output(i).name for i in range(network.num_outputs)]
    used = _leads_to(layers, outputs)
    dropped = [name for name in facts.inputs if name not in inputs or name not in used]
    faults = []
    if dropped:
        faults.append(f"the network ignores the inputs {', '.join(dropped)}")
    if set(outputs) != set(facts.outputs):
        faults.append(f"expected the outputs {list(facts.outputs)}, got {outputs}")
    on_host = {name for name, tensor in inputs.items() if tensor.is_shape_tensor}
    if on_host != SHAPE_INPUTS.keys() & inputs.keys():
        faults.append(f"the network reads the inputs {sorted(on_host)} on the host")
    for kind, expected in (
        ("KV_CACHE_UPDATE", facts.num_cache_updates),
        ("ATTENTION_INPUT", facts.num_attentions),
    ):
        if counts[kind] != expected:
            faults.append(f"expected {expected} {kind} layers, got {counts[kind]}")
    if faults:
        raise BuildError(
            f"{library.name} {library.version} parsed {where} incorrectly:"
            f" {'; '.join(faults)}. Nothing was built; please report this with the versions of"
            f" eagle3 and {library.name}"
        )
    return counts


def _leads_to(layers: list[Any], outputs: list[str]) -> set[str]:
    """Return the names of all tensors that an output depends on."""
    by_output = {tensor.name: layer for layer in layers for tensor in _outputs(layer)}
    seen, waiting = set(outputs), list(outputs)
    while waiting:
        layer = by_output.get(waiting.pop())
        new = {t.name for t in _inputs(layer)} - seen if layer is not None else set()
        seen |= new
        waiting += new
    return seen


def _inputs(layer: Any) -> Iterator[Any]:
    tensors = (layer.get_input(i) for i in range(layer.num_inputs))
    return (tensor for tensor in tensors if tensor is not None)


def _outputs(layer: Any) -> Iterator[Any]:
    tensors = (layer.get_output(i) for i in range(layer.num_outputs))
    return (tensor for tensor in tensors if tensor is not None)
