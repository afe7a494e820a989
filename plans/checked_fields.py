"""Checks that every dataclass of a plan makes of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral
from typing import Any

from eagle3.runtime.errors import PlanError


def exact_fields(cls: type[Any], data: object, where: str) -> dict[str, Any]:
    """`data` as keyword arguments of `cls`, which must have exactly its fields."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} is {type(data).__name__}, not a JSON object")
    known = [each.name for each in fields(cls)]
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise PlanError(f"{where} has unknown fields {unknown}; it knows {known}: remove them")
    missing = [name for name in known if name not in data]
    if missing:
        raise PlanError(f"{where} lacks the fields {missing}: add them")
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
    """Stores a field as int, whatever integer type it has; PlanError outside [low, high]."""
    value = getattr(instance, name)
    limit = f"{high_name} = {high}" if high_name else str(high)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PlanError(f"{where}{name} is {value!r}: give an integer from {low} to {limit}")
    if not low <= int(value) <= high:
        hint = "; raise max_seq_len or lower it" if high_name and int(value) > high else ""
        raise PlanError(f"{where}{name} is {value}, allowed are {low} to {limit}{hint}")
    object.__setattr__(instance, name, int(value))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises PlanError unless `value` is one of `choices`."""
    if value not in choices:
        raise PlanError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
