"""A lock that allows one run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.runtime.errors import DataError


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents if they do not exist.

    Raises DataError if that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder`, which must exist, until the block or the process ends.

    Raises DataError if another process holds the lock, or if no file can be created in the folder.
    On systems without file locks (Windows) nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"another run is using {folder}: wait until it has finished, or use another folder"
            ) from error
        yield
