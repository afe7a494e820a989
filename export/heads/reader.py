"""Reads a draft checkpoint of any dialect: every value resolved, with its source, or refused.

Letters: d hidden size of the head, D of the target, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.export.heads import fields
from eagle3.export.heads.assume import Assumptions
from eagle3.export.heads.description import AUX_LAYERS, Head, HeadConfig, TargetFacts
from eagle3.export.heads.dialect import Dialect
from eagle3.export.heads.files import Checkpoint, open_checkpoint
from eagle3.export.heads.layers import aux_layers
from eagle3.export.heads.recognise import recognise
from eagle3.export.heads.rope import rope
from eagle3.export.heads.tensors import check_numbers, check_tensors, layer_name
from eagle3.export.heads.ties import embedding_is_own, with_lm_head
from eagle3.export.heads.values import CONFIG, DEFAULT, FLAG, TENSORS, Values
from eagle3.export.heads.vocabulary import target_ids
from eagle3.runtime.errors import CheckpointError


def read_head(
    source: str | Path,
    target: TargetFacts,
    aux_layer_ids: Sequence[int] | None = None,
    assume: Mapping[str, str] | None = None,
) -> Head:
    """Reads the folder or hub id `source`.

    aux_layer_ids: hidden_states indices, which override the checkpoint's. assume: what the user
    decided, as `parse_assumptions` returns it. Raises CheckpointError naming the key or tensor and
    both values.
    """
    head = _read(open_checkpoint(source), target, aux_layer_ids, assume or {})
    check_numbers(head.checkpoint.weights)
    return head


def reread(
    head: Head,
    aux_layer_ids: Sequence[int] | None = None,
    assume: Mapping[str, str] | None = None,
) -> Head:
    """The same checkpoint under another reading, from memory: weights are shared, not copied.

    What is not given here stays as it was given when `head` was read. Raises CheckpointError where
    the checkpoint cannot be read so.
    """
    layers = head.aux_layer_ids if aux_layer_ids is None else tuple(aux_layer_ids)
    return _read(head.checkpoint, head.target, layers, {**head.assume, **(assume or {})})


def _read(
    checkpoint: Checkpoint,
    target: TargetFacts,
    aux_layer_ids: Sequence[int] | None,
    given: Mapping[str, str],
) -> Head:
    assume = Assumptions(given)
    dialect, known_by = recognise(checkpoint, assume)
    raw = _without(checkpoint.raw, assume.ignored())
    dialect.check_keys(raw)
    layer = dialect.layer_config(raw)
    levels = dialect.levels(raw)
    values = Values([{k: v for k, v in each.items() if k in keys} for each, keys in levels], assume)
    values.note("dialect", known_by.value, known_by.source)
    if assume.ignored():
        values.note("ignored config keys", sorted(assume.ignored()), FLAG)
    config = _config(dialect, values, layer, target, checkpoint.weights)
    layers = aux_layers(dialect, raw, assume, target.num_layers, aux_layer_ids)
    values.resolved = {AUX_LAYERS: layers, **values.resolved}
    config = replace(config, aux_layer_ids=tuple(layers.value))
    weights = checkpoint.weights
    if config.method == "eagle3":
        weights = with_lm_head(config, values, weights)
        config = replace(config, own_embedding=embedding_is_own(config, values, weights, target))
    else:
        _check_eagle1(config)
        embedding_is_own(config, values, weights, target)
        values.note("lm_head", "the target's", DEFAULT)
    _check_fit(config, target, weights, layers.source)
    check_tensors(config, weights)
    ids = target_ids(
        weights,
        config.draft_vocab_size,
        config.vocab_size,
        assume.take("d2t") if "d2t" in weights else None,
    )
    _note_vocabulary(values, given, weights)
    assume.check_all_taken(f"this head ({dialect.name})")
    config = replace(config, conventions=values.resolved)
    official = _official_names(weights)
    flag = None if aux_layer_ids is None else tuple(aux_layer_ids)
    return Head(config, official, ids, checkpoint, target, flag, dict(given))


def _without(raw: Mapping[str, Any], ignored: frozenset[str]) -> dict[str, Any]:
    """The config less the keys that the user wants passed over, wherever they stand in it.

    Raises CheckpointError for one that stands nowhere.
    """
    found: set[str] = set()

    def strip(level: Mapping[str, Any]) -> dict[str, Any]:
        found.update(ignored.intersection(level))
        kept = {key: value for key, value in level.items() if key not in ignored}
        return {k: strip(v) if isinstance(v, Mapping) else v for k, v in kept.items()}

    stripped = strip(raw)
    if absent := sorted(ignored - found):
        raise CheckpointError(f"--assume ignore: the head's config has no {', '.join(absent)}")
    return stripped


def _config(
    dialect: Dialect,
    values: Values,
    layer: Mapping[str, Any],
    target: TargetFacts,
    weights: Mapping[str, Tensor],
) -> HeadConfig:
    """All but the fused layers and the embedding."""
    if (depth := values.integer("num_hidden_layers", 1)) != 1:
        raise CheckpointError(
            f"the head's num_hidden_layers is {depth}; heads of one decoder layer are supported"
        )
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
        aux_layer_ids=(),
        conventions={},
        method=dialect.method,
        dialect=dialect.name,
        **(_eagle1(values) if dialect.method == "eagle1" else {}),
        **(_eagle3(dialect, values, layer, weights) if dialect.method == "eagle3" else {}),
    )


def _head_dim(values: Values, hidden_size: int, num_heads: int) -> int:
    head_dim = values.integer("head_dim", max(hidden_size // num_heads, 1))
    if values.resolved["head_dim"].source == DEFAULT and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads} and the "
            "config has no head_dim"
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


def _eagle1(values: Values) -> dict[str, bool]:
    """What EAGLE-1/2 heads differ in."""
    switches = {"qkv_bias": values.switch("qkv_bias"), "fc_bias": values.switch("bias", True)}
    values.resolved["fc bias"] = values.resolved.pop("bias")
    return switches


def _eagle3(
    dialect: Dialect, values: Values, layer: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What EAGLE-3 heads differ in."""
    for key, meanings in dialect.ambiguous.items():
        if values.given(key) and values.assume.take(key) is None:
            value = values.given(key)[key]
            raise CheckpointError(f"the head's config has {key} {value!r:.40}: {meanings}")

    def by_tensors(key: str, name: str) -> bool:
        """Without a word of the config, a norm is there if its weights are."""
        has = any(tensor.startswith(name) for tensor in weights)
        return values.switch(key, has, TENSORS if has else DEFAULT)

    if dialect.model_types is not None and dialect.nested:
        is_qwen3 = layer.get("model_type") == "qwen3"
        qk_norm = values.switch("qk_norm", is_qwen3, f"{CONFIG} (model_type)")
    else:
        qk_norm = by_tensors("qk_norm", f"{layer_name(weights)}.self_attn.q_norm.")
    own_width = values.given("target_hidden_size")
    return {
        "target_hidden_size": values.integer("target_hidden_size") if own_width else None,
        "norm_before_residual": values.switch("norm_before_residual", dialect.norm_before_residual),
        "norm_before_fc": by_tensors("norm_before_fc", "input_norm."),
        "fc_norm": by_tensors("fc_norm", "fc_norm."),
        "norm_output": values.switch("norm_output"),
        "qk_norm": qk_norm,
    }


def _check_eagle1(config: HeadConfig) -> None:
    if config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"the head's draft_vocab_size is {config.draft_vocab_size}, but an EAGLE-1/2 head uses "
            f"the target's lm_head, over all {config.vocab_size}"
        )


def _check_fit(
    config: HeadConfig, target: TargetFacts, weights: Mapping[str, Tensor], source: str
) -> None:
    """The numbers must be the target's, and agree with each other and with fc."""
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
    fc, width = weights.get("fc.weight"), len(config.aux_layer_ids) * target.hidden_size
    if config.method == "eagle3" and fc is not None and fc.dim() == 2 and fc.shape[1] != width:
        raise CheckpointError(
            f"tensor fc.weight is {list(fc.shape)}, the config asks for "
            f"{[config.hidden_size, width]}, for the fused layers {list(config.aux_layer_ids)} "
            f"({source}); give those that the head was trained with, as hidden_states indices, "
            "with --aux-layers"
        )


def _note_vocabulary(
    values: Values, given: Mapping[str, str], weights: Mapping[str, Tensor]
) -> None:
    if "d2t" not in weights:
        values.note("d2t", "none: draft ids are the target's", TENSORS)
    else:
        reading = given.get("d2t", "offsets")
        values.note("d2t", reading, FLAG if "d2t" in given else DEFAULT)


def _official_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer of an EAGLE-3 head as `midlayer`; that of an EAGLE-1/2 head stays `layers.0`."""
    if "layers.0.hidden_norm.weight" not in weights:
        return dict(weights)
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: t
        for name, t in weights.items()
    }
