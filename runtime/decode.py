"""The round loop: propose, verify, accept, keep, commit (method section 1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.plan import TreePlan
from eagle3.runtime.accept import Accepted
from eagle3.runtime.drafters import Drafter, DraftRequest
from eagle3.runtime.pace import Pace
from eagle3.runtime.rules import AcceptanceRule, TokenLogprob
from eagle3.runtime.sampling import TokenHistory
from eagle3.runtime.sequence import Committed, TokenSequence
from eagle3.runtime.session import Clock
from eagle3.runtime.stats import StatsRecorder
from eagle3.runtime.target import TargetEngine, TargetOutput
from eagle3.runtime.tree import Tree


@dataclass(frozen=True)
class Round:
    """What a round, or the prefill, gave: committed tokens and, if asked for, their logprobs."""

    committed: Committed
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass
class Decoding:
    """One request on one target and one drafter; owns nothing that outlives the request."""

    target: TargetEngine
    drafter: Drafter
    rule: AcceptanceRule
    sequence: TokenSequence
    history: TokenHistory
    tree: TreePlan
    pace: Pace
    clock: Clock
    cancel: threading.Event
    stats: StatsRecorder

    def rounds(self, prompt: NDArray[np.int64]) -> Iterator[Round]:
        """Prefill, then rounds until the sequence ends. The consumer's time is not counted."""
        self.drafter.reset()
        self.history.reset(prompt)
        if self.sequence.finish_reason is not None:
            return
        past, root = len(prompt), 0
        start = time.perf_counter_ns()
        first = self._prefill(prompt)
        self.stats.prefill_ns += time.perf_counter_ns() - start
        yield first
        while self.sequence.finish_reason is None:
            if self.cancel.is_set():
                yield Round(self.sequence.cancel())
                return
            root = self.sequence.token_ids[-1]
            past, result = self._timed_round(past, root)
            yield result

    def _prefill(self, prompt: NDArray[np.int64]) -> Round:
        """Runs the prompt in chunks; the last row gives the first token."""
        chunk = self.target.prefill_chunk
        for start in range(0, len(prompt), chunk):
            if self.cancel.is_set():
                return Round(self.sequence.cancel())
            ids = prompt[start : start + chunk]
            output = self.target.prefill(ids, start, self.rule.want_logits)
            self.drafter.observe(ids, output.features)
        tree = Tree.root_only(int(prompt[-1]))
        accepted = self.rule.accept(tree, output, len(prompt) - 1)
        return self._commit(tree, output, accepted)

    def _timed_round(self, past: int, root: int) -> tuple[int, Round]:
        start, engine_start = time.perf_counter_ns(), self.clock.engine_ns
        tree, accepted, result = self._round(past, root)
        elapsed = time.perf_counter_ns() - start
        self.stats.decode_ns += elapsed
        self.stats.engine_ns += self.clock.engine_ns - engine_start
        depth = int(tree.depths.max())
        self.stats.round(depth, len(accepted.path))
        self.pace.record(depth > 0, len(accepted.path) + 1, elapsed)
        self.stats.fell_back = self.pace.fell_back
        return past + len(accepted.path) + 1, result

    def _round(self, past: int, root: int) -> tuple[Tree, Accepted, Round]:
        """`past` tokens are in the cache, `root` is the newest committed one behind them."""
        tree = self._propose(past, root)
        output = self.target.verify(tree, past, self.rule.want_logits)
        accepted = self.rule.accept(tree, output, past)
        self.target.keep(past, accepted.path)
        kept = [0, *accepted.path]
        features = None if output.features is None else output.features[kept]
        self.drafter.observe(tree.tokens[kept], features)
        return tree, accepted, self._commit(tree, output, accepted)

    def _propose(self, past: int, root: int) -> Tree:
        """A tree that fits what is left of the context and of the tokens asked for."""
        free_slots = self.target.capacity - past - 1
        depth = min(self.tree.draft_depth, self.sequence.remaining - 1)
        nodes = min(self.tree.num_draft_tokens, free_slots)
        if depth < 1 or nodes < 1 or not self.pace.should_draft():
            return Tree.root_only(root)
        budget = replace(self.tree, draft_depth=depth, num_draft_tokens=nodes)
        temperature = self.rule.draft_temperature
        return self.drafter.propose(DraftRequest(root, budget, temperature, self.rule.rng))

    def _commit(self, tree: Tree, output: TargetOutput, accepted: Accepted) -> Round:
        tokens = [tree.token_list[node] for node in accepted.path] + [accepted.token]
        logprobs = self.rule.logprobs(tree, output, accepted)
        committed = self.sequence.commit(tokens)
        self.history.append(committed.token_ids)
        shown = None if logprobs is None else tuple(logprobs[: len(committed.token_ids)])
        return Round(committed, shown)
