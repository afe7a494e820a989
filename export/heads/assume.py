"""`--assume KEY=VALUE`: decisions of the user where a checkpoint is ambiguous or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagle3.runtime.errors import CheckpointError


@dataclass(frozen=True)
class _Kind:
    """The values that a key accepts: in words, and as a test."""

    says: str
    holds: Callable[[str], bool]


def _one_of(*values: str) -> _Kind:
    return _Kind(" or ".join(values), values.__contains__)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_BOOLEAN = _one_of("true", "false")
KINDS: Mapping[str, _Kind] = {
    "dialect": _one_of("official", "specforge", "speculators"),
    "layer_ids": _one_of("inputs", "outputs"),
    "d2t": _one_of("offsets", "absolute"),
    "embedding": _one_of("target", "own"),
    "lm_head": _one_of("own", "embedding"),
    "norm_before_residual": _BOOLEAN,
    "norm_before_fc": _BOOLEAN,
    "fc_norm": _BOOLEAN,
    "norm_output": _BOOLEAN,
    "qk_norm": _BOOLEAN,
    "attention_bias": _BOOLEAN,
    "qkv_bias": _BOOLEAN,
    "mlp_bias": _BOOLEAN,
    "bias": _BOOLEAN,
    "head_dim": _Kind("a positive integer", str.isdecimal),
    "rope_theta": _Kind("a number", _is_number),
    "rms_norm_eps": _Kind("a number", _is_number),
    "ignore": _Kind("names of config keys, separated by commas", bool),
}


def parse_assumptions(texts: Sequence[str]) -> dict[str, str]:
    """Parse ["d2t=absolute"] to {"d2t": "absolute"}.

    Raises CheckpointError for text that is not KEY=VALUE, an unknown key, an invalid value, or a
    repeated key.
    """
    given: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in KINDS:
            what = "is no KEY=VALUE" if not equals else f"has the unknown key {key!r}"
            raise CheckpointError(f"--assume {text!r} {what}; the keys are {', '.join(KINDS)}")
        if not KINDS[key].holds(value):
            raise CheckpointError(f"--assume {key} is {value!r}, not {KINDS[key].says}")
        if given.get(key, value) != value:
            raise CheckpointError(
                f"--assume {key} is given twice, as {given[key]!r} and as {value!r}"
            )
        given[key] = value
    return given


class Assumptions:
    """Provides the user's decisions, and tracks which of them were used."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given, self._open = dict(given), set(given)

    def take(self, key: str) -> str | None:
        """Return the value of `key`, or None if the user did not set it."""
        assert key in KINDS, key
        self._open.discard(key)
        return self._given.get(key)

    def boolean(self, key: str) -> bool | None:
        """Like `take`, for a key that is true or false."""
        value = self.take(key)
        return None if value is None else value == "true"

    def ignored(self) -> frozenset[str]:
        """The config keys to ignore."""
        return frozenset((self.take("ignore") or "").split(",")) - {""}

    def check_all_taken(self, head: str) -> None:
        """Raise CheckpointError that names an assumption which decided nothing for `head`."""
        if self._open:
            listed = ", ".join(f"{key}={self._given[key]}" for key in sorted(self._open))
            raise CheckpointError(
                f"--assume {listed}: nothing in {head} depends on it; leave it out"
            )
