"""Reads values of a head's config.json by name and type.

Every failure is a CheckpointError with the key and the value found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.runtime.errors import CheckpointError

_MAX_NUMBER = 1e12


def integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer; `default` if the key is absent or null. Raises CheckpointError."""
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
    """Return a number in (0, high]; `default` if the key is absent or null. Raises
    CheckpointError.
    """
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
    """Return true or false; `default` if the key is absent or null. Raises CheckpointError."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"the head's config has {key} {value!r:.80}; allowed: true, false")
    return default if value is None else value


def mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; empty if the key is absent or null. Raises CheckpointError."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the head's {key} is {value!r}, not an object")
    return value
