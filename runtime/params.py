"""The sampling options of a request, validated when they are created.

`Engine.stream` creates a `SamplingParams` from its options, and `acceptance/sampling.py` applies
it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.errors import RequestError

Acceptance = Literal["rejection", "coupled"]

MAX_THREADS = 1024

_LARGEST = 1e30  # limit of penalties, biases and temperature, so that float32 cannot overflow

_RANGES = {  # field: (lowest value, highest value, note for the error message)
    "temperature": (0.0, _LARGEST, "0 is greedy"),
    "top_p": (0.0, 1.0, "above 0; None is off"),
    "min_p": (0.0, 1.0, "None is off"),
    "repetition_penalty": (1e-6, 1e6, "it divides logits, so it must be above 0; 1 is off"),
    "presence_penalty": (-_LARGEST, _LARGEST, "0 is off"),
    "frequency_penalty": (-_LARGEST, _LARGEST, "0 is off"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. The default is greedy decoding.

    Raises RequestError for an invalid value; the message states field, value and range.
    """

    temperature: float = 0.0
    top_k: int | None = None  # None or 0: off
    top_p: float | None = None  # None or 1: off
    min_p: float | None = None  # None or 0: off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    acceptance: Acceptance = "rejection"

    def __post_init__(self) -> None:
        for name, (low, high, note) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in ("top_p", "min_p"):
                # Stored as a Python float, so that float32 arithmetic stays float32.
                object.__setattr__(self, name, _checked_float(name, value, low, high, note))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", _checked_int("top_k", self.top_k, None))
        object.__setattr__(self, "seed", _checked_int("seed", self.seed, 2**64))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.acceptance not in get_args(Acceptance):
            raise RequestError(
                f"acceptance must be one of {', '.join(get_args(Acceptance))}, got"
                f" {self.acceptance!r}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax, so that no random number is drawn."""
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether greedy decoding needs the logits on the host, not only the engine's argmax."""
        return self.penalises or bool(self.logit_bias)

    @property
    def penalises(self) -> bool:
        """Whether a penalty is active, so that the text so far changes the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Raise RequestError if logit_bias names a token id outside [0, V)."""
        outside = [token for token in self.logit_bias if token >= vocab_size]
        if outside:
            raise RequestError(
                f"logit_bias names token id {outside[0]}, but the vocabulary has {vocab_size} "
                f"tokens; allowed: 0 to {vocab_size - 1}"
            )

    @cached_property
    def bias_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`logit_bias` as token ids int64 [n] and values float32 [n]."""
        ids = np.fromiter(self.logit_bias.keys(), np.int64, len(self.logit_bias))
        values = np.fromiter(self.logit_bias.values(), np.float32, len(self.logit_bias))
        return ids, values


def _checked_float(name: str, value: Any, low: float, high: float, note: str) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    # The comparison is false for NaN as well.
    if not number or not low <= value <= high or (name == "top_p" and value == 0):
        allowed = f"a number in [{low:g}, {high:g}] ({note})"
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}")
    return float(value)


def _checked_int(name: str, value: Any, limit: int | None) -> int:
    number = isinstance(value, Integral) and not isinstance(value, bool)
    if not number or value < 0 or (limit is not None and value >= limit):
        below = "" if limit is None else f" and < {limit}"
        raise RequestError(f"{name} is {value!r}; allowed: an integer >= 0{below}")
    return int(value)


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}; allowed: a mapping of token id to number")
    return {
        _checked_int("a logit_bias token id", token, None): _checked_float(
            f"logit_bias of token {token}", value, -_LARGEST, _LARGEST, "added to the logit"
        )
        for token, value in bias.items()
    }


def checked_count(name: str, value: int) -> int:
    """Return `value` as an int of at least 1. Raises RequestError that names the option."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise RequestError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)


def checked_threads(threads: int | None) -> int:
    """Return the number of threads of an engine; None means all cores available to the process.

    Raises RequestError.
    """
    if threads is None:
        return len(os.sched_getaffinity(0))
    count = checked_count("threads", threads)
    if count > MAX_THREADS:
        raise RequestError(f"threads must be at most {MAX_THREADS}, got {threads}")
    return count
