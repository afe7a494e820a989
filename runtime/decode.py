"""The round loop: propose, verify, accept, keep, commit (method section 1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.plan import TreePlan
from eagle3.runtime.accept import Accepted, Settled, settle
from eagle3.runtime.drafters import Drafter, DraftRequest
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


@dataclass(frozen=True)
class _Place:
    """Where a round starts: `past` tokens are in the cache, the newest committed one is not.

    carried: tokens that a round accepted behind it and this one verifies again (`settle`).
    num_ahead: how many tokens the drafter has observed from position `past` on.
    """

    past: int
    carried: tuple[int, ...] = ()
    num_ahead: int = 0


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
        start = time.perf_counter_ns()
        first = self._prefill(prompt)
        self.stats.prefill_ns += time.perf_counter_ns() - start
        yield first
        place = _Place(past=len(prompt))
        while self.sequence.finish_reason is None:
            if self.cancel.is_set():
                yield Round(self.sequence.cancel())
                return
            place, result = self._timed_round(place)
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
        return self._commit(tree, output, Settled(accepted.path, accepted.token))

    def _timed_round(self, place: _Place) -> tuple[_Place, Round]:
        start, engine_start = time.perf_counter_ns(), self.clock.engine_ns
        carried = self._still_fits(place)
        budget = self._budget(place.past, len(carried))
        draft = self._propose(carried, budget)
        following, accepted, result = self._round(place, carried, draft)
        elapsed = time.perf_counter_ns() - start
        self.stats.decode_ns += elapsed
        self.stats.engine_ns += self.clock.engine_ns - engine_start
        num_committed = len(result.committed.token_ids)
        num_accepted = max(len(accepted.path) - len(carried), 0)
        self.stats.round(int(draft.depths.max()), num_accepted, num_committed)
        if budget is not None:
            self.pace.record_draft(num_committed, elapsed)
        elif not carried:
            self.pace.record_plain(elapsed)
        self.stats.fell_back = self.pace.fell_back
        return following, result

    def _round(
        self, place: _Place, carried: tuple[int, ...], draft: Tree
    ) -> tuple[_Place, Accepted, Round]:
        """Verify, accept, keep, commit: the newest committed token is the root."""
        root, past = self.sequence.token_ids[-1], place.past
        tree = draft.laid_out(root, carried) if self.rule.token_exact else draft
        output = self.target.verify(tree, past, self.rule.want_logits)
        spoiled = tree.num_draft_tokens > 0 and output.next_token.min() < 0
        if spoiled:
            output = self._row_by_row(tree, past)
        accepted = self.rule.accept(tree, output, past)
        settled = Settled(accepted.path, accepted.token)
        if self.rule.token_exact:
            settled = settle(tree, accepted)
        if spoiled:
            self._run_path(tree, past, settled.path)
        else:
            self.target.keep(past, settled.path)
        seen = [0, *accepted.path]
        features = None if output.features is None else output.features[seen]
        self.drafter.rewind(place.num_ahead)
        self.drafter.observe(tree.tokens[seen], features)
        following = _Place(
            past=past + len(settled.path) + 1,
            carried=settled.carried,
            num_ahead=len(accepted.path) - len(settled.path),
        )
        return following, accepted, self._commit(tree, output, settled)

    def _row_by_row(self, tree: Tree, past: int) -> TargetOutput:
        """Every row from a call of its own path, as plain decoding would come to it.

        A draft token that the target has no numbers for spoils every row of its call: a masked
        slot has weight 0, but 0 times NaN is NaN. The tree must not be dropped for it: that a drawn
        token spoiled its call would then decide what is drawn instead.
        """
        each = [self._run_path(tree, past, tree.path(node)) for node in range(tree.num_nodes)]
        return TargetOutput(
            next_token=np.concatenate([out.next_token for out in each]),
            logits=_stacked([out.logits for out in each]),
            features=_stacked([out.features for out in each]),
        )

    def _run_path(self, tree: Tree, past: int, path: tuple[int, ...]) -> TargetOutput:
        """Root and `path` alone in a clean cache; copies of the last row."""
        self.target.clear(past)
        tokens = [tree.token_list[node] for node in path]
        chain = Tree.chain(tree.token_list[0], tokens)
        out = self.target.verify(chain, past, self.rule.want_logits)
        last = slice(len(path), None)
        return TargetOutput(
            next_token=out.next_token[last].copy(),
            logits=None if out.logits is None else out.logits[last].copy(),
            features=None if out.features is None else out.features[last].copy(),
        )

    def _still_fits(self, place: _Place) -> tuple[int, ...]:
        """The carried tokens that the context and the tokens asked for leave room for."""
        room = min(
            self.sequence.remaining - 1,
            self.target.capacity - place.past - 1,
            self.target.max_verify_rows - 1,
        )
        return place.carried[: max(room, 0)]

    def _budget(self, past: int, num_carried: int) -> TreePlan | None:
        """A tree that fits what is left of the context and of the tokens; None: no draft now."""
        depth = min(self.tree.draft_depth, self.sequence.remaining - 1 - num_carried)
        room = min(self.target.capacity - past, self.target.max_verify_rows) - 1 - num_carried
        nodes = min(self.tree.num_draft_tokens, room)
        if not self.drafter.proposes or depth < 1 or nodes < 1 or not self.pace.should_draft():
            return None
        return replace(self.tree, draft_depth=depth, num_draft_tokens=nodes)

    def _propose(self, carried: tuple[int, ...], budget: TreePlan | None) -> Tree:
        """A tree under the newest token, carried or committed; ids that are no tokens end it."""
        root = carried[-1] if carried else self.sequence.token_ids[-1]
        if budget is None:
            return Tree.root_only(root)
        temperature = self.rule.draft_temperature
        tree = self.drafter.propose(DraftRequest(root, budget, temperature, self.rule.rng))
        valid = tree.tokens.min() >= 0 and tree.tokens.max() < self.target.vocab_size
        return tree if valid else Tree.root_only(root)

    def _commit(self, tree: Tree, output: TargetOutput, settled: Settled) -> Round:
        tokens = [*(tree.token_list[node] for node in settled.path), settled.token]
        logprobs = self.rule.logprobs(tree, output, settled.path, settled.token)
        committed = self.sequence.commit(tokens)
        self.history.append(committed.token_ids)
        shown = None if logprobs is None else tuple(logprobs[: len(committed.token_ids)])
        return Round(committed, shown)


def _stacked(rows: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    """[M, ...] of M rows [1, ...]; None when they are None."""
    there = [row for row in rows if row is not None]
    return np.concatenate(there) if there else None
