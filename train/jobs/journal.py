"""A file of JSON lines that only grows: what is finished stays, whatever happens next.

Every process writes a journal of its own (`conversations.jsonl`, `conversations.1.jsonl` of the
second one, ...) and reads all of them, so that a run goes on with any number of processes. A last
line that is torn, as the process was killed within it, counts for nothing and is cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from eagle3.runtime.errors import DataError


class Journal:
    """Appends to the journal `name` of process `rank`; a context manager."""

    def __init__(self, folder: Path, name: str, rank: int = 0) -> None:
        self.path = folder / (f"{name}.{rank}.jsonl" if rank else f"{name}.jsonl")
        self._kept = 0

    def __enter__(self) -> Self:
        try:
            self._file: BinaryIO = self.path.open("ab", buffering=0)
            whole = sum(map(len, _whole_lines(self.path)))
            if whole < self.path.stat().st_size:
                os.truncate(self.path, whole)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one line. Raises DataError when the disk is full; the lines before it are kept."""
        try:
            write_whole(self._file, json.dumps(row, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}; what it holds is kept, "
                f"{self._kept:,} lines of this run among it. Make room and run the same command "
                "again: it goes on from there"
            ) from error
        self._kept += 1


def write_whole(file: BinaryIO, data: bytes) -> None:
    """All of `data` to an unbuffered file, which may take less at once."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def read_journals(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """The finished lines of the journals of all processes, also of earlier runs.

    Raises DataError, naming file and line, for one that cannot be read.
    """
    for path in sorted({folder / f"{name}.jsonl", *folder.glob(f"{name}.*.jsonl")}):
        if not path.is_file():
            continue
        for number, line in enumerate(_whole_lines(path), 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("no object")
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number} is damaged ({error}): delete that line and run again"
                ) from error
            yield row


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes `path` so that it is either the old file or the whole new one. Raises DataError."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; make room") from error


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a journal less a torn last one."""
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
