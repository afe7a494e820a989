"""Reading of prompt files, and selection of the conversations that may be trained on.

This is the first stage of `eagle3 train data`; `entries.py` parses single lines. Lines that cannot
be used are counted by reason, never dropped silently. A prompt of an evaluation file is never
answered.
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

_SHOWN = 5  # number of invalid lines that are reported one by one
_CONTAINED = 50  # minimum length in characters for containment to count as a match


@dataclass
class PromptCounts:
    """Counts of the lines that were read.

    read: all lines. broken: invalid lines by reason. duplicates: conversations that repeat an
    earlier one. over_limit: conversations beyond the limit. evaluation: conversations with an
    evaluation prompt. examples: descriptions of the first invalid lines.
    """

    read: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    over_limit: int = 0
    evaluation: int = 0
    examples: list[str] = field(default_factory=list)

    def break_off(self, where: str, reason: str) -> None:
        """Count an invalid line. where: its file and line number."""
        self.broken[reason] += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        """Return the counts as lines of text."""
        broken = sum(self.broken.values())
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in self.broken.most_common())
        head = f"{self.read:,} lines read, {broken:,} invalid" + (f" ({reasons})" if broken else "")
        more = [f"... and {broken - _SHOWN:,} more"] if broken > len(self.examples) else []
        tail = f"left out: {self.duplicates:,} duplicates, {self.evaluation:,} in evaluation files"
        return [head, *self.examples, *more, tail]


class EvaluationTurns:
    """The turns of evaluation files, which must not be trained on.

    A prompt matches a turn if both are equal, or if one contains the other and the contained one
    has at least 50 characters. Letter case and white space are ignored.
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
        """Return True if `prompt` matches a turn, so that it must not be trained on."""
        text = _folded(prompt)
        if text in self._turns or (len(text) >= _CONTAINED and text in self._all):
            return True
        return any(
            turn in text
            for at in range(len(text) - _CONTAINED + 1 if self._starts else 0)
            for turn in self._starts.get(text[at : at + _CONTAINED], ())
        )


class Selection:
    """Conversations in input order, without duplicates and evaluation prompts.

    Two conversations are duplicates if they have the same messages up to the prompt; white space is
    ignored. The position of the first one is kept. Its content is kept too, unless only the later
    one has an answer.
    """

    def __init__(self, evaluation: EvaluationTurns) -> None:
        self.counts = PromptCounts()
        self.entries: list[Entry] = []
        self._evaluation = evaluation
        self._places: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        """Add the conversation, or count the reason why it is left out."""
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
        """Keep only the first `limit` conversations; None keeps all."""
        if limit is not None:
            self.counts.over_limit = max(len(self.entries) - limit, 0)
            del self.entries[limit:]
            self._places = {key: at for key, at in self._places.items() if at < limit}

    def add_files(self, files: Sequence[Path]) -> None:
        """Add the conversations of prompt files.

        Files named `.jsonl` or `.json` have one JSON object per line; other files have one prompt
        per line. Raises DataError, naming the file, if one cannot be read or has no usable line.
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
                raise DataError(f"{path} contains no usable prompt{why}")


def read_evaluation(files: Sequence[Path]) -> EvaluationTurns:
    """Read the evaluation turns of files.

    Files named `.jsonl` or `.json` have objects with `turns` or `prompt`; other files have one
    prompt per line. Raises DataError for any line that cannot be parsed, because its prompt could
    then be trained on.
    """
    turns: list[str] = []
    for path in files:
        before = len(turns)
        for number, line in _lines(path):
            try:
                turns += _turns(line) if _is_json(path) else [line.decode("utf-8")]
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number} must be an object with `turns` (a list of strings) or "
                    f"`prompt` (a string), else it cannot be kept out of training: {error}"
                ) from error
        if len(turns) == before:
            raise DataError(f"{path} contains no evaluation prompt")
    return EvaluationTurns(turns)


def _turns(line: bytes) -> list[str]:
    row: Any = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    turns = row["turns"] if "turns" in row else [row.get("prompt")]
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ValueError("`turns` or `prompt` is missing, empty or of the wrong type")
    return turns


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the stripped bytes of every line that is not blank."""
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
