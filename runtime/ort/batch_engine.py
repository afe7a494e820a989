"""Continuous batched plain decoding: many requests share every target call, no drafter.

Where it sits: beside `engine.py`, for work where throughput counts and latency does not, such as
writing training data. A row of the batch belongs to one request at a time; when it ends, the next
request moves in before the next call. Tokens come from the same rule as everywhere (`rules.py`).

    while rows: refill free rows -> close gaps -> one target call -> a token for each row
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from eagle3.runtime.acceptance.rules import AcceptanceRule
from eagle3.runtime.acceptance.sampling import TokenHistory
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import EngineError, PromptTooLong, RequestError
from eagle3.runtime.ort.batch_target import BatchTarget
from eagle3.runtime.ort.target_engine import TargetOutput
from eagle3.runtime.params import SamplingParams, checked_count, checked_threads
from eagle3.runtime.stats import Clock
from eagle3.runtime.trees.tree import Tree

DEFAULT_ROWS = 32


@dataclass(frozen=True)
class BatchRequest:
    """One prompt and how to go on from it; checked when the engine takes it (`BatchEngine.check`).

    key: the caller's; it comes back with the answer. prompt_ids: at least one token id of the
    target. params: its `acceptance` says nothing here, as nothing is drafted.
    """

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int


@dataclass(frozen=True)
class BatchAnswer:
    """A finished request.

    token_ids: without the prompt; they hold the end token when one ended it. finish_reason: "stop",
    or "length" for max_new_tokens and the context alike.
    """

    key: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass
class _Row:
    """A request in the batch; its newest token is not in the cache yet."""

    request: BatchRequest
    rule: AcceptanceRule
    history: TokenHistory
    limit: int  # tokens that it may get
    token_ids: list[int] = field(default_factory=list)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def past(self) -> int:
        """Slots filled when the last token is about to run."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def draw(self, output: TargetOutput, index: int) -> None:
        """Adds the token that row `index` of `output` gives. Raises EngineError, by key."""
        own = TargetOutput(
            next_token=output.next_token[index : index + 1],
            logits=None if output.logits is None else output.logits[index : index + 1],
            features=None,
        )
        try:
            accepted = self.rule.accept(Tree.root_only(self.last_token), own, self.past)
        except EngineError as error:
            raise EngineError(f"request '{self.request.key}': {error}") from error
        self.token_ids.append(accepted.token)
        if self.request.params.penalises:
            self.history.append([accepted.token])

    def answer(self, eos: Collection[int]) -> BatchAnswer | None:
        """The answer, once the row has ended."""
        if self.token_ids[-1] in eos:
            reason = "stop"
        elif len(self.token_ids) == self.limit:
            reason = "length"
        else:
            return None
        return BatchAnswer(self.request.key, tuple(self.token_ids), reason)


class BatchEngine:
    """A bundle's target that decodes up to `rows` requests at once.

    bundle: its folder, or opened. rows: sequences in a call; the cache block is allocated for all
    of them at the plan's capacity, and takes memory as far as it is filled. threads: as in
    `eagle3.load`. A bundle of any lowering and with or without a draft will do.
    Raises BundleError, EngineMissing, RequestError.
    """

    def __init__(
        self, bundle: str | Path | Bundle, *, rows: int = DEFAULT_ROWS, threads: int | None = None
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.rows = checked_count("rows", rows)
        self.clock = Clock()
        self._target = BatchTarget(self.bundle, self.rows, checked_threads(threads), self.clock)
        self._eos = frozenset(self.bundle.manifest.generation.eos_token_ids)
        self._unread = TokenHistory(self._target.vocab_size)  # of rows without penalties
        self._turn = threading.Lock()

    def generate(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        """Yields answers as they finish, in no order; takes a request only when a row is free.

        Greedy tokens are the argmax; sampled ones are drawn by the `coupled` rule, so that the same
        seed gives the text of `Engine.generate(..., drafter="none", acceptance="coupled")`. Who
        shares the batch changes rounding and nothing else. Closing the iterator drops what is in
        flight. Raises, ending the iteration, RequestError (PromptTooLong, ...) for a request that
        `check` refuses, before anything runs for it, and while another iterator of this engine is
        open; EngineError, by key, when the target fails.
        """
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "another generate() of this engine is still open; read it to its end or close() it"
            )
        try:
            yield from self._answers(iter(requests))
        except EngineError:
            self._target.clear()
            raise
        finally:
            self._turn.release()

    def check(self, request: BatchRequest) -> None:
        """Refuses what cannot be served, by key: RequestError, PromptTooLong."""
        try:
            self._check(request)
        except RequestError as error:
            raise type(error)(f"request '{request.key}': {error}") from error

    def _check(self, request: BatchRequest) -> None:
        ids, vocab_size = np.asarray(request.prompt_ids), self._target.vocab_size
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise RequestError(
                f"prompt_ids is {request.prompt_ids!r:.80}: give one or more token ids"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise RequestError(
                f"the prompt holds token id {bad}, but the vocabulary has {vocab_size} tokens; "
                f"allowed: 0 to {vocab_size - 1}"
            )
        if ids.size >= self._target.capacity:
            raise PromptTooLong(
                f"the prompt has {ids.size} tokens, the bundle's context is "
                f"{self._target.capacity} and must hold a new one too; shorten it, or export with "
                "a larger --max-seq-len"
            )
        checked_count("max_new_tokens", request.max_new_tokens)
        request.params.validate_for_vocab(vocab_size)

    def _answers(self, requests: Iterator[BatchRequest]) -> Iterator[BatchAnswer]:
        rows: list[_Row | None] = [None] * self.rows
        while rows:
            for index in range(len(rows)):
                yield from self._refill(rows, index, requests)
            running = self._close_gaps(rows)
            self._step(running)
            for index, row in enumerate(running):
                if (answer := row.answer(self._eos)) is not None:
                    rows[index] = None
                    yield answer

    def _refill(
        self, rows: list[_Row | None], index: int, requests: Iterator[BatchRequest]
    ) -> Iterator[BatchAnswer]:
        """Takes requests into a free row until one goes on behind its first token."""
        while rows[index] is None and (request := next(requests, None)) is not None:
            row = self._start(request, index)
            if (answer := row.answer(self._eos)) is None:
                rows[index] = row
            else:
                yield answer

    def _start(self, request: BatchRequest, index: int) -> _Row:
        """Prefills row `index` of the cache and draws the first token."""
        self.check(request)
        # The rule speaks of drafts; without one, `coupled` draws each token from p at u_t.
        params = replace(request.params, acceptance="coupled")
        history = self._unread
        if params.penalises:
            history = TokenHistory(self._target.vocab_size)
            history.reset(request.prompt_ids)
        limit = min(request.max_new_tokens, self._target.capacity - len(request.prompt_ids))
        row = _Row(request, AcceptanceRule(params, history, None), history, limit)
        row.draw(self._target.prefill(index, request.prompt_ids, row.rule.want_logits), 0)
        return row

    def _close_gaps(self, rows: list[_Row | None]) -> list[_Row]:
        """Shortens `rows` to those in use: the last ones move into the free ones, caches too."""
        for index in reversed(range(len(rows))):
            if rows[index] is None:
                last = rows.pop()
                if last is not None:
                    self._target.move(len(rows), index, last.past)
                    rows[index] = last
        return [row for row in rows if row is not None]

    def _step(self, rows: list[_Row]) -> None:
        """One target call: every row gets a token."""
        if not rows:
            return
        want_logits = any(row.rule.want_logits for row in rows)
        tokens, past = [row.last_token for row in rows], [row.past for row in rows]
        output = self._target.decode(tokens, past, want_logits)
        for index, row in enumerate(rows):
            row.draw(output, index)
