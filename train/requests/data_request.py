"""What `eagle3 train data` is asked for, validated once, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.runtime.errors import DataError

ANSWER_ROOM = 16  # tokens of the context that a prompt must leave


@dataclass(frozen=True)
class DataRequest:
    """Prompt files in, a data folder out.

    target: as `eagle3 export` takes it. evaluation: files whose prompts are never trained on.
    rows: prompts answered at once. max_new_tokens: of an answer. max_len: context in tokens; a
    prompt that leaves less than 16 of them is left out. temperatures: one is drawn for each
    prompt. synthesize: prompts that the target makes up. long_share: of the conversations, joined
    into ones of up to long_tokens. features: also store the target's hidden states, of the layers
    aux_layer_ids (None: 2, L//2, L-3) and L; bf16: computed in bfloat16. limit: prompts of the
    files that are used. raw: prompts as they are, without the chat template.
    Raises DataError for a value out of range.
    """

    target: str
    prompts: tuple[Path, ...]
    output: Path
    evaluation: tuple[Path, ...] = ()
    rows: int = 32
    max_new_tokens: int = 288
    max_len: int = 2048
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 0
    synthesize: int = 0
    long_share: float = 0.0
    long_tokens: int = 1600
    features: bool = False
    aux_layer_ids: tuple[int, ...] | None = None
    bf16: bool = False
    threads: int | None = None
    limit: int | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "max_new_tokens", "long_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("synthesize", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.max_len > ANSWER_ROOM, "max_len", self.max_len, f"more than {ANSWER_ROOM}")
        _require(0 <= self.long_share <= 1, "long_share", self.long_share, "from 0 to 1")
        good = [math.isfinite(t) and t >= 0 for t in self.temperatures]
        _require(all(good) and bool(good), "temperatures", self.temperatures, "0 or more, each")
        if not self.prompts and not self.synthesize:
            raise DataError("there is nothing to answer: give --prompts or --synthesize")
        if not self.features and (self.bf16 or self.aux_layer_ids is not None):
            raise DataError(
                "--bf16 and --aux-layers say how features are made: give --features too, or leave "
                "them out"
            )
        if self.raw and (self.synthesize or self.long_share):
            raise DataError(
                "--raw leaves out the chat template, which --synthesize and "
                "--long-share are made of: leave out one or the other"
            )

    def recipe(self) -> dict[str, Any]:
        """The options as JSON has them, less what is no part of the data."""
        options = asdict(self)
        for name in ("output", "rows", "threads"):
            del options[name]
        for name in ("prompts", "evaluation"):
            options[name] = [str(path) for path in options[name]]
        return options


@dataclass(frozen=True)
class DataSummary:
    """A finished data folder and the counts that its dataset.json has."""

    folder: Path
    counts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"folder": str(self.folder), "counts": dict(self.counts)}

    def lines(self) -> list[str]:
        """For a reader."""
        c = self.counts
        return [
            f"{self.folder}: {c['conversations']:,} conversations, {c['tokens']:,} tokens, "
            f"{c['written_tokens']:,} of them written by the target",
            f"prompts: {c['answered']:,} answered by the target, {c['given']:,} came with an answer"
            f", {c['synthesized']:,} of them made by the target",
            f"left out: {sum(c['broken'].values()):,} broken, {c['duplicates']:,} duplicates, "
            f"{c['evaluation']:,} of an evaluation file, {c['too_long']:,} too long, "
            f"{sum(c['refused'].values()):,} refused, {c['over_limit']:,} over --limit",
        ]


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise DataError(f"{name} is {value!r}: give {wanted}")
