"""Reads prompt files and chooses what may be trained on.

Where it sits: the first stage of `eagle3 train data`; `entries.py` knows what a line may be. What
is not usable is counted by reason, never dropped in silence; a prompt of an evaluation file is
never answered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.runtime.errors import DataError
from eagle3.train.data.entries import BrokenLine, Entry, entry_of_line

_SHOWN = 5  # broken lines that are named
_CONTAINED = 50  # characters from which an evaluation turn within a prompt counts as the same


@dataclass
class PromptCounts:
    """What became of the lines that were read."""

    read: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    over_limit: int = 0
    evaluation: int = 0
    examples: list[str] = field(default_factory=list)  # of broken lines

    def break_off(self, where: str, reason: str) -> None:
        """Counts a broken line."""
        self.broken[reason] += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        """For a reader."""
        broken = sum(self.broken.values())
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in self.broken.most_common())
        head = f"{self.read:,} lines read, {broken:,} broken" + (f" ({reasons})" if broken else "")
        more = [f"... and {broken - _SHOWN:,} more"] if broken > len(self.examples) else []
        tail = f"{self.duplicates:,} duplicates, {self.evaluation:,} of an evaluation file refused"
        return [head, *self.examples, *more, tail]


class EvaluationTurns:
    """The turns of evaluation files, to be kept out of training.

    A prompt is one of them when both are equal, letter case and white space apart, or when one
    contains the other and the contained one has 50 characters or more.
    """

    def __init__(self, turns: Iterable[str] = ()) -> None:
        self._turns = {_folded(turn) for turn in turns} - {""}
        self._all = "\0".join(sorted(self._turns))
        self._starts: dict[str, list[str]] = {}
        for turn in self._turns:
            if len(turn) >= _CONTAINED:
                self._starts.setdefault(turn[:_CONTAINED], []).append(turn)

    def __len__(self) -> int:
        return len(self._turns)

    def has(self, prompt: str) -> bool:
        """Whether `prompt` may not be trained on."""
        text = _folded(prompt)
        if text in self._turns or (len(text) >= _CONTAINED and text in self._all):
            return True
        return any(
            turn in text
            for at in range(len(text) - _CONTAINED + 1 if self._starts else 0)
            for turn in self._starts.get(text[at : at + _CONTAINED], ())
        )


class Selection:
    """Conversations in the order in which they came, without duplicates and evaluation prompts.

    Of two with the same prompt, white space apart, the first one's place is kept, and the one that
    has an answer.
    """

    def __init__(self, evaluation: EvaluationTurns) -> None:
        self.counts = PromptCounts()
        self.entries: list[Entry] = []
        self._evaluation = evaluation
        self._places: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        """Takes the conversation, or counts why not."""
        key = " ".join(entry.text.split())
        place = self._places.get(key)
        if place is not None:
            self.counts.duplicates += 1
            if self.entries[place].answer is None and entry.answer is not None:
                self.entries[place] = entry
        elif any(self._evaluation.has(text) for text in entry.said_to_target):
            self.counts.evaluation += 1
        else:
            self._places[key] = len(self.entries)
            self.entries.append(entry)

    def cut(self, limit: int | None) -> None:
        """Forgets all conversations but the first `limit`."""
        if limit is not None:
            self.counts.over_limit = max(len(self.entries) - limit, 0)
            del self.entries[limit:]
            self._places = {key: at for key, at in self._places.items() if at < limit}

    def add_files(self, files: Sequence[Path]) -> None:
        """Reads `.jsonl` files, and others as a prompt a line.

        Raises DataError, naming the file, where one cannot be read or has nothing usable.
        """
        for path in files:
            usable = 0
            for number, line in _lines(path):
                self.counts.read += 1
                try:
                    entry = entry_of_line(line, _is_json(path))
                except BrokenLine as error:
                    self.counts.break_off(f"{path}, line {number}", str(error))
                    continue
                usable += 1
                self.add(entry)
            if not usable:
                why = f" ({self.counts.examples[-1]})" if self.counts.examples else ": it is empty"
                raise DataError(f"{path} holds no prompt that can be used{why}")


def read_evaluation(files: Sequence[Path]) -> EvaluationTurns:
    """The evaluation turns of `.jsonl` files with `turns` or `prompt`, or of texts, one a line.

    Raises DataError for any line that is not understood: it might be trained on.
    """
    turns: list[str] = []
    for path in files:
        before = len(turns)
        for number, line in _lines(path):
            try:
                turns += _turns(line) if _is_json(path) else [line.decode("utf-8")]
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: give an object with `turns`, texts, or `prompt`; "
                    f"what cannot be read cannot be kept out of training ({error})"
                ) from error
        if len(turns) == before:
            raise DataError(f"{path} holds no evaluation prompt")
    return EvaluationTurns(turns)


def _turns(line: bytes) -> list[str]:
    row: Any = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError("no object")
    turns = row["turns"] if "turns" in row else [row.get("prompt")]
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ValueError("no turns")
    return turns


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                stripped = line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n")
                if stripped:
                    yield number, stripped
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _is_json(path: Path) -> bool:
    return path.suffix in (".jsonl", ".json")


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
