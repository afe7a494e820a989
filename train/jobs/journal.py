"""Append-only files of JSON lines, so that finished work survives a crash.

Every process writes its own journal (`conversations.jsonl` for the first process,
`conversations.1.jsonl` for the second, ...) and reads all of them, so that a run can continue with
any number of processes. If a process is killed while it writes a line, that incomplete last line is
ignored by readers and removed when the journal is opened again.
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
    """Context manager that appends to the journal `name` of process `rank`.

    Entering it creates the file, or removes an incomplete last line from it. Raises DataError if
    the file cannot be written.
    """

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
        """Write one line.

        Raises DataError if it cannot be written, for example because the disk is full. The lines
        before it are kept.
        """
        try:
            write_whole(self._file, json.dumps(row, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}; its earlier lines are kept, "
                f"{self._kept:,} of them from this run. Free disk space and run the same command "
                "again to continue"
            ) from error
        self._kept += 1


def write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may accept only a part per call."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def read_journals(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of the journals of all processes, including earlier runs.

    Raises DataError, naming file and line, if a line is not a JSON object, and naming the file if
    it cannot be read.
    """
    for path in sorted({folder / f"{name}.jsonl", *folder.glob(f"{name}.*.jsonl")}):
        if not path.is_file():
            continue
        for number, line in enumerate(_whole_lines(path), 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a JSON object")
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number} is damaged ({error}): delete that line and run again"
                ) from error
            yield row


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `path` atomically: it holds either its old contents or all of the new ones.

    Raises DataError if it cannot be written.
    """
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; free disk space") from error


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a journal without an incomplete last one."""
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
