"""Presets: TOML files, each with a device and a plan for it. Users can write their own.

    [device]                 # fields of `DeviceSpec`; or device = "l4" for the device of a preset
    name = "..."
    [plan]                   # fields of `Plan`; omitted fields keep their defaults
    [plan.tree]              # fields of `TreePlan`

An unknown key is an error, so that a misspelled option is never ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.plan import Plan
from eagle3.plans.tree_paths import TreePaths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import PlanError

_SUFFIX = ".toml"


@dataclass(frozen=True)
class Preset:
    """A plan and the device it is for.

    text: content of the TOML file, comments included. Raises PlanError if the plan does not match
    the device.
    """

    name: str
    device: DeviceSpec
    plan: Plan
    text: str

    def __post_init__(self) -> None:
        wanted, has = self.plan.compute_capability, self.device.compute_capability
        if wanted is not None and wanted != has:
            raise PlanError(
                f"plan.compute_capability is {wanted}, but {self.device.name} has {has or 'none'}:"
                " make them equal, because a plan file only runs on the GPU generation it was built"
                " for"
            )
        if self.plan.backend != "ort-cpu" and has is None:
            raise PlanError(
                f"plan.backend is {self.plan.backend}, but {self.device.name} has no"
                " compute_capability and is therefore not an NVIDIA GPU: use ort-cpu, or add"
                " device.compute_capability"
            )

    @property
    def summary(self) -> str:
        """One-line description of device and plan."""
        device = self.device
        return (
            f"{device.name}: {device.memory_bytes / 1e9:g} GB,"
            f" {device.bandwidth_bytes_per_s / 1e9:g} GB/s; {self.plan.backend} in"
            f" {self.plan.dtype}, up to {self.plan.max_draft_tokens} draft tokens"
        )

    def to_json(self) -> dict[str, Any]:
        """Return device and plan as a JSON object."""
        return {"device": asdict(self.device), "plan": self.plan.to_json()}


def preset_names() -> list[str]:
    """Return the names of the presets in the package, sorted."""
    found = (path.name for path in _folder().iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def load_preset(name_or_path: str) -> Preset:
    """Load the preset of this name, or the TOML file at this path, which must end in .toml.

    Raises PlanError if it is not found, cannot be read, or has an unknown key or invalid value.
    """
    if name_or_path.endswith(_SUFFIX):
        return _read(Path(name_or_path), Path(name_or_path).stem, name_or_path)
    if name_or_path not in preset_names():
        raise PlanError(
            f"preset {name_or_path!r} not found: use one of {', '.join(preset_names())},"
            " or the path of a .toml file"
        )
    return _read(_folder() / f"{name_or_path}{_SUFFIX}", name_or_path, f"preset {name_or_path}")


def _folder() -> Traversable:
    return files("eagle3.plans") / "presets"


def _read(file: Traversable, name: str, where: str) -> Preset:
    try:
        text = file.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise PlanError(f"{where} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{where} is not valid TOML: {error}") from error
    try:
        _refuse_unknown(data, ("device", "plan"), "the file")
        return Preset(name, _device(data.get("device")), _plan(data.get("plan", {})), text)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def _device(data: object) -> DeviceSpec:
    if isinstance(data, str):
        return load_preset(data).device
    if data is None:
        raise PlanError(
            "device is missing: add a [device] table, or use the device of a preset, such as"
            f" device = {preset_names()[0]!r}"
        )
    return DeviceSpec(**_fields(DeviceSpec, data, "device"))


def _plan(data: object) -> Plan:
    values = _fields(Plan, data, "plan")
    if "tree" in values:
        tree = _fields(TreePlan, values["tree"], "plan.tree")
        static = tree.pop("static", None)
        paths = None if static is None else TreePaths.from_json(static)
        values["tree"] = TreePlan(**tree, static=paths)
    return Plan(**values)


def _fields(cls: Any, data: object, where: str) -> dict[str, Any]:
    """Return `data` as keyword arguments of the dataclass `cls`.

    where: name of the table in error messages. Raises PlanError if `data` is not a table, has an
    unknown key, or lacks a field that has no default.
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} must be a table [{where}], got {data!r}")
    _refuse_unknown(data, tuple(each.name for each in fields(cls)), where)
    needed = [
        each.name
        for each in fields(cls)
        if each.default is MISSING and each.default_factory is MISSING and each.name not in data
    ]
    if needed:
        raise PlanError(f"{where} is missing {', '.join(needed)}: add the missing keys")
    return dict(data)


def _refuse_unknown(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(key for key in data if key not in known)
    if unknown:
        raise PlanError(
            f"{where} has the unknown keys {', '.join(unknown)}: remove them; the known keys are"
            f" {', '.join(known)}"
        )
