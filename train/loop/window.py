"""Sums over the steps between two log lines, or over an evaluation."""

from __future__ import annotations

import torch

from eagle3.train.losses.objective import StepSums


class Window:
    """Adds up `StepSums` of up to S draft steps."""

    def __init__(self, num_steps: int) -> None:
        self._sums = torch.zeros(3, num_steps, dtype=torch.float64)

    def add(self, sums: StepSums) -> None:
        """Counts one batch; it may have unrolled fewer steps."""
        parts = torch.stack([sums.loss, sums.agreed, sums.rows]).detach().to("cpu", torch.float64)
        self._sums[:, : parts.shape[1]] += parts

    def loss(self, decay: float) -> float:
        """The weighted loss of the steps that were run, in nats."""
        loss, _, rows = self._sums
        return float((loss / rows.clamp(min=1) * decay ** torch.arange(len(rows))).sum())

    @property
    def agreement(self) -> tuple[float, ...]:
        """Of each step that was run, the share of tokens on which draft and target agree."""
        _, agreed, rows = self._sums
        return tuple(float(a / n) for a, n in zip(agreed, rows, strict=True) if n)

    def values(self, name: str) -> dict[str, str]:
        """The agreement as columns of the curves."""
        return {f"{name}_{i}": f"{share:.4f}" for i, share in enumerate(self.agreement)}

    def note(self) -> str:
        """The agreement as the end of a progress line."""
        return f", agreement {' '.join(self.values('').values())}" if self.agreement else ""
