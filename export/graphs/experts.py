"""Mixtures of experts in the graph: two forms of the same sum.

transformers passes rows, the experts that each row chose and their weights to a registered
function. If shapes may depend on data (`groups_experts` of a lowering), rows are sorted by expert
and an expert multiplies only its own rows: its matrices are separate constants, and those that no
row chose are not read. Otherwise all experts run on all rows, as batched products of static shape.
Neither form gathers weights by row, which would copy the matrices of k experts for each row.

Letters: R rows of a call, d hidden size, E experts, k experts per row, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.onnx.ops as onnx_ops
from torch import Tensor

from eagle3.export.graphs.weights import initializer

PLACEHOLDER = ("eagle3", "GroupedMatMul")


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [R,d], chosen [R,k] expert ids, weights [R,k] -> [R,d]: each expert on its own rows.

    A row's result has the same bits whatever other rows are in the call: a MatMul with a constant
    computes rows independently, and the k parts of a row are added in the order of `chosen`.
    """
    rows, per_row = chosen.shape
    by_expert, order = torch.sort(chosen.reshape(-1))
    experts = torch.arange(module.num_experts, device=chosen.device)
    counts = (by_expert[:, None] == experts).sum(0)

    def linear(x: Tensor, name: str) -> Tensor:
        out = _grouped_matmul(x, counts, getattr(module, name), module.is_transposed)
        return out + getattr(module, f"{name}_bias")[by_expert] if module.has_bias else out

    out = _expert(module, hidden[order // per_row], linear)
    out = out * weights.reshape(-1)[order][:, None]
    out = out[torch.argsort(order)].reshape(rows, per_row, hidden.shape[-1]).sum(1)
    return out.to(hidden.dtype)


def dense_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same sum over all experts. Experts that a row did not choose are excluded,
    even if NaN.
    """
    experts = torch.arange(module.num_experts, device=chosen.device)
    own = chosen == experts[:, None, None]  # [E,R,k], at most one per row
    routing = torch.where(own, weights, 0.0).sum(2, keepdim=True)  # [E,R,1]

    def linear(x: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        out: Tensor = x @ (weight if module.is_transposed else weight.transpose(1, 2))
        return out + getattr(module, f"{name}_bias")[:, None] if module.has_bias else out

    out = _expert(module, hidden[None], linear)  # [E,R,d]
    total: Tensor = torch.where(routing != 0, out * routing, 0.0).sum(0)
    return total.to(hidden.dtype)


def _expert(module: Any, x: Tensor, linear: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Run an expert with the model's own activation: x [..,d] -> [..,d]."""
    if module.has_gate:
        inner = module._apply_gate(linear(x, "gate_up_proj"))
    else:
        inner = module.act_fn(linear(x, "up_proj"))
    out = linear(inner, "down_proj")
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


def _grouped_matmul(x: Tensor, counts: Tensor, weight: Tensor, is_transposed: bool) -> Tensor:
    """Emit a placeholder: x [R*k,K], its first counts[0] rows of expert 0 and so on -> [R*k,M].

    weight [E,K,M] if is_transposed, otherwise [E,M,K].
    """
    return onnx_ops.symbolic(
        "::".join(PLACEHOLDER),
        [x, counts, weight],
        attrs={"is_transposed": int(is_transposed)},
        dtype=x.dtype,
        shape=(x.shape[0], weight.shape[2 if is_transposed else 1]),
        version=1,
    )


def lower_experts(model: ir.Model) -> None:
    """Replace every placeholder by Split, one MatMul per expert, and Concat."""
    for node in [n for n in model.graph if (n.domain, n.op_type) == PLACEHOLDER]:
        x, counts, weight = node.inputs
        assert weight is not None and weight.const_value is not None and weight.name is not None
        matrices = _matrices(model, weight, bool(node.attributes["is_transposed"].as_int()))
        split = ir.node("Split", [x, counts], {"axis": 0}, num_outputs=len(matrices))
        products = [
            ir.node("MatMul", [part, matrix])
            for part, matrix in zip(split.outputs, matrices, strict=True)
        ]
        joined = ir.node("Concat", [p.outputs[0] for p in products], {"axis": 0})
        old, new = node.outputs[0], joined.outputs[0]
        new.shape, new.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [split, *products, joined], [old], [new]
        )
        model.graph.initializers.pop(weight.name)
    model.opset_imports.pop(PLACEHOLDER[0], None)


def _matrices(model: ir.Model, weight: ir.Value, is_transposed: bool) -> list[ir.Value]:
    """Return an initializer [K,M] for each expert of `weight`, read when it is written to disk."""
    stacked = weight.const_value
    assert stacked is not None
    num_experts, *sides = stacked.shape.numpy()
    depth, width = sides if is_transposed else reversed(sides)

    def matrix(expert: int) -> ir.Value:
        def read() -> ir.Tensor[Any]:
            own = stacked.numpy()[expert]
            return ir.Tensor(
                np.ascontiguousarray(own if is_transposed else own.T), dtype=stacked.dtype
            )

        return initializer(model, f"{weight.name}.{expert}", (depth, width), stacked.dtype, read)

    return [matrix(expert) for expert in range(num_experts)]
