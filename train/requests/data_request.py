"""The settings of `eagle3 train data`, validated once, and the summary of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.runtime.errors import DataError

ANSWER_ROOM = 16  # tokens of the context that a prompt must leave for its answer


@dataclass(frozen=True)
class DataRequest:
    """The settings of one run that turns prompt files into a data folder.

    target: checkpoint, given as for `eagle3 export --target`. prompts: files to read. output: the
    data folder. evaluation: files whose prompts are never trained on. rows: number of prompts
    answered at the same time. max_new_tokens: maximum length of an answer. max_len: context in
    tokens; a prompt that leaves fewer than 16 tokens for its answer is left out. temperatures: one
    is drawn for each prompt. seed: of sampling and joining. synthesize: number of prompts that the
    target writes itself. long_share: share of the conversations to join into longer ones of up to
    long_tokens tokens. features: also store the target's hidden states of the layers aux_layer_ids
    (None: 2, L//2, L-3) and L. bf16: compute these in bfloat16. threads: CPU threads (None: the
    engine's default). limit: maximum number of prompts used from the files (None: unlimited). raw:
    use prompts as they are, without the chat template.

    Raises DataError for a value out of range and for options that exclude each other.
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
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(self.max_len > ANSWER_ROOM, "max_len", self.max_len, f"above {ANSWER_ROOM}")
        _require(0 <= self.long_share <= 1, "long_share", self.long_share, "from 0 to 1")
        good = [math.isfinite(t) and t >= 0 for t in self.temperatures]
        rule = "one or more finite numbers, each at least 0"
        _require(all(good) and bool(good), "temperatures", self.temperatures, rule)
        if not self.prompts and not self.synthesize:
            raise DataError("there are no prompts to answer: give --prompts or --synthesize")
        if not self.features and (self.bf16 or self.aux_layer_ids is not None):
            raise DataError(
                "--bf16 and --aux-layers apply only to stored features: add --features, or remove "
                "these options"
            )
        if self.raw and (self.synthesize or self.long_share):
            raise DataError(
                "--raw disables the chat template, which --synthesize and --long-share require: "
                "remove --raw, or remove these options"
            )

    def recipe(self) -> dict[str, Any]:
        """Return the options as a JSON object, without those that do not change the data."""
        options = asdict(self)
        for name in ("output", "rows", "threads"):
            del options[name]
        for name in ("prompts", "evaluation"):
            options[name] = [str(path) for path in options[name]]
        return options


@dataclass(frozen=True)
class DataSummary:
    """A finished data folder, and the counts in its dataset.json."""

    folder: Path
    counts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object, for --json."""
        return {"folder": str(self.folder), "counts": dict(self.counts)}

    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        c = self.counts
        return [
            f"{self.folder}: {c['conversations']:,} conversations, {c['tokens']:,} tokens, "
            f"{c['written_tokens']:,} of them written by the target",
            f"prompts: {c['answered']:,} answered by the target, {c['given']:,} came with an answer"
            f"; {c['synthesized']:,} of the prompts were written by the target",
            f"left out: {sum(c['broken'].values()):,} invalid, {c['duplicates']:,} duplicates, "
            f"{c['evaluation']:,} in an evaluation file, {c['too_long']:,} too long, "
            f"{sum(c['refused'].values()):,} refused, {c['over_limit']:,} over --limit",
        ]


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise DataError(f"{name} must be {wanted}, got {value!r}")
