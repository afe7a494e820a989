"""Switches speculation off while it costs more than it gains (long contexts, a draft that misses).

Only whether a round drafts is decided here, never what is accepted: the output follows the same
law either way, and is the same text under greedy and `coupled`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WINDOW = 32  # speculative rounds between two judgements; older ones count half each time
_TOLERANCE = 0.95  # of the plain speed; below it is a loss
_SAMPLES = 2  # plain rounds timed before a judgement
_STALE = 512  # rounds after which plain decoding is timed again: its cost grows with the context
_REST = 48  # plain rounds before speculation gets another chance
_MIN_ACCEPTANCE_LENGTH = 1.15  # the judgement where times may not decide


@dataclass
class PlainCost:
    """What a plain round costs on this engine, in nanoseconds; kept between requests."""

    ns: float = 0.0
    _samples: int = 0
    _age: int = 0

    @property
    def known(self) -> bool:
        """Whether it was timed, and not too long ago."""
        return self._samples >= _SAMPLES and self._age < _STALE

    def record(self, time_ns: int) -> None:
        """One more plain round; the newest weighs most."""
        if self._age >= _STALE:
            self._samples = 0
        self._samples, self._age = self._samples + 1, 0
        self.ns += (time_ns - self.ns) / min(self._samples, 8)

    def grow_older(self) -> None:
        """A round went by that was not plain."""
        self._age += 1


@dataclass
class Pace:
    """Decides before each round of a request whether to draft.

    by_time: judge by measured time per token. Otherwise judge by the acceptance length alone,
    which does not depend on the machine: under the `rejection` rule the text of a seed depends on
    the trees proposed, and must not depend on how busy the machine was.
    """

    enabled: bool
    by_time: bool
    plain: PlainCost = field(default_factory=PlainCost)
    fell_back: bool = False
    _rounds: float = 0.0
    _tokens: float = 0.0
    _time_ns: float = 0.0
    _unjudged: int = 0
    _rest: int = 0

    def should_draft(self) -> bool:
        """Whether the next round proposes a tree."""
        if not self.enabled:
            return True
        if self._rest:
            self._rest -= 1
            return False
        if self._unjudged >= _WINDOW:
            if self.by_time and not self.plain.known:
                return False  # a plain round, to compare with
            self._judge()
            return self._rest == 0
        return True

    def record_plain(self, time_ns: int) -> None:
        """Learns what a round of one row cost."""
        self.plain.record(time_ns)

    def record_draft(self, tokens: int, time_ns: int) -> None:
        """Learns what a round with a draft gave and cost, whatever the drafter proposed."""
        self.plain.grow_older()
        self._unjudged += 1
        self._rounds += 1
        self._tokens += tokens
        self._time_ns += time_ns

    def _judge(self) -> None:
        if self._loses():
            self._rest, self.fell_back = _REST, True
        self._unjudged = 0
        self._rounds, self._tokens, self._time_ns = (
            each / 2 for each in (self._rounds, self._tokens, self._time_ns)
        )

    def _loses(self) -> bool:
        if not self.by_time:
            return self._tokens < _MIN_ACCEPTANCE_LENGTH * self._rounds
        return self._time_ns / self._tokens > self.plain.ns / _TOLERANCE
