"""The RoPE parameters of a head. Anything that is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.export.graphs.static_rope import LENGTH_DEPENDENT_ROPE
from eagle3.export.heads.dialects.fields import boolean, mapping, number
from eagle3.runtime.errors import CheckpointError

DEFAULT_ROPE_THETA = 10000.0  # the official training configurations do not contain one
# RoPE types that one table can express, with the factors that each requires and allows.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}


def rope(layer: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return RoPE parameters in transformers' form (`rope_type`, `rope_theta`, scaling factors),
    and whether the config contains the theta.

    layer: the decoder layer's keys, in the older form (`rope_theta`, `rope_scaling`) or the newer
    (`rope_parameters`). Raises CheckpointError for a type that one table cannot express, a value
    out of range, or an unknown key.
    """
    scaling = _scaling(layer)
    kind = _kind(scaling)
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    known |= {*_NEEDED[kind], *_OPTIONAL.get(kind, ()), *(["truncate"] if kind == "yarn" else [])}
    foreign = sorted(set(scaling) - known)
    if foreign:
        raise CheckpointError(
            f"the head's RoPE of type '{kind}' has {', '.join(foreign)}, which is not supported; "
            "if it does not change what the head computes, say so with --assume ignore=KEY"
        )
    values = {k: v for k, v in scaling.items() if k in (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))}
    values = {"rope_type": kind, **{k: _number(scaling, k) for k in values}}
    missing = [key for key in _NEEDED[kind] if key not in values]
    if missing:
        raise CheckpointError(f"the head's RoPE of type '{kind}' needs {', '.join(missing)}")
    if "truncate" in scaling:
        values["truncate"] = boolean(scaling, "truncate")
    for where in (layer, scaling):
        if where.get("partial_rotary_factor") not in (None, 1):
            raise CheckpointError(
                f"the head's partial_rotary_factor is {where['partial_rotary_factor']}; only heads "
                "that rotate whole vectors (1.0) are supported"
            )
    nested = scaling if "rope_theta" in scaling else layer
    theta = number(nested, "rope_theta", DEFAULT_ROPE_THETA)
    return {**values, "rope_theta": theta}, nested.get("rope_theta") is not None


def _scaling(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of rope_parameters or rope_scaling, without nulls."""
    found = [mapping(layer, key) for key in ("rope_parameters", "rope_scaling")]
    found = [{k: v for k, v in each.items() if v is not None} for each in found]
    found = [each for each in found if each]
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            f"the head's rope_parameters {found[0]} and rope_scaling {found[1]} differ"
        )
    return dict(found[0]) if found else {}


def _kind(scaling: dict[str, Any]) -> str:
    """Remove the type from `scaling`, under its newer or its older name, and return it."""
    older = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", older or "default")
    if kind in LENGTH_DEPENDENT_ROPE:
        raise CheckpointError(f"the head's RoPE of type '{kind}' depends on the request's length")
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise CheckpointError(
            f"the head's rope_type is {kind!r:.80}; supported are {', '.join(_NEEDED)}"
        )
    return kind


def _number(scaling: Mapping[str, Any], key: str) -> Any:
    """Return a checked value in the type it was stored in; the original length stays an integer."""
    number(scaling, key)
    return scaling[key]
