"""The round loop: which tokens a request commits, when it ends, and what it costs.

See sections 1 and 5 of docs/method.md.

The loop serves every drafter and device; rounds are behind the protocol in `protocol.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.acceptance.rules import TokenLogprob
from eagle3.runtime.acceptance.sampling import TokenHistory
from eagle3.runtime.errors import EngineError
from eagle3.runtime.rounds.endings import Committed, TokenSequence
from eagle3.runtime.rounds.pace import Pace
from eagle3.runtime.rounds.protocol import RoundEngine, Step
from eagle3.runtime.stats import Clock, StatsRecorder


@dataclass(frozen=True)
class Round:
    """The result of a round or of the prefill: committed tokens and, if requested,
    log-probabilities.
    """

    committed: Committed
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass
class Decoding:
    """The decoding of one request on one engine. It owns nothing that outlives the request."""

    engine: RoundEngine
    sequence: TokenSequence
    history: TokenHistory
    tree: TreePlan
    pace: Pace
    clock: Clock
    cancel: threading.Event
    stats: StatsRecorder

    def rounds(self, prompt: NDArray[np.int64]) -> Iterator[Round]:
        """Prefill, then yield rounds until the sequence ends. The time spent by the consumer is
        not counted.

        Raises EngineError if an engine fails or the target's logits are NaN. The next request is
        not affected.
        """
        try:
            yield from self._rounds(prompt)
        except EngineError:
            self.engine.clear()
            raise

    def _rounds(self, prompt: NDArray[np.int64]) -> Iterator[Round]:
        self.engine.start(prompt)
        self.history.reset(prompt)
        if self.sequence.finish_reason is not None:
            return
        start = time.perf_counter_ns()
        first = self._prefill(prompt)
        self.stats.prefill_ns += time.perf_counter_ns() - start
        yield first
        while self.sequence.finish_reason is None:
            if self.cancel.is_set():
                yield Round(self.sequence.cancel())
                return
            yield self._timed_round()

    def _prefill(self, prompt: NDArray[np.int64]) -> Round:
        """Run the prompt in chunks. The last row gives the first token."""
        for start in range(0, len(prompt), self.engine.prefill_chunk):
            if self.cancel.is_set():
                return Round(self.sequence.cancel())
            self.engine.prefill(start)
        return self._commit(self.engine.first())

    def _timed_round(self) -> Round:
        start, engine_start = time.perf_counter_ns(), self.clock.engine_ns
        remaining = self.sequence.remaining
        tree = self.engine.fit(self.tree, remaining)
        if tree is not None and not self.pace.should_draft():
            tree = None
        step = self.engine.round(self.sequence.token_ids[-1], remaining, tree)
        result = self._commit(step)
        elapsed = time.perf_counter_ns() - start
        self.stats.decode_ns += elapsed
        self.stats.engine_ns += self.clock.engine_ns - engine_start
        num_committed = len(result.committed.token_ids)
        self.stats.round(step.num_levels, step.num_accepted, num_committed)
        if tree is not None:
            self.pace.record_draft(num_committed, elapsed)
        elif step.plain:
            self.pace.record_plain(elapsed)
        self.stats.fell_back = self.pace.fell_back
        return result

    def _commit(self, step: Step) -> Round:
        committed = self.sequence.commit(step.tokens)
        self.history.append(committed.token_ids)
        if step.logprobs is None:
            return Round(committed)
        return Round(committed, step.logprobs[: len(committed.token_ids)])
