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
from eagle3.runtime.drafters import Drafter, DraftRequest, NoDrafter
from eagle3.runtime.errors import EngineError
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
        """Prefill, then rounds until the sequence ends. The consumer's time is not counted.

        Raises EngineError when an engine fails or the target's logits are no numbers; the next
        request is not affected.
        """
        try:
            yield from self._rounds(prompt)
        except EngineError:
            self.target.clear()
            raise

    def _rounds(self, prompt: NDArray[np.int64]) -> Iterator[Round]:
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
        budget = self._budget(past)
        tree, accepted, result = self._round(past, root, budget)
        elapsed = time.perf_counter_ns() - start
        self.stats.decode_ns += elapsed
        self.stats.engine_ns += self.clock.engine_ns - engine_start
        num_committed = len(result.committed.token_ids)
        self.stats.round(int(tree.depths.max()), len(accepted.path), num_committed)
        drafted = budget is not None and not isinstance(self.drafter, NoDrafter)
        self.pace.record(drafted, num_committed, elapsed)
        self.stats.fell_back = self.pace.fell_back
        return past + len(accepted.path) + 1, result

    def _round(self, past: int, root: int, budget: TreePlan | None) -> tuple[Tree, Accepted, Round]:
        """`past` tokens are in the cache, `root` is the newest committed one behind them."""
        tree = Tree.root_only(root) if budget is None else self._propose(root, budget)
        output = self.target.verify(tree, past, self.rule.want_logits)
        if tree.num_draft_tokens and output.next_token.min() < 0:
            # A draft token that the target has no numbers for spoils every row that masks it.
            self.target.clear(past)
            tree = Tree.root_only(root)
            output = self.target.verify(tree, past, self.rule.want_logits)
        accepted = self.rule.accept(tree, output, past)
        self.target.keep(past, accepted.path)
        kept = [0, *accepted.path]
        features = None if output.features is None else output.features[kept]
        self.drafter.observe(tree.tokens[kept], features)
        return tree, accepted, self._commit(tree, output, accepted)

    def _budget(self, past: int) -> TreePlan | None:
        """A tree that fits what is left of the context and of the tokens; None: no draft now."""
        free_slots = self.target.capacity - past - 1
        depth = min(self.tree.draft_depth, self.sequence.remaining - 1)
        nodes = min(self.tree.num_draft_tokens, free_slots)
        if depth < 1 or nodes < 1 or not self.pace.should_draft():
            return None
        return replace(self.tree, draft_depth=depth, num_draft_tokens=nodes)

    def _propose(self, root: int, budget: TreePlan) -> Tree:
        """What the drafter proposes; a tree with ids that are no tokens is worth nothing."""
        temperature = self.rule.draft_temperature
        tree = self.drafter.propose(DraftRequest(root, budget, temperature, self.rule.rng))
        valid = tree.tokens.min() >= 0 and tree.tokens.max() < self.target.vocab_size
        return tree if valid else Tree.root_only(root)

    def _commit(self, tree: Tree, output: TargetOutput, accepted: Accepted) -> Round:
        tokens = [tree.token_list[node] for node in accepted.path] + [accepted.token]
        logprobs = self.rule.logprobs(tree, output, accepted)
        committed = self.sequence.commit(tokens)
        self.history.append(committed.token_ids)
        shown = None if logprobs is None else tuple(logprobs[: len(committed.token_ids)])
        return Round(committed, shown)
