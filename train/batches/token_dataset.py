"""Conversations as training reads them: all tokens in one array, and who wrote each of them.

A data folder holds, besides the journal that `eagle3.train.data.answers` writes:

    tokens.npy      int32 [T], the conversations one after the other
    written.npy     bool [T], true where the target wrote the token: the loss counts these alone
    offsets.npy     int64 [n+1], conversation i is tokens[offsets[i]:offsets[i+1]]
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.errors import DataError

_ARRAYS = {"tokens": np.int32, "written": np.bool_, "offsets": np.int64}


@dataclass(frozen=True)
class Conversation:
    """Token ids, and for each one whether the target wrote it (its end token included)."""

    ids: tuple[int, ...]
    written: tuple[bool, ...]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.written)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TokenDataset:
    """The arrays of a data folder, memory-mapped: tokens [T], written [T], offsets [n+1]."""

    tokens: NDArray[np.int32]
    written: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation, int64 [n]."""
        lengths: NDArray[np.int64] = np.diff(self.offsets)
        return lengths

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises DataError for a token that a target of `vocab_size` tokens does not have."""
        highest = int(self.tokens.max())
        if highest >= vocab_size:
            raise DataError(
                f"the data has token id {highest}, but the target has {vocab_size} tokens: give "
                "the target that the data came from"
            )

    def span(self, index: int) -> slice:
        """Where conversation `index` stands in `tokens` and `written`."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Writes `path` so that it is either the old file or the whole new one.

    Raises DataError when the disk is full or the folder cannot be written.
    """
    _save_arrays({path: array})


def _save_arrays(arrays: Mapping[Path, NDArray[Any]]) -> None:
    """Files that belong together, the last of which is missing when a kill left them half new."""
    parts = {path: path.with_suffix(".part") for path in arrays}
    try:
        for path, array in arrays.items():
            with parts[path].open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        if len(arrays) > 1:
            path.unlink(missing_ok=True)
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise DataError(
            f"{path} cannot be written: {error.strerror}; what was there is kept"
        ) from error


def write_dataset(folder: Path, conversations: Iterable[Conversation]) -> TokenDataset:
    """Packs `conversations` into the three arrays and opens them.

    Raises DataError where there is none, or the folder cannot be written.
    """
    every = list(conversations)
    if not every:
        raise DataError(f"{folder}: no conversation is left to train on")
    values = {
        "tokens": np.fromiter((i for c in every for i in c.ids), np.int32),
        "written": np.fromiter((w for c in every for w in c.written), np.bool_),
        "offsets": np.cumsum([0, *map(len, every)], dtype=np.int64),
    }
    _save_arrays({folder / f"{name}.npy": array for name, array in values.items()})
    return open_dataset(folder)


def open_dataset(folder: Path) -> TokenDataset:
    """Raises DataError, naming the file, where one is missing, broken or does not fit."""
    arrays: dict[str, Any] = {}
    for name, dtype in _ARRAYS.items():
        path = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing: make the data with `eagle3 train data ... -o {folder}`"
            ) from error
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if arrays[name].ndim != 1 or arrays[name].dtype != dtype:
            raise DataError(f"{path} is {arrays[name].dtype}, not a list of {np.dtype(dtype)}")
    data = TokenDataset(**arrays)
    ends = len(data.offsets) and int(data.offsets[-1])
    if not len(data.tokens) == len(data.written) == ends or bool(np.any(data.lengths < 1)):
        raise DataError(
            f"{folder}: tokens [{len(data.tokens)}], written [{len(data.written)}] and the offsets "
            f"(last {ends}) do not belong together; make the data again"
        )
    return data
