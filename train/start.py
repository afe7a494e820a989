"""Where a head's weights start from: the target's own last layer, norm and lm_head.

A head that starts there learns far faster than a random one (method section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eagle3.export.head_graph import Eagle1Head, EagleHead

Report = Callable[[str], None]
_RANDOM_STD = 0.02


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
    if different:
        report(f"started at random, the target has no such weights: {', '.join(different)}")


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
    decoder = model.base_model
    source = dict(decoder.layers[-1].named_parameters())
    wanted = {name: name for name in ("post_attention_layernorm.weight", *_projections())}
    if isinstance(head, EagleHead):
        layer: nn.Module = head.midlayer
        wanted["hidden_norm.weight"] = "input_layernorm.weight"
        source_norm = getattr(decoder, "norm", None)
        if source_norm is not None and source_norm.weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(source_norm.weight)
    else:
        layer = head.layers[0]
    into = dict(layer.named_parameters())
    return [
        name
        for name, stored in wanted.items()
        if not (stored in source and _copy_columns(into[name], source[stored]))
    ]


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
