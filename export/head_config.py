"""Reads a draft checkpoint in an official layout into one fully resolved description.

Two layouts: EAGLE-3, and EAGLE-1/2, which are one (method section 2). Nothing is guessed: every
value says whether it stood in the configuration, is the dialect's documented default, or came from
a flag; what is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from eagle3.export.head_fields import boolean, integer, mapping, number, rope
from eagle3.export.head_files import head_folder, read_config, read_weights
from eagle3.export.head_tensors import check_tensors, target_ids
from eagle3.runtime.errors import CheckpointError

OWN_EMBEDDING = "embed_tokens.weight"
AUX_LAYERS = "aux_layer_ids (hidden_states indices)"
_AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Keys of other dialects or newer heads that change the computation and are not read here.
_REFUSED_KEYS = (
    "transformer_layer_config",
    "speculators_model_type",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "q_norm",
    "k_norm",
    "use_qk_norm",
    "sliding_window",
)
# What the EAGLE-3 of speculators has and an EAGLE-1/2 head has not; both name the layer layers.0.
_FOREIGN = ("norm.weight", "layers.0.hidden_norm.weight")


@dataclass(frozen=True)
class Resolved:
    """A value and where it came from: "config", "dialect default", "flag" or "weights"."""

    value: Any
    source: str


@dataclass(frozen=True)
class HeadConfig:
    """A draft head (method section 2). Widths: d hidden, A = heads * head_dim.

    method: "eagle3" or "eagle1". attention_bias: q, k, v and o have biases; qkv_bias: all but o.
    aux_layer_ids: hidden_states indices, low to high; index L, of a target of L layers, is the
    final hidden after the target's last norm, and all that an EAGLE-1/2 head reads. norm_output:
    the hidden that is fed back is normed. fc_bias: fc has one (EAGLE-1/2 only).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]
    max_position_embeddings: int
    draft_vocab_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    conventions: Mapping[str, Resolved]
    method: str = "eagle3"
    norm_output: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False

    @property
    def dialect(self) -> str:
        """The layout of the checkpoint."""
        return f"{self.method}-official"

    @property
    def drafter(self) -> str:
        """The runtime's name of the method."""
        return {"eagle1": "eagle", "eagle3": "eagle3"}[self.method]


@dataclass(frozen=True)
class Head:
    """A head's resolved configuration, its weights by official name, and draft -> target ids.

    target_ids [Vd] int64: the target's id of every draft id.
    """

    config: HeadConfig
    weights: Mapping[str, Tensor]
    target_ids: np.ndarray


@dataclass(frozen=True)
class TargetFacts:
    """What of the target a head must fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def read_head(
    source: str | Path, target: TargetFacts, aux_layer_ids: Sequence[int] | None = None
) -> Head:
    """Reads the folder or hub id `source`; `aux_layer_ids` (hidden_states indices) overrides it.

    Raises CheckpointError naming the key or tensor and both values.
    """
    folder = head_folder(source)
    raw = read_config(folder)
    weights = read_weights(folder)
    _refuse_keys(raw)
    config = _resolve(raw, _method(weights), target, aux_layer_ids)
    _check_fit(config, target, weights)
    _check_tensors(config, target, weights)
    if OWN_EMBEDDING in weights:
        used = Resolved("the target's; the head's own copy is not read", "dialect default")
        config = replace(config, conventions={**config.conventions, "embedding": used})
    return Head(config, weights, target_ids(weights, config.draft_vocab_size, config.vocab_size))


def _refuse_keys(raw: Mapping[str, Any]) -> None:
    without_window = raw.get("use_sliding_window") is False  # Qwen's way to say "no window"
    refused = sorted(
        key
        for key in _REFUSED_KEYS
        if raw.get(key) not in (None, False, [], {})
        and not (key == "sliding_window" and without_window)
    )
    if refused:
        raise CheckpointError(
            f"the head's config has {', '.join(refused)}, which changes the computation and is not "
            "supported; only EAGLE heads in the official layouts are"
        )
    own_width = raw.get("target_hidden_size")
    if own_width is not None and own_width != raw.get("hidden_size"):
        raise CheckpointError(
            f"the head's target_hidden_size {own_width} differs from its hidden_size "
            f"{raw.get('hidden_size')}: a head with a width of its own is not supported"
        )


def _method(weights: Mapping[str, Tensor]) -> str:
    """Which layout it is, by the names of the tensors."""
    if any(name.startswith("midlayer.") for name in weights):
        return "eagle3"
    has_layer = any(name.startswith("layers.0.") for name in weights)
    if has_layer and not any(name in weights for name in _FOREIGN):
        return "eagle1"
    raise CheckpointError(
        "no tensor is named midlayer.*, and these are not an EAGLE-1/2 head's: this is no EAGLE "
        f"head in an official layout; found {', '.join(sorted(weights)[:6])}"
    )


def _resolve(
    raw: Mapping[str, Any], method: str, target: TargetFacts, aux_layer_ids: Sequence[int] | None
) -> HeadConfig:
    hidden_size = integer(raw, "hidden_size")
    num_heads, num_kv_heads = _num_heads(raw, hidden_size)
    vocab_size = integer(raw, "vocab_size", target.vocab_size)
    rope_values, rope_source = rope(raw)
    layers, layers_source = _aux_layers(raw, method, target, aux_layer_ids)
    return HeadConfig(
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=integer(raw, "head_dim", max(hidden_size // num_heads, 1)),
        rms_norm_eps=number(raw, "rms_norm_eps", default=1e-6, high=1.0),
        hidden_act=str(raw.get("hidden_act", "silu")),
        attention_bias=boolean(raw, "attention_bias"),
        mlp_bias=boolean(raw, "mlp_bias"),
        rope=rope_values,
        max_position_embeddings=integer(raw, "max_position_embeddings", 2048),
        draft_vocab_size=integer(raw, "draft_vocab_size", vocab_size),
        vocab_size=vocab_size,
        aux_layer_ids=layers,
        conventions={
            AUX_LAYERS: Resolved(list(layers), layers_source),
            "rope": Resolved(dict(rope_values), rope_source),
            **_conventions(raw, method),
        },
        method=method,
        norm_output=boolean(raw, "norm_output"),
        fc_bias=method == "eagle1" and boolean(raw, "bias", default=True),
        qkv_bias=method == "eagle1" and boolean(raw, "qkv_bias"),
    )


def _num_heads(raw: Mapping[str, Any], hidden_size: int) -> tuple[int, int]:
    """Heads of the queries, and of keys and values."""
    num_heads = integer(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads} and the "
            "config has no head_dim"
        )
    num_kv_heads = integer(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_heads, num_kv_heads


def _conventions(raw: Mapping[str, Any], method: str) -> dict[str, Resolved]:
    """What heads of a method differ in, and what decided it."""

    def flag(key: str, default: bool) -> Resolved:
        source = "dialect default" if raw.get(key) is None else "config"
        return Resolved(boolean(raw, key, default), source)

    if method == "eagle1":
        return {
            "fc bias": flag("bias", default=True),
            "lm_head": Resolved("the target's", "dialect default"),
        }
    return {
        "norm_before_residual": Resolved(False, "dialect default"),
        "norm_output": flag("norm_output", default=False),
        "norm_before_fc": Resolved(False, "dialect default"),
    }


def _aux_layers(
    raw: Mapping[str, Any], method: str, target: TargetFacts, flag: Sequence[int] | None
) -> tuple[tuple[int, ...], str]:
    """The fused layers as hidden_states indices, and where they came from.

    In these dialects the checkpoint counts layer outputs, which is one less than the index: [1, 3]
    are hidden_states[2] and [4]. The output of the last of L layers, stored as L - 1, is index L,
    and like hidden_states[L] it is taken after the target's last norm.
    """
    stored, depth = mapping(raw, "eagle_config").get(_AUX_LAYERS_KEY), target.num_layers
    if flag is not None:
        layers, source = tuple(flag), "flag"
    elif raw.get(_AUX_LAYERS_KEY) is not None:
        raise CheckpointError(
            f"the head's config has {_AUX_LAYERS_KEY} {raw[_AUX_LAYERS_KEY]} outside eagle_config; "
            "whether it counts layer outputs (plus one) or hidden_states indices is not known: "
            "give the hidden_states indices with --aux-layers"
        )
    elif stored is not None:
        if not isinstance(stored, list) or any(type(i) is not int for i in stored):
            raise CheckpointError(f"{_AUX_LAYERS_KEY} is {stored!r}, not a list of integers")
        layers, source = tuple(i + 1 for i in stored), "config (layer outputs, plus one)"
    else:
        layers = (depth,) if method == "eagle1" else (2, depth // 2, depth - 3)
        source = "dialect default"
    if method == "eagle1" and layers != (depth,):
        raise CheckpointError(
            f"aux layers {list(layers)} ({source}): an EAGLE-1/2 head reads the final hidden after "
            f"the last norm alone, hidden_states[{depth}] of a target of {depth} layers"
        )
    low_to_high = bool(layers) and list(layers) == sorted(set(layers))
    if not low_to_high or layers[0] < 0 or layers[-1] > depth:
        raise CheckpointError(
            f"aux layers {list(layers)} ({source}) do not fit a target of {depth} layers: they "
            f"must be different hidden_states indices from 0 to {depth} (the final hidden, after "
            "the last norm), low to high; give them with --aux-layers"
        )
    return layers, source


def _check_fit(config: HeadConfig, target: TargetFacts, weights: Mapping[str, Tensor]) -> None:
    """The numbers must be the target's, and agree with each other and with fc."""
    for key in ("hidden_size", "vocab_size"):
        own, others = getattr(config, key), getattr(target, key)
        if own != others:
            raise CheckpointError(
                f"the head's {key} {own} is not the target's {others}; "
                "is it a head for another target?"
            )
    if config.method == "eagle1":
        _check_eagle1(config)
        return
    fc, count = weights.get("fc.weight"), len(config.aux_layer_ids)
    if fc is not None and fc.dim() == 2 and fc.shape[1] != count * target.hidden_size:
        raise CheckpointError(
            f"tensor fc.weight is {list(fc.shape)}, the config asks for "
            f"{[config.hidden_size, count * target.hidden_size]}, for the fused layers "
            f"{list(config.aux_layer_ids)} ({config.conventions[AUX_LAYERS].source}); give those "
            "that the head was trained with, as hidden_states indices, with --aux-layers"
        )


def _check_eagle1(config: HeadConfig) -> None:
    if config.norm_output:
        raise CheckpointError(
            "the head's config has norm_output, but this is an EAGLE-1/2 head, which has no norm"
        )
    if config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"the head's draft_vocab_size is {config.draft_vocab_size}, but an EAGLE-1/2 head uses "
            f"the target's lm_head, over all {config.vocab_size}"
        )


def expected_tensors(config: HeadConfig, target: TargetFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the head's layout with its shape, but those that may be absent."""
    d, wide = config.hidden_size, config.intermediate_size
    a, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_eagle3 = config.method == "eagle3"
    layer, width = ("midlayer", 2 * d) if is_eagle3 else ("layers.0", d)
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
    return {**shapes, **(_eagle3_tensors if is_eagle3 else _eagle1_tensors)(config, target)}


def _eagle1_tensors(config: HeadConfig, target: TargetFacts) -> dict[str, tuple[int, ...]]:
    d = config.hidden_size
    bias = {"fc.bias": (d,)} if config.fc_bias else {}
    return {"fc.weight": (d, d + target.hidden_size), **bias}


def _eagle3_tensors(config: HeadConfig, target: TargetFacts) -> dict[str, tuple[int, ...]]:
    d, size = config.hidden_size, config.draft_vocab_size
    is_reduced = size != config.vocab_size
    return {
        "fc.weight": (d, len(config.aux_layer_ids) * target.hidden_size),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.input_layernorm.weight": (d,),
        "norm.weight": (d,),
        "lm_head.weight": (size, d),
        **({"d2t": (size,), "t2d": (config.vocab_size,)} if is_reduced else {}),
    }


def _check_tensors(config: HeadConfig, target: TargetFacts, weights: Mapping[str, Tensor]) -> None:
    optional: dict[str, tuple[int, ...]] = {OWN_EMBEDDING: (config.vocab_size, config.hidden_size)}
    if config.method == "eagle3":
        optional |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    layout = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3"}[config.method]
    check_tensors(
        f"the official {layout} layout", expected_tensors(config, target), optional, weights
    )
