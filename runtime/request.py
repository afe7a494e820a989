"""A request: the options that `Engine.stream` accepts, and their validated form."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TypedDict

from eagle3.plans.tree_plan import TreePlan, TreeRequest
from eagle3.runtime.errors import RequestError
from eagle3.runtime.params import Acceptance, SamplingParams

MAX_LOGPROBS = 20


class Options(TypedDict, total=False):
    """The options of `Engine.stream`, which documents them and sets their defaults."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int
    acceptance: Acceptance
    stop: str | Sequence[str] | None
    chat: bool
    drafter: str | None
    draft_top_k: int | None
    draft_depth: int | None
    num_draft_tokens: int | None
    tree: TreeRequest | None
    logprobs: int | bool | None
    cancel: threading.Event | None


@dataclass(frozen=True)
class Request:
    """A validated request."""

    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...]
    drafter: str
    tree: TreePlan
    may_fall_back: bool
    num_logprobs: int | None
    cancel: threading.Event = field(default_factory=threading.Event)


def checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings as a tuple. Raises RequestError."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, bytes) or not isinstance(stop, Sequence):
        raise RequestError(f"stop must be a string or a list of strings, got {stop!r:.80}")
    return tuple(stop)


def checked_cancel(cancel: threading.Event | None) -> threading.Event:
    """Return `cancel`, or a new event if it is None. Raises RequestError."""
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise RequestError(f"cancel must be a threading.Event, got {cancel!r:.80}")
    return threading.Event() if cancel is None else cancel


def checked_logprobs(logprobs: int | bool | None) -> int | None:
    """Return the number of alternatives per token, or None for no log-probabilities.

    Raises RequestError.
    """
    if logprobs is None or logprobs is False:
        return None
    count = 0 if logprobs is True else logprobs
    if not isinstance(count, Integral) or not 0 <= int(count) <= MAX_LOGPROBS:
        raise RequestError(
            f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {logprobs!r}"
        )
    return int(count)
