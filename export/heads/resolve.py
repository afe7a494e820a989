"""Resolves the configuration of a head: every key under its dialect's defaults, and consistency.

Letters: d hidden size of the head, D of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eagle3.export.heads.dialects import fields
from eagle3.export.heads.dialects.dialect import Dialect
from eagle3.export.heads.head_config import HeadConfig, TargetSizes
from eagle3.export.heads.head_rope import rope
from eagle3.export.heads.tensors import layer_name
from eagle3.export.heads.values import CONFIG, DEFAULT, FLAG, TENSORS, Values
from eagle3.runtime.errors import CheckpointError


def head_config(
    dialect: Dialect,
    raw: Mapping[str, Any],
    values: Values,
    target: TargetSizes,
    weights: Mapping[str, Tensor],
    layers: tuple[int, ...],
) -> HeadConfig:
    """Return the whole configuration except the embedding; `values` records each source.

    raw: config.json. weights: by the checkpoint's names, which show what a config omits. layers:
    the fused layers. Raises CheckpointError that names the key.
    """
    if (depth := values.integer("num_hidden_layers", 1)) != 1:
        raise CheckpointError(
            f"the head's num_hidden_layers is {depth}; heads of one decoder layer are supported"
        )
    layer, is_eagle1 = dialect.layer_config(raw), dialect.method == "eagle1"
    hidden_size = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads")
    vocab_size = values.integer("vocab_size", target.vocab_size)
    return HeadConfig(
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(values, hidden_size, num_heads),
        rms_norm_eps=values.number("rms_norm_eps", default=1e-6, high=1.0),
        hidden_act=_hidden_act(values),
        attention_bias=values.switch("attention_bias"),
        mlp_bias=values.switch("mlp_bias"),
        rope=_rope(values, layer),
        max_position_embeddings=values.integer("max_position_embeddings", 2048),
        draft_vocab_size=values.integer("draft_vocab_size", vocab_size),
        vocab_size=vocab_size,
        aux_layer_ids=layers,
        conventions={},
        method=dialect.method,
        dialect=dialect.name,
        **(_eagle1(values) if is_eagle1 else _eagle3(dialect, values, layer, weights)),
    )


def _head_dim(values: Values, hidden_size: int, num_heads: int) -> int:
    head_dim = values.integer("head_dim", max(hidden_size // num_heads, 1))
    if values.resolved["head_dim"].source == DEFAULT and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "the config has no head_dim"
        )
    return head_dim


def _hidden_act(values: Values) -> str:
    given = values.given("hidden_act")
    values.note("hidden_act", given.get("hidden_act", "silu"), CONFIG if given else DEFAULT)
    return str(values.resolved["hidden_act"].value)


def _rope(values: Values, layer: Mapping[str, Any]) -> dict[str, Any]:
    parameters, names_theta = rope(layer)
    source = CONFIG if names_theta else f"{DEFAULT} (rope_theta)"
    if (theta := values.assume.take("rope_theta")) is not None:
        parameters["rope_theta"] = fields.number({"rope_theta": float(theta)}, "rope_theta")
        source = f"{FLAG} (rope_theta)"
    values.note("rope", parameters, source)
    return parameters


def _eagle1(values: Values) -> dict[str, Any]:
    """Return the fields that only EAGLE-1/2 heads have."""
    switches = {"qkv_bias": values.switch("qkv_bias"), "fc_bias": values.switch("bias", True)}
    values.resolved["fc bias"] = values.resolved.pop("bias")
    return switches


def _eagle3(
    dialect: Dialect, values: Values, layer: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the fields that only EAGLE-3 heads have."""
    for key, meanings in dialect.ambiguous.items():
        if values.given(key) and values.assume.take(key) is None:
            value = values.given(key)[key]
            raise CheckpointError(f"the head's config has {key} {value!r:.40}: {meanings}")

    def by_tensors(key: str, name: str) -> bool:
        """If the config is silent, a norm exists if its weights exist."""
        has = any(tensor.startswith(name) for tensor in weights)
        return values.switch(key, has, TENSORS if has else DEFAULT)

    if dialect.model_types is not None and dialect.nested:
        is_qwen3 = layer.get("model_type") == "qwen3"
        qk_norm = values.switch("qk_norm", is_qwen3, f"{CONFIG} (model_type)")
    else:
        qk_norm = by_tensors("qk_norm", f"{layer_name(weights)}.self_attn.q_norm.")
    has_width = bool(values.given("target_hidden_size"))
    width = values.integer("target_hidden_size", values.resolved["hidden_size"].value)
    return {
        "target_hidden_size": width if has_width else None,
        "norm_before_residual": values.switch("norm_before_residual", dialect.norm_before_residual),
        "norm_before_fc": by_tensors("norm_before_fc", "input_norm."),
        "fc_norm": by_tensors("fc_norm", "fc_norm."),
        "norm_output": values.switch("norm_output"),
        "qk_norm": qk_norm,
    }


def check_head_fits(
    config: HeadConfig, target: TargetSizes, weights: Mapping[str, Tensor], source: str
) -> None:
    """Raise CheckpointError unless the sizes match the target's, each other, and fc.

    source: the source of the fused layers. The message has both numbers.
    """
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head's vocab_size {config.vocab_size} is not the target's {target.vocab_size}; "
            "is it a head for another target?"
        )
    if config.target_width != target.hidden_size:
        key = "hidden_size" if config.target_hidden_size is None else "target_hidden_size"
        raise CheckpointError(
            f"the head's {key} {config.target_width} is not the target's hidden_size "
            f"{target.hidden_size}; is it a head for another target? One with a width of its own "
            "has target_hidden_size in its config"
        )
    if config.method == "eagle1" and config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"the head's draft_vocab_size is {config.draft_vocab_size}, but an EAGLE-1/2 head uses "
            f"the target's lm_head, over all {config.vocab_size}"
        )
    fc, width = weights.get("fc.weight"), len(config.aux_layer_ids) * target.hidden_size
    if config.method == "eagle3" and fc is not None and fc.dim() == 2 and fc.shape[1] != width:
        raise CheckpointError(
            f"tensor fc.weight is {list(fc.shape)}, the config requires "
            f"{[config.hidden_size, width]}, for the fused layers {list(config.aux_layer_ids)} "
            f"({source}); give those that the head was trained with, as hidden_states indices, "
            "with --aux-layers"
        )
