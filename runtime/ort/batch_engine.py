"""Plain decoding with continuous batching: many requests share each target call, without a drafter.

`BatchEngine` is an alternative to `Engine` (`engine.py`) for work where throughput matters and
latency does not, such as generating training data. A row of the batch belongs to one request at a
time. When that request ends, the next request takes the row before the next call. Tokens are chosen
by the same rule as in `Engine` (`rules.py`).

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
    """One prompt and the options for its answer.

    `BatchEngine.check` validates a request when the engine takes it.

    key: chosen by the caller and returned with the answer. prompt_ids: at least one token id of
    the target. params: `params.acceptance` is ignored, because nothing is drafted.
    max_new_tokens: at least 1.
    """

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int


@dataclass(frozen=True)
class BatchAnswer:
    """The answer to a finished request.

    token_ids: the generated tokens without the prompt, including the end token if there was one.
    finish_reason: "stop" for an end token; "length" for max_new_tokens or the end of the context.
    """

    key: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass
class _Row:
    """A request in the batch. Its newest token is not in the cache yet."""

    request: BatchRequest
    rule: AcceptanceRule
    history: TokenHistory
    limit: int  # number of tokens that may be generated
    token_ids: list[int] = field(default_factory=list)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def past(self) -> int:
        """Number of filled cache slots before the last token runs."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def draw(self, output: TargetOutput, index: int) -> None:
        """Choose the next token from row `index` of `output` and append it.

        Raises EngineError, whose message names the key of the request.
        """
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
        """Return the answer if the row has ended, otherwise None."""
        if self.token_ids[-1] in eos:
            reason = "stop"
        elif len(self.token_ids) == self.limit:
            reason = "length"
        else:
            return None
        return BatchAnswer(self.request.key, tuple(self.token_ids), reason)


class BatchEngine:
    """Decodes up to `rows` requests at once with the target of a bundle.

    The bundle may use any lowering and may or may not have a draft.

    bundle: folder of the bundle, or an open Bundle.
    rows: number of sequences per call. The cache block is allocated for all of them at the plan's
    capacity, but occupies memory only as far as it is filled.
    threads: as in `eagle3.load`.
    Raises BundleError, EngineMissing or RequestError.
    """

    def __init__(
        self, bundle: str | Path | Bundle, *, rows: int = DEFAULT_ROWS, threads: int | None = None
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.rows = checked_count("rows", rows)
        self.clock = Clock()
        self._target = BatchTarget(self.bundle, self.rows, checked_threads(threads), self.clock)
        self._eos = frozenset(self.bundle.manifest.generation.eos_token_ids)
        self._unread = TokenHistory(
            self._target.vocab_size
        )  # for rows without penalties, which never read it
        self._turn = threading.Lock()

    def generate(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        """Yield answers in the order in which they finish. Take a request only when a row is free.

        Greedy tokens are the argmax. Sampled tokens are drawn by the `coupled` rule, so the same
        seed produces the text of `Engine.generate(..., drafter="none", acceptance="coupled")`. The
        other requests in the batch affect rounding, but nothing else. Closing the iterator drops
        the requests that are still running.

        The following errors end the iteration. Raises RequestError (or PromptTooLong, a subclass)
        if `check` rejects a request, before anything runs for that request. Raises RequestError if
        another iterator of this engine is still open. Raises EngineError, with the key of the
        request, if the target fails.
        """
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "another generate() of this engine is still open; read it to its end or call "
                "close() on it"
            )
        try:
            yield from self._answers(iter(requests))
        except EngineError:
            self._target.clear()
            raise
        finally:
            self._turn.release()

    def check(self, request: BatchRequest) -> None:
        """Raise RequestError or PromptTooLong if `request` cannot be served.

        The message names the key of the request.
        """
        try:
            self._check(request)
        except RequestError as error:
            raise type(error)(f"request '{request.key}': {error}") from error

    def _check(self, request: BatchRequest) -> None:
        ids, vocab_size = np.asarray(request.prompt_ids), self._target.vocab_size
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise RequestError(
                f"prompt_ids must be one or more token ids, got {request.prompt_ids!r:.80}"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise RequestError(
                f"the prompt contains token id {bad}, but the vocabulary has {vocab_size} tokens; "
                f"allowed: 0 to {vocab_size - 1}"
            )
        if ids.size >= self._target.capacity:
            raise PromptTooLong(
                f"the prompt has {ids.size} tokens, but the bundle's context is "
                f"{self._target.capacity} tokens and must also hold at least one new token; "
                "shorten the prompt, or export the bundle with a larger --max-seq-len"
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
        """Start requests in a free row until one of them continues after its first token.

        Yields the answers of those that end with their first token.
        """
        while rows[index] is None and (request := next(requests, None)) is not None:
            row = self._start(request, index)
            if (answer := row.answer(self._eos)) is None:
                rows[index] = row
            else:
                yield answer

    def _start(self, request: BatchRequest, index: int) -> _Row:
        """Prefill row `index` of the cache with the prompt and draw the first token."""
        self.check(request)
        # Acceptance rules are about drafts. Without a draft, `coupled` draws each token from p at
        # u_t.
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
        """Shorten `rows` to those in use by moving the last ones, with their caches, into gaps."""
        for index in reversed(range(len(rows))):
            if rows[index] is None:
                last = rows.pop()
                if last is not None:
                    self._target.move(len(rows), index, last.past)
                    rows[index] = last
        return [row for row in rows if row is not None]

    def _step(self, rows: list[_Row]) -> None:
        """Run one target call and append one token to every row."""
        if not rows:
            return
        want_logits = any(row.rule.want_logits for row in rows)
        tokens, past = [row.last_token for row in rows], [row.past for row in rows]
        output = self._target.decode(tokens, past, want_logits)
        for index, row in enumerate(rows):
            row.draw(output, index)
