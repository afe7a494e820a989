"""The tensors of a head: which are required, and whether the existing ones fit.

Letters: d hidden size of the head, D of the target, V target vocabulary, Vd draft vocabulary, A =
heads * head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3.export.heads.head_config import OWN_EMBEDDING, HeadConfig
from eagle3.runtime.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def layer_name(weights: Mapping[str, Tensor]) -> str:
    """Return the name of the decoder layer in a checkpoint: "midlayer" or "layers.0"."""
    is_midlayer = any(name.startswith("midlayer.") for name in weights)
    return "midlayer" if is_midlayer else "layers.0"


def expected_tensors(config: HeadConfig, layer: str) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a head with its shape, except optional ones."""
    is_eagle3 = config.method == "eagle3"
    shapes = _layer_tensors(config, layer, (2 if is_eagle3 else 1) * config.hidden_size)
    return {**shapes, **(_eagle3_tensors(config, layer) if is_eagle3 else _eagle1_tensors(config))}


def _layer_tensors(config: HeadConfig, layer: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the decoder layer, whose q, k and v read `width`."""
    d, wide = config.hidden_size, config.intermediate_size
    a, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        f"{attn}.q_proj.weight": (a, width),
        f"{attn}.k_proj.weight": (kv, width),
        f"{attn}.v_proj.weight": (kv, width),
        f"{attn}.o_proj.weight": (d, a),
        f"{mlp}.gate_proj.weight": (wide, d),
        f"{mlp}.up_proj.weight": (wide, d),
        f"{mlp}.down_proj.weight": (d, wide),
        f"{layer}.post_attention_layernorm.weight": (d,),
    }
    if config.attention_bias or config.qkv_bias:
        widths = {"q": a, "k": kv, "v": kv, **({"o": d} if config.attention_bias else {})}
        shapes |= {f"{attn}.{x}_proj.bias": (n,) for x, n in widths.items()}
    if config.mlp_bias:
        widths = {"gate": wide, "up": wide, "down": d}
        shapes |= {f"{mlp}.{x}_proj.bias": (n,) for x, n in widths.items()}
    if config.qk_norm:
        shapes |= {f"{attn}.{x}_norm.weight": (config.head_dim,) for x in "qk"}
    return shapes


def _eagle1_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    d = config.hidden_size
    bias = {"fc.bias": (d,)} if config.fc_bias else {}
    return {"fc.weight": (d, d + config.target_width), **bias}


def _eagle3_tensors(config: HeadConfig, layer: str) -> dict[str, tuple[int, ...]]:
    d, size, count = config.hidden_size, config.draft_vocab_size, len(config.aux_layer_ids)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, count * config.target_width),
        f"{layer}.hidden_norm.weight": (d,),
        f"{layer}.input_layernorm.weight": (d,),
        "norm.weight": (d,),
        "lm_head.weight": (size, d),
    }
    if size != config.vocab_size:
        shapes["d2t"] = (size,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (count * config.target_width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_width,) for i in range(count)}
    if config.own_embedding:
        shapes[OWN_EMBEDDING] = (config.vocab_size, d)
    return shapes


def check_head_tensors(config: HeadConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for tensors that are missing, unexpected, of a wrong shape or dtype,
    or NaN.

    The message names the tensors, with both shapes if they differ.
    """
    needed = expected_tensors(config, layer_name(weights))
    optional: dict[str, tuple[int, ...]] = {OWN_EMBEDDING: (config.vocab_size, config.hidden_size)}
    if config.method == "eagle3":
        optional |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    missing = sorted(set(needed) - set(weights))
    unexpected = sorted(set(weights) - set(needed) - set(optional))
    if missing or unexpected:
        raise CheckpointError(
            f"the head's tensors are not those that its config requires (dialect {config.dialect}):"
            f" missing {missing}, unexpected {unexpected}"
        )
    expected = {**needed, **{name: shape for name, shape in optional.items() if name in weights}}
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} is {list(weights[name].shape)}, the config requires {list(shape)}"
            )
    _check_dtypes({name: weights[name].dtype for name in expected})


def check_numbers(weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError that names every tensor with NaN or Inf."""
    broken = sorted(n for n, t in weights.items() if not bool(torch.isfinite(t.float()).all()))
    if broken:
        raise CheckpointError(f"these tensors contain NaN or Inf: {', '.join(broken)}")


def _check_dtypes(dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise CheckpointError unless ids are integers and weights are floating point."""
    for name, dtype in dtypes.items():
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if name == "d2t" and not is_integer:
            raise CheckpointError(f"tensor d2t is {dtype}; it must be of an integer dtype")
        if name not in ("d2t", "t2d") and not dtype.is_floating_point:
            raise CheckpointError(f"tensor {name} is {dtype}; weights must be floating point")
