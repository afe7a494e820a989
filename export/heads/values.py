"""Looks up a head's values where its dialect keeps them, and records what decided each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.export.heads.assume import KINDS, Assumptions
from eagle3.export.heads.dialects import fields
from eagle3.export.heads.head_config import Resolved
from eagle3.runtime.errors import CheckpointError

FLAG, CONFIG, DEFAULT, TENSORS = "flag", "config", "dialect default", "tensors"


class Values:
    """The keys of several levels of a config, first to last, overridden by the user's assumptions.

    Each value read is recorded in `resolved` under its key. Raises CheckpointError for a value of
    a wrong type, or one on which two levels disagree.
    """

    def __init__(self, levels: Sequence[Mapping[str, Any]], assume: Assumptions) -> None:
        self._levels, self.assume = levels, assume
        self.resolved: dict[str, Resolved] = {}

    def note(self, key: str, value: Any, source: str) -> None:
        """Record a value that was resolved elsewhere."""
        self.resolved[key] = Resolved(value, source)

    def given(self, key: str) -> dict[str, Any]:
        """Return {key: value} of the config, empty if absent or null."""
        found = [level[key] for level in self._levels if level.get(key) is not None]
        if any(value != found[0] for value in found[1:]):
            raise CheckpointError(f"the head's config has {key} twice: {found[0]!r}, {found[1]!r}")
        return {key: found[0]} if found else {}

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        assumed = self._assumed(key)
        if assumed is not None:
            value, source = fields.integer({key: int(assumed)}, key), FLAG
        else:
            given = self.given(key)
            value, source = fields.integer(given, key, default), self._source(given)
        self.note(key, value, source)
        return value

    def number(self, key: str, default: float, high: float) -> float:
        """Return a number in (0, high]."""
        assumed = self._assumed(key)
        if assumed is not None:
            value, source = fields.number({key: float(assumed)}, key, high=high), FLAG
        else:
            given = self.given(key)
            value, source = fields.number(given, key, default, high), self._source(given)
        self.note(key, value, source)
        return value

    def switch(self, key: str, default: bool = False, why: str = DEFAULT) -> bool:
        """Return true or false. why: the source of the default."""
        assumed = self._assumed(key)
        if assumed is not None:
            value, source = assumed == "true", FLAG
        else:
            given = self.given(key)
            value, source = fields.boolean(given, key, default), self._source(given, why)
        self.note(key, value, source)
        return value

    def _assumed(self, key: str) -> str | None:
        return self.assume.take(key) if key in KINDS else None

    @staticmethod
    def _source(given: Mapping[str, Any], why: str = DEFAULT) -> str:
        return CONFIG if given else why
