"""A device in numbers: what a plan must fit, and what its calls cost there at best.

Figures are the vendor's, of the data sheet, without sparsity; GB are 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.plans.backends import check_compute_capability
from eagle3.runtime.errors import PlanError

PEAK_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class DeviceSpec:
    """Memory, bandwidth and arithmetic of one device. Raises PlanError for a number amiss."""

    name: str
    source: str
    """Where the figures come from."""
    memory_bytes: int
    reserved_bytes: int
    """Of `memory_bytes`, what system, driver and the process itself hold: not for engines."""
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """dtype -> operations a second in dense matrix products; a multiply-add is two."""
    compute_capability: str | None = None
    """As "8.9"; None where there is no NVIDIA GPU."""

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise PlanError(f"device.{name} is {getattr(self, name)!r}: give a text")
        for name in ("memory_bytes", "reserved_bytes", "bandwidth_bytes_per_s"):
            _check_number(f"device.{name}", getattr(self, name), may_be_zero=name[0] == "r")
        if self.reserved_bytes >= self.memory_bytes:
            raise PlanError(
                f"device.reserved_bytes is {self.reserved_bytes}, which leaves nothing of"
                f" memory_bytes {self.memory_bytes}: lower it"
            )
        if not isinstance(self.peak_flops, Mapping) or not self.peak_flops:
            raise PlanError(f"device.peak_flops is {self.peak_flops!r}: give a table of dtypes")
        for dtype, peak in self.peak_flops.items():
            if dtype not in PEAK_DTYPES:
                raise PlanError(
                    f"device.peak_flops names {dtype!r}: it knows {', '.join(PEAK_DTYPES)}"
                )
            _check_number(f"device.peak_flops.{dtype}", peak)
        check_compute_capability(self.compute_capability)

    @property
    def usable_bytes(self) -> int:
        """What engines and caches may take."""
        return self.memory_bytes - self.reserved_bytes

    def flops_per_s(self, dtype: str) -> float:
        """Peak in `dtype`. Raises PlanError where the device has no figure for it."""
        if dtype not in self.peak_flops:
            raise PlanError(
                f"{self.name} has no peak for {dtype}, only for {', '.join(self.peak_flops)}:"
                " choose another dtype, or add device.peak_flops to the plan's file"
            )
        return self.peak_flops[dtype]


def _check_number(name: str, value: object, *, may_be_zero: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise PlanError(f"{name} is {value!r}: give a number")
    if value < 0 or (value == 0 and not may_be_zero):
        raise PlanError(f"{name} is {value}: give a number above zero")
