"""Where a head's weights start from: the target's own last layer, norm and lm_head.

A head that starts there learns far faster than a random one (method section 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead

Report = Callable[[str], None]
_RANDOM_STD = 0.02
_SAMPLED = 1024  # numbers of each weight that tell a target from another


@torch.no_grad()
def start_from_target(
    head: EagleHead | Eagle1Head,
    model: Any,
    target_ids: NDArray[np.int64],
    seed: int,
    report: Report = lambda _: None,
) -> None:
    """Fills the head in place; what the target has no weight of that shape for starts random.

    model: the target, a transformers causal LM; target_ids [Vd]. Reports what started random.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(_random(name, parameter, generator))
    if isinstance(head, EagleHead):
        head.lm_head.weight.copy_(
            model.get_output_embeddings().weight[torch.from_numpy(target_ids)]
        )
    _select_last(head.fc)
    different = _copy_layer(head, model)
    if isinstance(head, Eagle1Head):
        _start_from_identity(head, model)
    if different:
        report(f"started at random, the target has no such weights: {', '.join(different)}")


def target_fingerprint(model: Any) -> str:
    """What tells one target's weights from another's: the first numbers of each."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().flatten()[:_SAMPLED].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _random(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones_like(parameter)
    if parameter.dim() == 1:
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter).normal_(0, _RANDOM_STD, generator=generator)


def _select_last(fc: nn.Linear) -> None:
    """fc passes on the last d of what it reads: the top feature."""
    width = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -width:] = torch.eye(width)


def _copy_layer(head: EagleHead | Eagle1Head, model: Any) -> list[str]:
    """The last decoder layer's weights, by the names that Llama's have; returns those it lacks."""
    last = model.base_model.layers[-1]
    layer: Any = head.midlayer if isinstance(head, EagleHead) else head.layers[0]
    stored, into = dict(last.named_parameters()), dict(layer.named_parameters())
    return [
        *_copy_norms(head, layer, model),
        *(
            name
            for name in _projections()
            if not (name in stored and _copy_columns(into[name], stored[name]))
        ),
    ]


def _start_from_identity(head: Eagle1Head, model: Any) -> None:
    """The layer passes its feature on, and learns what to add.

    Features are normed, the target's layer adds to a residual stream that is not: as it stands, its
    sums are far off. Attention reads the feature as that layer's own norm would have given it.
    """
    layer, last = head.layers[0], model.base_model.layers[-1]
    attention: Any = layer.self_attn
    attention.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()  # type: ignore[operator, union-attr]
    own, final = getattr(last, "input_layernorm", None), getattr(model.base_model, "norm", None)
    if _has_scale(own) and _has_scale(final):
        ratio = _scale(own) / _scale(final)
        if bool(torch.isfinite(ratio).all()):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight.mul_(ratio)


def _copy_norms(head: EagleHead | Eagle1Head, layer: Any, model: Any) -> list[str]:
    last = model.base_model.layers[-1]
    gemma = hasattr(last, "pre_feedforward_layernorm")  # its other one ends the attention
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    norms = {"post_attention_layernorm": (layer, getattr(last, before_mlp, None))}
    if isinstance(head, EagleHead):
        norms["hidden_norm"] = (layer, getattr(last, "input_layernorm", None))
        norms["norm"] = (head, getattr(model.base_model, "norm", None))
    return [
        f"{name}.weight"
        for name, (owner, source) in norms.items()
        if not (_has_scale(source) and _copy_columns(getattr(owner, name).weight, _scale(source)))
    ]


def _has_scale(norm: nn.Module | None) -> bool:
    return getattr(norm, "weight", None) is not None


def _scale(norm: Any) -> Tensor:
    """What a norm multiplies by, [d]: its weight, and one more in Gemma."""
    weight: Tensor = norm.weight
    of_ones = norm(torch.ones_like(weight))
    return min((weight, 1 + weight), key=lambda scale: float((of_ones - scale).abs().max()))


def _projections() -> list[str]:
    attention = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
    return [*attention, *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))]


def _copy_columns(into: Tensor, source: Tensor) -> bool:
    """Copies a weight; where `into` also reads an embedding (EAGLE-3), those columns are zero."""
    if into.shape == source.shape:
        into.copy_(source)
        return True
    if into.dim() == 2 and into.shape == (source.shape[0], 2 * source.shape[1]):
        into.zero_()
        into[:, source.shape[1] :] = source
        return True
    return False
