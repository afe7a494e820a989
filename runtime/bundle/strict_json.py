"""Strict conversion between frozen dataclasses and JSON, used for the manifest.

A field that is unknown, missing or of another type raises BundleError with its dotted path
(`target.vocab_size`). `hint` is the type of a field, `where` its path.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import BundleError, PlanError


@dataclass(frozen=True)
class Rule:
    """A condition on a value, used in `Annotated`. `says` completes the message "X is
    1, not ...".
    """

    says: str
    holds: Callable[[Any], bool]


def plain(value: Any) -> Any:
    """Return dataclasses, mappings and tuples as dicts and lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def read(hint: Any, value: object, where: str) -> Any:
    """Return `value` as type `hint`. Raises BundleError that names the field `where`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if hint is Plan or hint is TreePlan:
        return _read_plan(hint, value, where)
    if origin is Annotated:
        return _obey(args[1], read(args[0], value, where), where)
    if origin in (Union, UnionType):
        return _read_union(args, value, where)
    if origin is tuple:
        items = _of_type(value, list, "a list", where)
        return tuple(read(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is Mapping:
        items = json_object(value, where)
        return {key: read(args[1], item, f"{where}.{key}") for key, item in items.items()}
    if is_dataclass(hint):
        return _read_dataclass(hint, json_object(value, where or "manifest"), where)
    return _read_scalar(hint, value, where)


def _read_dataclass(cls: Any, data: dict[str, Any], where: str) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    dot = f"{where}." if where else ""
    for name in data:
        if name not in hints:
            raise BundleError(f"{dot}{name} is not a field of a manifest: export the bundle again")
    for name in hints:
        if name not in data:
            raise BundleError(f"{dot}{name} is missing: export the bundle again")
    return cls(**{name: read(hint, data[name], f"{dot}{name}") for name, hint in hints.items()})


def _read_plan(cls: type[Plan] | type[TreePlan], value: object, where: str) -> Plan | TreePlan:
    try:
        return cls.from_json(value)
    except PlanError as error:
        raise BundleError(f"{where}: {error}") from error


def _read_union(options: tuple[Any, ...], value: object, where: str) -> Any:
    """Read the first option whose JSON type fits; None only if it is an option."""
    if value is None and NoneType in options:
        return None
    rest = [option for option in options if option is not NoneType]
    fitting = [option for option in rest if _json_type(option) is type(value)]
    return read((fitting or rest)[0], value, where)


def _json_type(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _read_scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float:
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise BundleError(f"{where} is {value!r}, not a finite number")
        return float(value)  # type: ignore[arg-type]
    names = {int: "an integer", str: "a text", bool: "true or false"}
    return _of_type(value, hint, names[hint], where)


def _obey(rule: Rule, value: Any, where: str) -> Any:
    if not rule.holds(value):
        raise BundleError(f"{where} is {value!r}, not {rule.says}")
    return value


def _of_type(value: Any, kind: type, name: str, where: str) -> Any:
    if type(value) is not kind:
        raise BundleError(f"{where} is {value!r:.80}, not {name}")
    return value


def json_object(value: object, where: str) -> dict[str, Any]:
    data: dict[str, Any] = _of_type(value, dict, "a JSON object", where)
    return data
