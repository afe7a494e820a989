"""Writes a bundle in a temporary folder beside its destination, and renames it at the end.

An export that is interrupted or fails its self-check therefore leaves nothing incomplete.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.plans.tensorrt.plan_files import FOLDER, foreign_files
from eagle3.runtime.bundle.folder import MANIFEST_NAME, Bundle
from eagle3.runtime.bundle.manifest import FORMAT
from eagle3.runtime.errors import ExportError


def check_output(output: Path, force: bool) -> None:
    """Raise ExportError, before the long work, if the output cannot or must not be written."""
    if output.name in ("", ".."):
        raise ExportError(f"output {output} has no folder name; use one, as in ./bundle")
    with staging(output):
        pass
    if not output.exists():
        return
    if not force:
        raise ExportError(f"{output} exists; choose another folder or pass --force to replace it")
    found = _foreign(output)
    if found:
        raise ExportError(
            f"{output} exists and is not only a bundle: {found}; it will not be replaced,"
            " so choose another folder, or move it away"
        )


def _foreign(output: Path) -> str:
    """Return what `output` contains that no export wrote, in words; "" for a bundle or an empty
    folder.
    """
    try:
        names = {path.name for path in output.iterdir()}  # the manifest does not list folders
    except OSError as error:
        return f"it is not a readable folder ({error.strerror})"
    if not names:
        return ""
    try:
        manifest = json.loads((output / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST_NAME}, but {_some(names)}"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return (
            f"its {MANIFEST_NAME} does not have the format {FORMAT!r}; it contains {_some(names)}"
        )
    listed = manifest.get("files")
    others = names - {MANIFEST_NAME, *(listed if isinstance(listed, dict) else ())}
    if FOLDER in others:
        others = others - {FOLDER} | {f"{FOLDER}/{name}" for name in foreign_files(output / FOLDER)}
    return f"its {MANIFEST_NAME} does not list {_some(others)}" if others else ""


def _some(names: set[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """Create a temporary folder on the output's file system. It is deleted unless it
    was renamed.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}") from error
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, output: Path) -> None:
    """Rename the finished folder to `output`, and delete the previous one only after that.

    If that fails, the previous one is moved back; if even that fails, it is kept beside it.
    """
    # Not with `staging`, which would delete what could not be moved back.
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
    old = aside / output.name
    try:
        if output.exists():
            output.rename(old)
        folder.rename(output)
    except BaseException as error:
        _move_back(old, output)
        if isinstance(error, OSError):
            raise ExportError(f"{output} cannot be written: {error}") from error
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _move_back(old: Path, output: Path) -> None:
    try:
        if old.exists():
            old.rename(output)
        old.parent.rmdir()
    except OSError as error:
        raise ExportError(
            f"{output} could not be replaced ({error}); the old bundle is now {old}"
        ) from error


def copy_files(bundle: Bundle, names: Iterable[str], folder: Path) -> None:
    """Copy files of a bundle into `folder`. Not as hard links, which readers of weights refuse."""
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path(name), place)
