"""Determines the dialect of a checkpoint from its configuration and its tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle3.export.heads.assume import Assumptions
from eagle3.export.heads.checkpoint_files import Checkpoint
from eagle3.export.heads.dialects import specforge, speculators
from eagle3.export.heads.dialects.dialect import Dialect
from eagle3.export.heads.dialects.eagle1 import EAGLE1
from eagle3.export.heads.dialects.official import EAGLE_KEYS, OFFICIAL
from eagle3.export.heads.head_config import Resolved
from eagle3.runtime.errors import CheckpointError

_EAGLE3 = {
    "official": OFFICIAL,
    "specforge": specforge.SPECFORGE,
    "speculators": speculators.SPECULATORS,
}
# Tensors that an EAGLE-3 head has and an EAGLE-1/2 head lacks; both can name the layer layers.0.
_NOT_EAGLE1 = ("norm.weight", "layers.0.hidden_norm.weight")


def recognize(checkpoint: Checkpoint, assume: Assumptions) -> tuple[Dialect, Resolved]:
    """Return the dialect and its source. Raises CheckpointError if it is none of them."""
    raw, names = checkpoint.raw, set(checkpoint.weights)
    is_nested = _is_nested(checkpoint)
    has_midlayer = any(name.startswith("midlayer.") for name in names)
    if not has_midlayer and not any(name.startswith("layers.0.") for name in names):
        raise CheckpointError(
            "no tensor is named midlayer.* or layers.0.*: this is not an EAGLE head; found "
            f"{', '.join(sorted(names)[:6])}"
        )
    if not is_nested and not has_midlayer and not names.intersection(_NOT_EAGLE1):
        return EAGLE1, Resolved(EAGLE1.name, "tensors")
    assumed = assume.take("dialect")
    if assumed is not None:
        dialect, source = _wherever(_EAGLE3[assumed], is_nested), "flag"
    elif is_nested:
        dialect, source = speculators.SPECULATORS, "config (transformer_layer_config)"
    elif not has_midlayer:
        raise CheckpointError(
            "the head's layer is named layers.0, as in the speculators dialect, but its config has "
            "no transformer_layer_config, so that defaults and layer ids could be of any dialect: "
            f"choose one with --assume dialect={'|'.join(_EAGLE3)}"
        )
    elif _names(raw, specforge.ARCHITECTURE) and not _is_own(raw):
        dialect, source = specforge.SPECFORGE, "config (architectures)"
    else:
        dialect, source = OFFICIAL, "tensors"
    return dialect, Resolved(dialect.name, source)


def _wherever(dialect: Dialect, is_nested: bool) -> Dialect:
    """Return the dialect's conventions for a config in the layout of another dialect."""
    head_keys = dialect.head_keys | speculators.SPECULATORS.head_keys
    return replace(dialect, nested=is_nested, head_keys=head_keys, eagle_keys=EAGLE_KEYS)


def _is_nested(checkpoint: Checkpoint) -> bool:
    """Return whether the config is that of speculators. Raises CheckpointError for its other
    methods.
    """
    raw = checkpoint.raw
    kind = raw.get("speculators_model_type")
    if kind is not None and kind != speculators.MODEL_TYPE:
        raise CheckpointError(
            f"the head's speculators_model_type is {kind!r:.40}; supported is "
            f"{speculators.MODEL_TYPE!r}"
        )
    if kind is not None and raw.get("transformer_layer_config") is None:
        raise CheckpointError(
            f"the head's speculators_model_type is {kind!r}, but its config has no "
            "transformer_layer_config"
        )
    return raw.get("transformer_layer_config") is not None


def _names(raw: Mapping[str, Any], architecture: str) -> bool:
    named = raw.get("architectures")
    return isinstance(named, list) and architecture in named


def _is_own(raw: Mapping[str, Any]) -> bool:
    """Whether this project trained it: the official layout, under the architecture name SGLang
    needs.
    """
    return str(raw.get("trained_by", "")).startswith("eagle3 ")
