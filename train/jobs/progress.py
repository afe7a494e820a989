"""Progress lines: the finished share of the work, its rate, and the estimated time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

Report = Callable[[str], None]


class Progress:
    """Counts units of work (tokens by default) and reports at most once in `seconds`.

    The end of the work, `total` units, is always reported.
    """

    def __init__(
        self,
        name: str,
        total: int,
        report: Report,
        seconds: float = 10.0,
        unit: Literal["tokens", "prompts"] = "tokens",
    ) -> None:
        self._name, self._total, self._report, self._seconds = name, total, report, seconds
        self._unit = unit
        self._done = 0
        self._start = self._last = time.monotonic()

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return self._done / max(self.seconds, 1e-9)

    @property
    def done(self) -> int:
        """Number of units finished so far."""
        return self._done

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def add(self, count: int, note: str = "") -> None:
        """Count finished work; `note` is appended to the progress line."""
        self._done += count
        now = time.monotonic()
        if now - self._last < self._seconds and self._done < self._total:
            return
        self._last = now
        left = (self._total - self._done) / max(self.rate, 1e-9)
        rate = (
            f"{self.rate:,.0f} tok/s" if self._unit == "tokens" else f"{self.rate:,.1f} prompts/s"
        )
        self._report(
            f"{self._name}: {self._done:,} of {self._total:,} {self._unit}, {rate}, "
            f"{duration(left)} left{note}"
        )


def duration(seconds: float) -> str:
    """Return a duration as text with at most two units: 90 -> "1 min 30 s"."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{n} {unit}" for n, unit in parts if n or unit == "s"]
    return " ".join(shown[:2])
