"""Single values of a head's config.json: read by name and type, or refused by name.

Letters as in `head_config`. Every failure is a CheckpointError with the key and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.export.rope import LENGTH_DEPENDENT_ROPE
from eagle3.runtime.errors import CheckpointError

DEFAULT_ROPE_THETA = 10000.0  # the official training configurations name none
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


def integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the key is absent or null. Raises CheckpointError."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"the head's config needs {key} as a positive integer, found {value!r}"
        )
    return value


def number(
    raw: Mapping[str, Any], key: str, default: float | None = None, high: float = _MAX_NUMBER
) -> float:
    """A number in (0, high]; `default` where the key is absent or null. Raises CheckpointError."""
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


def boolean(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """true or false; `default` where the key is absent or null. Raises CheckpointError."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"the head's config has {key} {value!r:.80}; allowed: true, false")
    return default if value is None else value


def mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object, empty where the key is absent or null. Raises CheckpointError."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the head's {key} is {value!r}, not an object")
    return value


def rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """RoPE parameters as transformers reads them (`rope_type`, `rope_theta`, scaling factors), and
    whether the theta stood in the config or is the dialect's default.

    Raises CheckpointError for a type that one table cannot express, or a value out of range.
    """
    scaling = dict(mapping(raw, "rope_parameters") or mapping(raw, "rope_scaling"))
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    kind = scaling.setdefault("rope_type", "default")
    if not isinstance(kind, str):
        raise CheckpointError(
            f"the head's rope_type is {kind!r:.80}; supported are {', '.join(_ROPE_TYPES)}"
        )
    if kind in LENGTH_DEPENDENT_ROPE:
        raise CheckpointError(f"the head's RoPE of type '{kind}' depends on the request's length")
    missing = [key for key in _ROPE_TYPES.get(kind, ()) if scaling.get(key) is None]
    if kind not in _ROPE_TYPES or missing:
        reason = f"needs {', '.join(missing)}" if missing else "is unknown"
        raise CheckpointError(
            f"the head's RoPE of type '{kind}' {reason}; supported are {', '.join(_ROPE_TYPES)}"
        )
    for key in _ROPE_NUMBERS:
        if scaling.get(key) is not None:
            number(scaling, key)
    for where in (raw, scaling):
        if where.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"the head's partial_rotary_factor is {where['partial_rotary_factor']}; only heads "
                "that rotate whole vectors (1.0) are supported"
            )
    if scaling.get("rope_theta") is not None:
        return scaling, "config"
    source = "config" if raw.get("rope_theta") is not None else "dialect default"
    return {**scaling, "rope_theta": number(raw, "rope_theta", DEFAULT_ROPE_THETA)}, source
