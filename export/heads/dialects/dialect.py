"""The description of a dialect: where it keeps its values, and what they mean by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3.export.heads.dialects.fields import mapping
from eagle3.runtime.errors import CheckpointError

AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"

LAYER_KEYS = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "mlp_bias",
        "max_position_embeddings",
        "vocab_size",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
    }
)
"""Keys that describe the decoder layer, in any dialect."""
EAGLE3_KEYS = frozenset(
    {
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "tie_word_embeddings",
        AUX_LAYERS_KEY,
    }
)
"""Keys that describe the rest of an EAGLE-3 head."""

# Keys that do not affect what the head computes.
_HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "has_no_defaults_at_init",
        "hidden_dropout",
        "initializer_range",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "torch_dtype",
        "trained_by",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
# Switches, with the values that match what every head here computes.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "logit_scale": (1,),
    "next_layer_regular": (True,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}
# Top-level keys that contain other keys, or only names.
_HOLDERS = frozenset(
    {"eagle_config", "transformer_layer_config", "speculators_config", "speculators_model_type"}
)
_OFF: tuple[Any, ...] = (None, False, 0, [], {}, "")


@dataclass(frozen=True)
class Dialect:
    """One way of storing a head.

    name: its name in the manifest. method: "eagle3" or "eagle1". layer_ids: what a stored layer id
    counts, "outputs" (the hidden_states index minus one) or "inputs" (the index itself). nested:
    the layer's keys are in `transformer_layer_config`. norm_before_residual: its default.
    head_keys: keys read beside the layer's. eagle_keys: keys read in `eagle_config`. ambiguous:
    key -> its possible meanings; refused if present, unless the user decides. model_types: the
    supported values, where they select the layer's code.
    """

    name: str
    method: str
    layer_ids: str
    norm_before_residual: bool = False
    nested: bool = False
    head_keys: frozenset[str] = EAGLE3_KEYS
    eagle_keys: frozenset[str] = frozenset()
    ambiguous: Mapping[str, str] = field(default_factory=dict)
    model_types: tuple[str, ...] | None = None

    def layer_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the object with the keys of the decoder layer."""
        if not self.nested:
            return raw
        layer = mapping(raw, "transformer_layer_config")
        kind = layer.get("model_type", "llama")
        if self.model_types is not None and kind not in self.model_types:
            raise CheckpointError(
                f"the head's transformer_layer_config is of model_type {kind!r:.40}; supported are "
                f"{', '.join(self.model_types)}"
            )
        return layer

    def levels(self, raw: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], frozenset[str]]]:
        """Return the objects of a config that contain keys, each with the keys that are read
        there.
        """
        top = self.head_keys | _HOLDERS | (frozenset() if self.nested else LAYER_KEYS)
        found = [(raw, top), (mapping(raw, "eagle_config"), self.eagle_keys)]
        if self.nested:
            found.append((self.layer_config(raw), LAYER_KEYS))
        return found

    def read_keys(self, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the same objects with only those keys."""
        return [{k: v for k, v in each.items() if k in keys} for each, keys in self.levels(raw)]

    def check_keys(self, raw: Mapping[str, Any]) -> None:
        """Raise CheckpointError that names every key that is not read and could change
        the result.
        """
        foreign = [
            f"{key} = {value!r:.60}"
            for level, read in self.levels(raw)
            for key, value in level.items()
            if key not in read | _HARMLESS and not _is_neutral(key, value, level)
        ]
        if foreign:
            raise CheckpointError(
                f"the head's config has {'; '.join(sorted(foreign))}: not supported in a head of "
                f"the {self.name} dialect, so the head is refused. If it does not change what the "
                "head computes, say so with --assume ignore=KEY"
            )


def _is_neutral(key: str, value: Any, level: Mapping[str, Any]) -> bool:
    if value in _NEUTRAL.get(key, _OFF) or value is None:
        return True
    kinds = level.get("layer_types")
    all_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if key == "layer_types":
        return all_full
    if key == "tie_word_embeddings":  # the target's, in a nested layer's config
        return True
    unused = level.get("use_sliding_window") is False  # Qwen's way to disable the window
    return key == "sliding_window" and (unused or all_full)
