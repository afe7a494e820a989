"""What a request cost and how well the draft did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Of the first draft token, on ordinary text: below it the head is wired wrongly.
NEAR_ZERO_ACCEPTANCE = 0.10


@dataclass(frozen=True)
class Stats:
    """Counts and times of one request; times in milliseconds of wall clock.

    drafter: the name of the one that proposed. rounds: target calls after the prefill.
    acceptance_length: committed tokens per round, the target's own token included (tau).
    accepted_by_position: of the rounds that proposed a token at draft position i,
    proposed_by_position of them, the share that accepted one.
    tokens_per_second: of the rounds, the first token (it belongs to the prefill) not counted.
    engine_ms: the part of decode_ms inside engines. plain_rounds: those without a draft. fell_back:
    speculation was switched off as it cost more than it gained.
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
        """The fields as a JSON object."""
        lists = {n: list(v) for n, v in vars(self).items() if isinstance(v, tuple)}
        return {**vars(self), **lists}


class StatsRecorder:
    """Adds up one request."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self.prefill_ns = self.decode_ns = self.engine_ns = 0
        self.rounds = self.plain_rounds = self.committed = 0
        self.fell_back = False
        self._proposed: list[int] = []
        self._accepted: list[int] = []

    def round(self, depth: int, accepted: int, committed: int) -> None:
        """One round whose tree had `depth` levels, of which `accepted` were accepted.

        committed: tokens it added; fewer than accepted + 1 where the text ended inside the path.
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
        """The sums as they stand."""
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
    """Time spent inside engines, by all sessions that share it."""

    engine_ns: int = 0
    calls: dict[str, int] = field(default_factory=dict)
