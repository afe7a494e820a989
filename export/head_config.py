"""Reads an EAGLE-3 checkpoint in the official layout into one fully resolved description.

Nothing is guessed: every value says whether it stood in the configuration, is the dialect's
documented default, or came from a flag; what is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.export.head_files import head_folder, read_config, read_weights
from eagle3.export.target import _LENGTH_DEPENDENT_ROPE
from eagle3.runtime.errors import CheckpointError

DIALECT = "eagle3-official"
OWN_EMBEDDING = "embed_tokens.weight"
DEFAULT_ROPE_THETA = 10000.0  # the official training configuration names none
_AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Keys of other dialects or newer heads that change the computation and are not read here.
_REFUSED_KEYS = (
    "transformer_layer_config",
    "speculators_model_type",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "q_norm",
    "k_norm",
    "use_qk_norm",
    "sliding_window",
)
# RoPE types that one table expresses, with the factors each one needs.
_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_ROPE_NUMBERS = (
    *_ROPE_TYPES["llama3"],
    "rope_theta",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_MAX_NUMBER = 1e12


@dataclass(frozen=True)
class Resolved:
    """A value and where it came from: "config", "dialect default", "flag" or "weights"."""

    value: Any
    source: str


@dataclass(frozen=True)
class HeadConfig:
    """An EAGLE-3 head (method section 2). Widths: d hidden, A = heads * head_dim."""

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
    _refuse_dialect(raw, weights)
    config = _resolve(raw, target, aux_layer_ids)
    _check_tensors(config, target, weights)
    if OWN_EMBEDDING in weights:
        used = Resolved("the target's; the head's own copy is not read", "dialect default")
        config = replace(config, conventions={**config.conventions, "embedding": used})
    return Head(config, weights, _target_ids(config, weights))


def _refuse_dialect(raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
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
            "supported; only EAGLE-3 heads in the official layout are"
        )
    own_width = raw.get("target_hidden_size")
    if own_width is not None and own_width != raw.get("hidden_size"):
        raise CheckpointError(
            f"the head's target_hidden_size {own_width} differs from its hidden_size "
            f"{raw.get('hidden_size')}: a head with a width of its own is not supported"
        )
    if any(name.startswith("midlayer.") for name in weights):
        return
    fc = weights.get("fc.weight")
    if (
        fc is not None
        and "layers.0.self_attn.q_proj.weight" in weights
        and "norm.weight" not in weights
    ):
        raise CheckpointError(
            f"this is an EAGLE-1/2 head (fc.weight {list(fc.shape)}, no midlayer, no norm); "
            "only EAGLE-3 heads in the official layout are supported"
        )
    raise CheckpointError(
        "no tensor is named midlayer.*: this is no EAGLE-3 head in the official layout; found "
        f"{', '.join(sorted(weights)[:6])}"
    )


def _resolve(
    raw: Mapping[str, Any], target: TargetFacts, aux_layer_ids: Sequence[int] | None
) -> HeadConfig:
    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads} and the "
            "config has no head_dim"
        )
    num_kv_heads = _integer(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    vocab_size = _integer(raw, "vocab_size", target.vocab_size)
    rope, rope_source = _rope(raw)
    layers, layers_source = _aux_layers(raw, target, aux_layer_ids)
    return HeadConfig(
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_integer(raw, "head_dim", max(hidden_size // num_heads, 1)),
        rms_norm_eps=_number(raw, "rms_norm_eps", default=1e-6, high=1.0),
        hidden_act=str(raw.get("hidden_act", "silu")),
        attention_bias=_boolean(raw, "attention_bias"),
        mlp_bias=_boolean(raw, "mlp_bias"),
        rope=rope,
        max_position_embeddings=_integer(raw, "max_position_embeddings", 2048),
        draft_vocab_size=_integer(raw, "draft_vocab_size", vocab_size),
        vocab_size=vocab_size,
        aux_layer_ids=layers,
        conventions={
            "aux_layer_ids (hidden_states indices)": Resolved(list(layers), layers_source),
            "rope": Resolved(dict(rope), rope_source),
            "norm_before_residual": Resolved(False, "dialect default"),
            "norm_output": Resolved(False, "dialect default"),
            "norm_before_fc": Resolved(False, "dialect default"),
        },
    )


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"the head's config needs {key} as a positive integer, found {value!r}"
        )
    return value


def _number(
    raw: Mapping[str, Any], key: str, default: float | None = None, high: float = _MAX_NUMBER
) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 < value <= high:
        raise CheckpointError(
            f"the head's config has {key} {value!r:.80}; a number above 0 and at most {high:g} is "
            "allowed"
        )
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"the head's config has {key} {value!r:.80}; allowed: true, false")
    return bool(value)


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the head's {key} is {value!r}, not an object")
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """RoPE parameters as transformers reads them: `rope_type`, `rope_theta`, scaling factors."""
    scaling = dict(_object(raw, "rope_parameters") or _object(raw, "rope_scaling"))
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    kind = scaling.setdefault("rope_type", "default")
    if not isinstance(kind, str):
        raise CheckpointError(
            f"the head's rope_type is {kind!r:.80}; supported are {', '.join(_ROPE_TYPES)}"
        )
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise CheckpointError(f"the head's RoPE of type '{kind}' depends on the request's length")
    missing = [key for key in _ROPE_TYPES.get(kind, ()) if scaling.get(key) is None]
    if kind not in _ROPE_TYPES or missing:
        reason = f"needs {', '.join(missing)}" if missing else "is unknown"
        raise CheckpointError(
            f"the head's RoPE of type '{kind}' {reason}; supported are {', '.join(_ROPE_TYPES)}"
        )
    for key in _ROPE_NUMBERS:
        if scaling.get(key) is not None:
            _number(scaling, key)
    for where in (raw, scaling):
        if where.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"the head's partial_rotary_factor is {where['partial_rotary_factor']}; only heads "
                "that rotate whole vectors (1.0) are supported"
            )
    if scaling.get("rope_theta") is not None:
        return scaling, "config"
    source = "config" if raw.get("rope_theta") is not None else "dialect default"
    return {**scaling, "rope_theta": _number(raw, "rope_theta", DEFAULT_ROPE_THETA)}, source


def _aux_layers(
    raw: Mapping[str, Any], target: TargetFacts, flag: Sequence[int] | None
) -> tuple[tuple[int, ...], str]:
    """The fused layers as hidden_states indices.

    In this dialect the checkpoint counts layer outputs, which is one less than the index.
    """
    stored = _object(raw, "eagle_config").get(_AUX_LAYERS_KEY)
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
        depth = target.num_layers
        layers, source = (2, depth // 2, depth - 3), "dialect default"
    low_to_high = list(layers) == sorted(set(layers))
    if len(layers) != 3 or not low_to_high or layers[0] < 0 or layers[-1] >= target.num_layers:
        raise CheckpointError(
            f"aux layers {list(layers)} ({source}) do not fit a target of {target.num_layers} "
            f"layers: three different hidden_states indices from 0 to {target.num_layers - 1}, low "
            "to high, are needed; give them with --aux-layers"
        )
    return layers, source


def expected_tensors(config: HeadConfig, target: TargetFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the official layout with its shape."""
    d, wide = config.hidden_size, config.intermediate_size
    a, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attn, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(config.aux_layer_ids) * target.hidden_size),
        f"{attn}.q_proj.weight": (a, 2 * d),
        f"{attn}.k_proj.weight": (kv, 2 * d),
        f"{attn}.v_proj.weight": (kv, 2 * d),
        f"{attn}.o_proj.weight": (d, a),
        f"{mlp}.gate_proj.weight": (wide, d),
        f"{mlp}.up_proj.weight": (wide, d),
        f"{mlp}.down_proj.weight": (d, wide),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.input_layernorm.weight": (d,),
        "midlayer.post_attention_layernorm.weight": (d,),
        "norm.weight": (d,),
        "lm_head.weight": (config.draft_vocab_size, d),
    }
    if config.attention_bias:
        widths = {"q": a, "k": kv, "v": kv, "o": d}
        shapes |= {f"{attn}.{x}_proj.bias": (n,) for x, n in widths.items()}
    if config.mlp_bias:
        widths = {"gate": wide, "up": wide, "down": d}
        shapes |= {f"{mlp}.{x}_proj.bias": (n,) for x, n in widths.items()}
    if config.draft_vocab_size != config.vocab_size:
        size, whole = config.draft_vocab_size, config.vocab_size
        shapes |= {"d2t": (size,), "t2d": (whole,)}
    return shapes


def _check_tensors(config: HeadConfig, target: TargetFacts, weights: Mapping[str, Tensor]) -> None:
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the head's hidden_size {config.hidden_size} is not the target's "
            f"{target.hidden_size}; is it a head for another target?"
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head's vocab_size {config.vocab_size} is not the target's {target.vocab_size}; "
            "is it a head for another target?"
        )
    expected = expected_tensors(config, target)
    mapping = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    optional = {**mapping, OWN_EMBEDDING: (config.vocab_size, config.hidden_size)}
    missing = sorted(set(expected) - set(weights))
    unexpected = sorted(set(weights) - set(expected) - set(optional))
    if missing or unexpected:
        raise CheckpointError(
            f"the head's tensors are not those of the official layout: missing {missing}, "
            f"unexpected {unexpected}"
        )
    expected |= {name: shape for name, shape in optional.items() if name in weights}
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} is {list(weights[name].shape)}, the config asks for {list(shape)}"
            )
    _check_dtypes({name: weights[name].dtype for name in expected})
    broken = sorted(n for n in expected if not bool(torch.isfinite(weights[n].float()).all()))
    if broken:
        raise CheckpointError(f"these tensors hold NaN or Inf: {', '.join(broken)}")


def _check_dtypes(dtypes: Mapping[str, torch.dtype]) -> None:
    """Ids are integers, weights are not: anything else was stored in a way we do not know."""
    for name, dtype in dtypes.items():
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if name == "d2t" and not is_integer:
            raise CheckpointError(f"tensor d2t is {dtype}; it must be of an integer dtype")
        if name not in ("d2t", "t2d") and not dtype.is_floating_point:
            raise CheckpointError(f"tensor {name} is {dtype}; weights must be floating point")


def _target_ids(config: HeadConfig, weights: Mapping[str, Tensor]) -> np.ndarray:
    """d2t as stored (offsets; by some exporters absolute ids) -> the target's ids [Vd] int64."""
    size, whole = config.draft_vocab_size, config.vocab_size
    if "d2t" not in weights:
        return np.arange(size, dtype=np.int64)
    d2t = weights["d2t"].to(torch.int64).numpy()
    t2d = weights["t2d"].to(torch.bool).numpy() if "t2d" in weights else None
    for ids in (d2t + np.arange(len(d2t)), d2t):
        ascending = bool(np.all(np.diff(ids) > 0)) and ids[0] >= 0 and ids[-1] < whole
        if ascending and (t2d is None or np.array_equal(np.flatnonzero(t2d), ids)):
            return ids
    raise CheckpointError(
        f"d2t [{size}] maps to the target's vocabulary ({whole}) neither as offsets nor as "
        "absolute ids: either reading must be ascending, unique, below the vocabulary size and "
        "agree with t2d"
    )
