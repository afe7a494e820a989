"""One run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.runtime.errors import DataError


def make_folder(folder: Path) -> None:
    """Makes `folder` and its parents, if they are not there. Raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder`, which exists, until the block ends or the process does.

    Raises DataError while another process holds it, or where no file can be made in it. Without
    file locks (Windows) nothing is held.
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
                f"another run is at work in {folder}: wait for it, or give another folder"
            ) from error
        yield
