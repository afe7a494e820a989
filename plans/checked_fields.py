"""Checks of field names and values that the dataclasses of a plan share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral
from typing import Any

from eagle3.runtime.errors import PlanError


def exact_fields(cls: type[Any], data: object, where: str) -> dict[str, Any]:
    """Return `data` as keyword arguments of the dataclass `cls`.

    where: name of the object in error messages. Raises PlanError unless `data` is a mapping whose
    keys are exactly the fields of `cls`.
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} must be a JSON object, got {type(data).__name__}")
    known = [each.name for each in fields(cls)]
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise PlanError(
            f"{where} has unknown fields {unknown}: remove them; the known fields are {known}"
        )
    missing = [name for name in known if name not in data]
    if missing:
        raise PlanError(f"{where} is missing the fields {missing}: add them")
    return dict(data)


def set_int(
    instance: object,
    name: str,
    high: int,
    high_name: str = "",
    *,
    low: int = 1,
    where: str = "",
) -> None:
    """Convert a field of a frozen dataclass to int, from any integer type.

    high_name: expression that `high` is the value of, for error messages. where: prefix of the
    field's name in error messages. Raises PlanError unless the value is an integer in [low, high].
    """
    value = getattr(instance, name)
    limit = f"{high_name} = {high}" if high_name else str(high)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PlanError(f"{where}{name} must be an integer from {low} to {limit}, got {value!r}")
    if not low <= int(value) <= high:
        hint = f": raise max_seq_len or lower {name}" if high_name and int(value) > high else ""
        raise PlanError(f"{where}{name} must be from {low} to {limit}, got {value}{hint}")
    object.__setattr__(instance, name, int(value))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise PlanError unless `value` is one of `choices`."""
    if value not in choices:
        raise PlanError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
