"""From a PyTorch module to an ONNX model on disk: trace, lower, lay out weights, save.

Dimensions that vary between calls are symbols. A dimension that PyTorch would turn into a constant
is an error.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import optimize_ir
from onnxscript.rewriter import onnx_fusions
from torch import Tensor, nn

from eagle3.export.graphs.attention import Lowering
from eagle3.export.graphs.experts import lower_experts
from eagle3.export.graphs.fusion import fuse_for_ort, fuse_standard
from eagle3.export.graphs.joined_products import join_products
from eagle3.export.graphs.lowerings import lower_attention
from eagle3.export.graphs.shapes import fix_shapes
from eagle3.export.graphs.weights import store_for_matmul, swaps_last_two
from eagle3.runtime.errors import UnsupportedModel

# The symbolic dimensions of the graphs, with the range they are traced for.
DIMS = {
    "B": torch.export.Dim("B", min=1, max=1024),
    "N": torch.export.Dim("N", min=1, max=65536),
    "M": torch.export.Dim("M", min=1, max=65536),
    "W": torch.export.Dim("W", min=1, max=65536),
}
# Weights smaller than this many bytes stay inside the .onnx file.
_INLINE_BYTES = 1024


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's progress and deprecation messages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


@contextlib.contextmanager
def _without_cycle_collector() -> Iterator[None]:
    """Disable the garbage collector. A trace creates so many objects that repeated searches for
    cycles through everything torch and transformers hold take a tenth of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def trace(
    module: nn.Module,
    inputs: Mapping[str, tuple[Any, str]],
    outputs: Sequence[str],
    lowering: Lowering,
    name: str,
) -> ir.Model:
    """Trace `module(*inputs)` into an ONNX model with lowered attention; see `trace_unlowered`."""
    return lower(trace_unlowered(module, inputs, outputs, lowering, name), lowering)


def lower(model: ir.Model, lowering: Lowering) -> ir.Model:
    """Lower the attention and the experts of `model` in place, and return it."""
    lower_attention(model, lowering)
    lower_experts(model)
    RemoveUnusedNodesPass()(model)
    return model


@_without_cycle_collector()
def trace_unlowered(
    module: nn.Module,
    inputs: Mapping[str, tuple[Any, str]],
    outputs: Sequence[str],
    lowering: Lowering,
    name: str,
) -> ir.Model:
    """Trace `module(*inputs)` into an ONNX model that has a placeholder for each attention and
    each mixture of experts.

    inputs: name -> (example tensor or list of tensors, its dimensions, for example "B N 64", where
    letters of DIMS are symbolic). A list becomes the inputs `name.0`, `name.1`, ... Raises
    UnsupportedModel if a symbolic dimension cannot stay symbolic.
    """
    examples = tuple(value for value, _ in inputs.values())
    shapes = tuple(_dynamic(value, dims) for value, dims in inputs.values())
    with torch.no_grad(), _quiet():
        try:
            program = torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise UnsupportedModel(
                f"{name}: PyTorch cannot trace it with symbolic shapes: {_first_lines(error)}"
            ) from error
        onnx_program = torch.onnx.export(
            program,
            examples,
            dynamo=True,
            opset_version=lowering.opset,
            input_names=_flat_names(inputs),
            output_names=list(outputs),
            optimize=False,
            verbose=False,
        )
    assert onnx_program is not None
    model = onnx_program.model
    optimize_ir(model, should_fold=_may_fold)
    onnx_fusions.fuse(model)
    fuse = fuse_for_ort if lowering.fuses else fuse_standard
    fuse(model)
    fix_shapes(model)
    store_for_matmul(model)
    if lowering.fuses:
        join_products(model)
    _name_dims(model, [dims for value, dims in inputs.values() for _ in _as_list(value)])
    model.graph.name = name
    return model


def _may_fold(node: ir.Node) -> bool | None:
    """Return whether constant folding may fold a node. Weights stay unchanged: `store_for_matmul`
    lays them out, tied ones once.

    PyTorch's own optimization (torch.onnx.export(optimize=True)) folds small weights.
    """
    return False if node.op_type == "Transpose" and swaps_last_two(node) else None


def _as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list) else [value]


def _dynamic(value: Any, dims: str) -> Any:
    one = {i: DIMS[d] for i, d in enumerate(dims.split()) if d in DIMS}
    return [one] * len(value) if isinstance(value, list) else one


def _flat_names(inputs: Mapping[str, tuple[Any, str]]) -> list[str]:
    return [
        f"{name}.{i}" if isinstance(value, list) else name
        for name, (value, _) in inputs.items()
        for i in range(len(_as_list(value)))
    ]


def _first_lines(error: Exception, count: int = 6) -> str:
    return "\n".join(str(error).strip().splitlines()[:count])


def _name_dims(model: ir.Model, dims: Sequence[str]) -> None:
    """Rename PyTorch's symbols (s36, ...) to the letters they were declared with.

    Inside the graph, any other symbolic dimension becomes unknown.
    """
    letters: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, dims, strict=True):
        assert value.shape is not None
        for dim, letter in zip(value.shape, spec.split(), strict=True):
            if letter in DIMS:
                if isinstance(dim, int):
                    raise UnsupportedModel(
                        f"{model.graph.name}: dimension {letter} of input {value.name} froze at "
                        f"{dim}"
                    )
                letters[str(dim.value)] = letter
    for value in [*model.graph.inputs, *model.graph.outputs]:
        if value.shape is not None:
            value.shape = ir.Shape([_rename(dim, letters) for dim in value.shape])
    for node in model.graph:
        for out in node.outputs:
            if out.shape is not None and not out.is_graph_output():
                out.shape = ir.Shape(
                    [d if isinstance(d, int) else letters.get(str(d.value)) for d in out.shape]
                )


def _rename(dim: int | ir.SymbolicDim, letters: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    return letters.get(str(dim.value), dim.value)


def save(
    model: ir.Model, path: Path, shared: Mapping[str, ir.ExternalTensor] | None = None
) -> dict[str, ir.ExternalTensor]:
    """Write `path` and its weights `path`.data; return where each weight is stored.

    shared: initializer name -> a weight that another engine's file already contains. It is
    referenced, not written again.
    """
    for name, tensor in (shared or {}).items():
        model.graph.initializers[name].const_value = tensor
    own = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and not isinstance(value.const_value, ir.ExternalTensor)
        and value.const_value.nbytes >= _INLINE_BYTES
    ]
    data = path.name + ".data"
    tensors = [value.const_value for value in own]
    external = (
        ir.external_data.convert_tensors_to_external(
            [t for t in tensors if t is not None], base_dir=path.parent, relative_path=data
        )
        if own
        else []
    )
    written: dict[str, ir.ExternalTensor] = {}
    for value, tensor in zip(own, external, strict=True):
        value.const_value = tensor
        assert value.name is not None
        written[value.name] = tensor
    ir.save(model, path)
    return written
