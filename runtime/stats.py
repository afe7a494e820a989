"""Statistics of a request: counts, times and acceptance, and the clock that engines share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Acceptance of the first draft token on ordinary text. Below it the head is probably miswired.
NEAR_ZERO_ACCEPTANCE = 0.10


@dataclass(frozen=True)
class Stats:
    """Counts and times of one request. Times are wall-clock milliseconds.

    rounds: target calls after the prefill. plain_rounds: rounds without a draft.
    acceptance_length: committed tokens per round, including the target's own token (tau).
    proposed_by_position: number of rounds that proposed a token at draft position i.
    accepted_by_position: the fraction of those rounds that accepted it.
    tokens_per_second: of the rounds; the first token belongs to the prefill and is not counted.
    engine_ms: the part of decode_ms spent inside engines.
    fell_back: whether speculation was switched off because it cost more than it gained.
    drafter: the name of the drafter.
    """

    rounds: int = 0
    plain_rounds: int = 0
    acceptance_length: float = 0.0
    accepted_by_position: tuple[float, ...] = ()
    proposed_by_position: tuple[int, ...] = ()
    tokens_per_second: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    engine_ms: float = 0.0
    fell_back: bool = False
    drafter: str = "none"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        lists = {n: list(v) for n, v in vars(self).items() if isinstance(v, tuple)}
        return {**vars(self), **lists}


class StatsRecorder:
    """Accumulates the statistics of one request."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self.prefill_ns = self.decode_ns = self.engine_ns = 0
        self.rounds = self.plain_rounds = self.committed = 0
        self.fell_back = False
        self._proposed: list[int] = []
        self._accepted: list[int] = []

    def round(self, depth: int, accepted: int, committed: int) -> None:
        """Record a round whose tree had `depth` levels, of which `accepted` were accepted.

        committed: tokens that the round added. It is less than accepted + 1 if the text ended
        inside the accepted path.
        """
        self.rounds += 1
        self.plain_rounds += depth == 0
        self.committed += committed
        while len(self._proposed) < depth:
            self._proposed.append(0)
            self._accepted.append(0)
        for position in range(depth):
            self._proposed[position] += 1
            self._accepted[position] += position < accepted

    def result(self) -> Stats:
        """Return the statistics recorded so far."""
        seconds = self.decode_ns / 1e9
        return Stats(
            rounds=self.rounds,
            plain_rounds=self.plain_rounds,
            acceptance_length=self.committed / self.rounds if self.rounds else 0.0,
            accepted_by_position=tuple(
                a / p for a, p in zip(self._accepted, self._proposed, strict=True)
            ),
            proposed_by_position=tuple(self._proposed),
            tokens_per_second=self.committed / seconds if seconds else 0.0,
            prefill_ms=self.prefill_ns / 1e6,
            decode_ms=self.decode_ns / 1e6,
            engine_ms=self.engine_ns / 1e6,
            fell_back=self.fell_back,
            drafter=self._drafter,
        )


@dataclass
class Clock:
    """Time spent inside engines, and calls per engine, of all sessions that share the clock."""

    engine_ns: int = 0
    calls: dict[str, int] = field(default_factory=dict)
