"""Switches speculation off while it costs more than it gains: long contexts, or a draft that
misses.

This only decides whether a round drafts, never what is accepted. The output follows the same
distribution either way, and is the same text under greedy and `coupled`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WINDOW = 32  # speculative rounds between two decisions; older rounds count half each time
_TOLERANCE = 0.95  # fraction of the plain speed; anything slower counts as a loss
_SAMPLES = 2  # plain rounds timed before a decision
# rounds after which plain decoding is timed again, since its cost grows with the context
_STALE = 512
_REST = 48  # plain rounds before speculation is tried again
_MIN_ACCEPTANCE_LENGTH = 1.15  # threshold used where times must not decide


@dataclass
class PlainCost:
    """The cost of a plain round on this engine, in nanoseconds. Kept between requests."""

    ns: float = 0.0
    _samples: int = 0
    _age: int = 0

    @property
    def known(self) -> bool:
        """Whether the cost was measured recently enough."""
        return self._samples >= _SAMPLES and self._age < _STALE

    def record(self, time_ns: int) -> None:
        """Record a plain round. The newest round has the largest weight."""
        if self._age >= _STALE:
            self._samples = 0
        self._samples, self._age = self._samples + 1, 0
        self.ns += (time_ns - self.ns) / min(self._samples, 8)

    def grow_older(self) -> None:
        """Record that a round with a draft passed."""
        self._age += 1


@dataclass
class Pace:
    """Decides before each round of a request whether to draft.

    by_time: decide by measured time per token. Otherwise decide by the acceptance length alone,
    which does not depend on the machine: under the `rejection` rule the text of a seed depends on
    the proposed trees, so it must not depend on how busy the machine is.
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
        """Return whether the next round drafts."""
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
        """Record the cost of a round with one row."""
        self.plain.record(time_ns)

    def record_draft(self, tokens: int, time_ns: int) -> None:
        """Record the tokens and the cost of a round with a draft, whatever the drafter proposed."""
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
