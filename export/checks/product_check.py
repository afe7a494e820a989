"""The check of an int8 target: PyTorch and the engine, product by product.

Two computations of an int8 model differ as much as the model and its quantization: an input that
differs by 1e-7 can round to another integer, and the difference grows from layer to layer. So
the engine's inputs and results of all products are recorded, the model runs in PyTorch with these
results in place of its own, and the inputs of every product are compared. What is between two
products (norms, attention, masks, positions) is checked as exactly as for a float32 target, and so
is every product by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.export.graphs.joined_products import JOINED
from eagle3.export.graphs.weights import INT8
from eagle3.export.int8.int8_reference import (
    Int8Products,
    ModelWeights,
    StoredInt8,
    place,
    product,
    rotate,
    stored_int8,
)
from eagle3.export.targets.target import Target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.int8_form import FORMS, int8_form
from eagle3.runtime.ort.ort_library import import_onnxruntime
from eagle3.runtime.trees.tree import Tree

Array = NDArray[Any]
_GRAPH = ".recorded.onnx"
_PREFILL = 24


def check_products(bundle: Bundle, target: Target, tokens: Array, tree: Tree) -> dict[str, float]:
    """Return the largest relative errors of the inputs of products, of the products, and of the
    features, and of the weights: sqrt(sum of squared errors / sum of squares), over 100.

    That of the weights is about 1e-4 for int8, because it is the rounding error.

    tokens [T]: the text, which runs as a prefill, a single row and a chain. tree: verified after
    it; every path from its root to a leaf is one run of PyTorch.
    """
    recorder = _Recorder(bundle, ModelWeights(target.model))
    past = 0
    calls = []
    bounds = [min(_PREFILL, len(tokens) - 1), min(_PREFILL + 1, len(tokens)), len(tokens)]
    for end in sorted(set(bounds)):
        rows = end - past
        chain = np.tril(np.ones((rows, rows), np.bool_))
        calls.append(recorder.run(tokens[past:end], np.arange(past, end), chain, past))
        past = end
    branches = recorder.run(tree.tokens, tree.depths + past, tree.ancestor_mask(), past)
    worst = {} if recorder.has_weights_of_model() else {"weights": float("inf")}
    for leaf in (node for node in range(tree.num_nodes) if not tree.children(node)):
        path = [0, *tree.path(leaf)]
        recorded = {
            name: np.concatenate([call[name] for call in calls] + [branches[name][path]])
            for name in branches
        }
        text = np.concatenate([tokens, tree.tokens[path]])
        for name, error in _compared(target, text, recorded, recorder, bundle).items():
            worst[name] = float(np.maximum(worst.get(name, 0.0), error))  # propagates NaN
    return worst


def _compared(
    target: Target, text: Array, recorded: dict[str, Array], recorder: _Recorder, bundle: Bundle
) -> dict[str, float]:
    replay = _Replay(recorder, recorded)
    layers = bundle.manifest.target.aux_layer_ids
    with torch.no_grad(), replay:
        out = target.model(
            input_ids=torch.from_numpy(text)[None],
            use_cache=False,
            output_hidden_states=bool(layers),
        )
    errors = replay.errors()
    if layers:
        fused = torch.cat([out.hidden_states[i] for i in layers], -1)[0]
        errors["features"] = _relative(recorded["features"], fused.numpy())
    return errors


@dataclass(frozen=True)
class _Product:
    """Names of recorded values: rotated inputs [N,K], and results [N,Mi] of all joined weights.

    weights: the names of the weights, in the order of their columns.
    """

    inputs: str
    results: str
    weights: tuple[str, ...]


class _Recorder:
    """The target's engine with the inputs and results of its products as further outputs."""

    def __init__(self, bundle: Bundle, weights: ModelWeights) -> None:
        path = bundle.path(bundle.manifest.engines["target"].file)
        model = ir.load(path)
        self.weights, self.stored = weights, stored_int8(model, weights)
        self.products = tuple(map(_product, filter(_is_product, model.graph)))
        values = {v.name: v for node in model.graph for v in node.outputs}
        names = [name for each in self.products for name in (each.inputs, each.results)]
        known = {value.name for value in model.graph.outputs}
        model.graph.outputs.extend(
            values[name] for name in dict.fromkeys(names) if name not in known
        )
        recorded = Path(path).with_suffix(_GRAPH)
        ir.save(model, recorded)
        try:
            self._session = _session(recorded)
        finally:
            recorded.unlink()
        self._caches = {
            each.name: np.zeros([1, *each.shape[1:]], np.float32)
            for each in self._session.get_inputs()
            if each.name.startswith(("past_k.", "past_v."))
        }
        unread = {"logits", "next_token"} - set(names)
        found = [each.name for each in self._session.get_outputs()]
        self._wanted = [name for name in found if name not in unread]

    def has_weights_of_model(self) -> bool:
        """Return whether every stored weight is the model's, except for rounding."""
        return all(each.is_rounded(self.weights.rows(name)) for name, each in self.stored.items())

    def run(self, ids: Array, positions: Array, mask: Array, past: int) -> dict[str, Array]:
        """Run rows [N] after `past` slots. Return recorded name -> rows [N,..], and `features`."""
        given = {
            "input_ids": ids[None],
            "position_ids": positions[None].astype(np.int64),
            "tree_mask": mask[None],
            "past_len": np.array([past]),
            "logit_rows": np.arange(len(ids))[None],
        }
        found = self._session.run(self._wanted, {**given, **self._caches})
        outputs = dict(zip(self._wanted, found, strict=True))
        for name in self._caches:
            self._caches[name] = outputs.pop(name.replace("past", "present"))
        return {name: x.reshape(len(ids), -1) for name, x in outputs.items()}


def _session(path: Path) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for key, value in FORMS[int8_form()].items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _is_product(node: ir.Node) -> bool:
    """Return whether a node is a product with one quantized input (not one of several experts)."""
    source = None if not node.inputs or node.inputs[0] is None else node.inputs[0].producer()
    return (
        node.op_type == "MatMulIntegerToFloat"
        and source is not None
        and source.op_type == "QuantizeLinear"
    )


def _product(node: ir.Node) -> _Product:
    quantize = node.inputs[0].producer()  # type: ignore[union-attr]
    (scaled,) = (user for user in node.outputs[0].consumers() if user.op_type == "Mul")
    weights = str(node.inputs[1].name).removesuffix(INT8).split(JOINED)  # type: ignore[union-attr]
    turned, result = quantize.inputs[0], scaled.outputs[0]  # type: ignore[union-attr]
    return _Product(str(turned.name), str(result.name), tuple(weights))  # type: ignore[union-attr]


class _Replay(Int8Products):
    """Products return the engine's recorded results; their inputs are compared."""

    def __init__(self, recorder: _Recorder, recorded: dict[str, Array]) -> None:
        super().__init__(recorder.weights, recorder.stored)
        self._recorded: dict[Any, tuple[Array, Array, StoredInt8]] = {}
        for each in recorder.products:
            first = 0
            for name in each.weights:
                stored = recorder.stored[name]
                columns = slice(first, first + len(stored.scales))
                results = recorded[each.results][:, columns]
                key = place(recorder.weights[name])
                self._recorded[key] = recorded[each.inputs], results, stored
                first = columns.stop
        self._seen: set[Any] = set()
        self._errors = {"inputs": 0.0, "products": 0.0}

    def errors(self) -> dict[str, float]:
        """Return the largest errors; infinite if the model did not run every product."""
        complete = self._seen == self._recorded.keys()
        return {name: error if complete else float("inf") for name, error in self._errors.items()}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        key = place(weight)
        if key not in self._recorded:  # an expert
            return super().linear(x, weight, bias)
        self._seen.add(key)
        inputs, results, stored = self._recorded[key]
        self._note("inputs", inputs, rotate(x).reshape(-1, x.shape[-1]).numpy())
        self._note("products", results, product(torch.from_numpy(inputs), stored).numpy())
        out = torch.from_numpy(results).reshape(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def _note(self, name: str, found: Array, reference: Array) -> None:
        error = _relative(found, reference)
        self._errors[name] = float(np.maximum(self._errors[name], error))


def _relative(found: Array, reference: Array) -> float:
    """Return the largest difference over the largest value of the same row."""
    difference = np.abs(found - reference).max(-1)
    size = np.maximum(np.abs(reference).max(-1), 1e-6)
    error = float((difference / size).max())
    return error if np.isfinite(error) else float("inf")
