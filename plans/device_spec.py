"""Memory, bandwidth and peak arithmetic of a device, which the estimates of a plan are based on.

The figures come from the vendor's data sheet and do not count sparsity. 1 GB is 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.plans.backends import check_compute_capability
from eagle3.runtime.errors import PlanError

PEAK_DTYPES = ("float32", "float16", "bfloat16", "int8")


@dataclass(frozen=True)
class DeviceSpec:
    """Memory, bandwidth and peak arithmetic of one device.

    Raises PlanError if a field has the wrong type or is out of range.
    """

    name: str
    source: str
    """Source of the figures."""
    memory_bytes: int
    reserved_bytes: int
    """Part of `memory_bytes` that the system, the driver and the process itself use, and that is
    therefore not available to engines."""
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """dtype -> peak operations per second in dense matrix products; a multiply-add is two. int8: of
    the integer products of a target with int8 weights; without it, that of the plan's dtype."""
    compute_capability: str | None = None
    """Compute capability such as "8.9"; None if the device has no NVIDIA GPU."""

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise PlanError(
                    f"device.{name} must be a non-empty string, got {getattr(self, name)!r}"
                )
        for name in ("memory_bytes", "reserved_bytes", "bandwidth_bytes_per_s"):
            _check_number(f"device.{name}", getattr(self, name), may_be_zero=name[0] == "r")
        if self.reserved_bytes >= self.memory_bytes:
            raise PlanError(
                f"device.reserved_bytes must be less than memory_bytes {self.memory_bytes}, got"
                f" {self.reserved_bytes}: lower it"
            )
        if not isinstance(self.peak_flops, Mapping) or not self.peak_flops:
            raise PlanError(
                "device.peak_flops must be a table with at least one dtype, got"
                f" {self.peak_flops!r}"
            )
        for dtype, peak in self.peak_flops.items():
            if dtype not in PEAK_DTYPES:
                raise PlanError(
                    f"device.peak_flops has the unknown dtype {dtype!r}: use"
                    f" {', '.join(PEAK_DTYPES)}"
                )
            _check_number(f"device.peak_flops.{dtype}", peak)
        check_compute_capability(self.compute_capability)

    @property
    def usable_bytes(self) -> int:
        """Bytes that weights, caches and activations may use."""
        return self.memory_bytes - self.reserved_bytes

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak operations per second in `dtype`.

        Raises PlanError if the device has no figure for `dtype`.
        """
        if dtype not in self.peak_flops:
            raise PlanError(
                f"{self.name} has no peak_flops for {dtype}, only for"
                f" {', '.join(self.peak_flops)}: choose another dtype, or add {dtype} to"
                " [device.peak_flops] in the preset file"
            )
        return self.peak_flops[dtype]


def _check_number(name: str, value: object, *, may_be_zero: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise PlanError(f"{name} must be a finite number, got {value!r}")
    if value < 0 or (value == 0 and not may_be_zero):
        limit = "at least 0" if may_be_zero else "greater than 0"
        raise PlanError(f"{name} must be {limit}, got {value}")
