"""An ONNX graph as TensorRT parsed it, compared with what the graph says.

A parser may drop an input without a word and a cache update may become a copy: the network is
looked at, layer by layer, before anything is built from it.
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
"""Builder, network, parser: polygraphy's; the network reads weights that the parser owns."""


def parse(polygraphy: Any, library: Library, path: Path, log: Log) -> Parsed:
    """The strongly typed network of an ONNX file: every tensor keeps the graph's own type.

    Raises BuildError with the parser's messages.
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
    """Layers by type, once inputs, outputs, caches and attention are all those of the graph.

    Raises BuildError for an input that was dropped or leads nowhere, and for a cache update or
    attention that became something else.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    counts: Counter[str] = Counter(layer.type.name for layer in layers)
    inputs = {x.name: x for x in map(network.get_input, range(network.num_inputs))}
    outputs = [network.get_output(i).name for i in range(network.num_outputs)]
    used = _leads_to(layers, outputs)
    dropped = [name for name in facts.inputs if name not in inputs or name not in used]
    faults = []
    if dropped:
        faults.append(f"it drops the inputs {', '.join(dropped)}")
    if set(outputs) != set(facts.outputs):
        faults.append(f"its outputs are {outputs}, the graph's {list(facts.outputs)}")
    on_host = {name for name, tensor in inputs.items() if tensor.is_shape_tensor}
    if on_host != SHAPE_INPUTS.keys() & inputs.keys():
        faults.append(f"it reads {sorted(on_host)} on the host")
    for kind, expected in (
        ("KV_CACHE_UPDATE", facts.num_cache_updates),
        ("ATTENTION_INPUT", facts.num_attentions),
    ):
        if counts[kind] != expected:
            faults.append(f"it has {counts[kind]} {kind} layers, the graph {expected} such nodes")
    if faults:
        raise BuildError(
            f"{library.name} {library.version} does not read {where} as it is:"
            f" {'; '.join(faults)}; nothing was built. Please report it with both versions"
        )
    return counts


def _leads_to(layers: list[Any], outputs: list[str]) -> set[str]:
    """Names of all tensors that an output depends on."""
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
