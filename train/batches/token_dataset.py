"""The packed conversations that training reads: all tokens in one array, and who wrote each one.

Besides the journal that `train/data/answers.py` writes, a data folder contains:

    tokens.npy      int32 [T], the token ids of all conversations, one after the other
    written.npy     bool [T], True where the target wrote the token; the loss counts only these
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
    """Token ids, and for each one whether the target wrote it (end tokens of answers included)."""

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
        """Number of tokens of each conversation, int64 [n]."""
        lengths: NDArray[np.int64] = np.diff(self.offsets)
        return lengths

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError unless every token id is below `vocab_size`."""
        highest = int(self.tokens.max())
        if highest >= vocab_size:
            raise DataError(
                f"the data contains token id {highest}, but the target has {vocab_size} tokens: "
                "use the target that wrote the data"
            )

    def span(self, index: int) -> slice:
        """Return the slice of conversation `index` in `tokens` and `written`."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array to `path` atomically: the file is either the old one or all of the new one.

    Raises DataError if the disk is full or the folder cannot be written.
    """
    _save_arrays({path: array})


def _save_arrays(arrays: Mapping[Path, NDArray[Any]]) -> None:
    """Write files that belong together.

    The last file is deleted before the others are replaced, so that it is missing if the process
    is killed in between.
    """
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
            f"{path} cannot be written: {error.strerror}; the existing files are kept"
        ) from error


def write_dataset(folder: Path, conversations: Iterable[Conversation]) -> TokenDataset:
    """Pack `conversations` into the three arrays of `folder` and open them.

    Raises DataError if there are no conversations, or if the folder cannot be written.
    """
    every = list(conversations)
    if not every:
        raise DataError(f"{folder}: no conversation is left to train on; add more prompts")
    values = {
        "tokens": np.fromiter((i for c in every for i in c.ids), np.int32),
        "written": np.fromiter((w for c in every for w in c.written), np.bool_),
        "offsets": np.cumsum([0, *map(len, every)], dtype=np.int64),
    }
    _save_arrays({folder / f"{name}.npy": array for name, array in values.items()})
    return open_dataset(folder)


def open_dataset(folder: Path) -> TokenDataset:
    """Open the arrays of a data folder, memory-mapped and read-only.

    Raises DataError, naming the file, if one is missing or damaged or has another dtype, and if
    the arrays do not belong together.
    """
    arrays: dict[str, Any] = {}
    for name, dtype in _ARRAYS.items():
        path = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing: create the data with `eagle3 train data ... -o {folder}`"
            ) from error
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if arrays[name].ndim != 1 or arrays[name].dtype != dtype:
            raise DataError(
                f"{path} must be a one-dimensional array of {np.dtype(dtype)}, got "
                f"{arrays[name].dtype} with {arrays[name].ndim} dimensions; create the data again"
            )
    data = TokenDataset(**arrays)
    ends = len(data.offsets) and int(data.offsets[-1])
    if not len(data.tokens) == len(data.written) == ends or bool(np.any(data.lengths < 1)):
        raise DataError(
            f"{folder}: tokens.npy [{len(data.tokens)}], written.npy [{len(data.written)}] and "
            f"offsets.npy (last offset {ends}) do not belong together; create the data again"
        )
    return data
