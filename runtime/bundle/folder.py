"""A bundle folder: its manifest, and the checks made before anything in it is loaded.

`Bundle.open` reads `manifest.json` and checks name, kind and size of every file it lists, so a
truncated copy or a path that leaves the folder is refused in milliseconds. Small files are hashed
too, because a file mix-up can keep their size. `Bundle.verify_hashes` hashes everything. Export
uses `describe_files` and `write_manifest`.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle.manifest import HEAD_METHODS, FileInfo, Manifest, target_ids_name
from eagle3.runtime.errors import BundleError

MANIFEST_NAME = "manifest.json"
PARTIAL_NAME = "manifest.json.partial"
MAX_MANIFEST_BYTES = 16 << 20
MAX_SMALL_BYTES = 16 << 20
"""Files up to this size are hashed whenever a bundle is opened."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. `root` is its resolved folder; every file listed in `manifest` exists."""

    root: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Bundle":
        """Open the folder `path`.

        Raises BundleError if it is not a bundle, if its schema version differs, or if a file is
        missing, truncated, not listed, not a regular file or outside the folder. Files larger than
        MAX_SMALL_BYTES are not hashed.
        """
        root = _bundle_folder(Path(path))
        try:
            manifest = Manifest.from_json(_read_manifest(root))
        except BundleError as error:
            raise BundleError(f"{root / MANIFEST_NAME}: {error}") from error
        for name, info in manifest.files.items():
            _check_size(root, name, info)
        bundle = cls(root, manifest)
        bundle._check_weight_files()
        bundle._check_hashes(MAX_SMALL_BYTES)
        bundle.chat_template()
        for draft in manifest.drafts:
            if manifest.drafts[draft].method in HEAD_METHODS:
                bundle.target_ids(draft)
        return bundle

    def path(self, name: str) -> Path:
        """Return the absolute path of the file listed as `name`. Raises BundleError if
        not listed.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.root} has no file {name!r}; it has {[*self.manifest.files]}")
        return self.root / name

    def chat_template(self) -> str | None:
        """Return the source of the chat template, or None. Raises BundleError if it is
        not UTF-8.
        """
        name = self.manifest.tokenizer.chat_template
        if name is None:
            return None
        try:
            return self.path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(
                f"{self.root / name} cannot be read as UTF-8: {error}; export the bundle again"
            ) from error

    def target_ids(self, draft: str) -> NDArray[np.int64]:
        """Return the target's id of every draft id of the head `draft`, int64 [Vd].

        Raises BundleError unless the ids are distinct and inside the target's vocabulary.
        """
        path, info = self.path(target_ids_name(draft)), self.manifest.drafts[draft]
        ids = _read_ids(path, info.draft_vocab_size)
        vocab_size = self.manifest.target.vocab_size
        if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
            raise BundleError(
                f"{path} holds ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} distinct"
                f" of {len(ids)}; all must be distinct and below target.vocab_size {vocab_size}:"
                " export the bundle again"
            )
        return ids

    def verify_hashes(self) -> None:
        """Compare the SHA-256 of every file. Raises BundleError that names the first
        that differs.
        """
        self._check_hashes(None)

    def _check_weight_files(self) -> None:
        """Raise BundleError if a weight file beside a graph is not listed, as the graph would read
        it.
        """
        for engine in self.manifest.engines.values():
            name = f"{engine.file}.data"
            if name not in self.manifest.files and os.path.lexists(self.root / name):
                raise BundleError(
                    f"{self.root / name} is not listed in `files` of the manifest, but"
                    f" {engine.file} may read it; export the bundle again"
                )

    def _check_hashes(self, max_bytes: int | None) -> None:
        """Compare the SHA-256 of every file of at most `max_bytes` (None: of every file)."""
        for name, info in self.manifest.files.items():
            if max_bytes is not None and info.size > max_bytes:
                continue
            found = _sha256(_regular_file(self.root, name))
            if found != info.sha256:
                raise BundleError(
                    f"{self.root / name} is not the exported file: its SHA-256 is {found}, expected"
                    f" {info.sha256}; copy the bundle or export it again"
                )


def describe_files(folder: str | os.PathLike[str]) -> dict[str, FileInfo]:
    """Return size and SHA-256 of every file under `folder` except the manifest.

    The keys are relative paths, sorted. Raises BundleError for what a bundle cannot contain: a link
    that leaves the folder, or a pipe.
    """
    root = Path(folder).resolve()
    names = sorted(path.relative_to(root).as_posix() for path in _walk(root))
    own = (MANIFEST_NAME, PARTIAL_NAME)
    return {name: _describe(root, name) for name in names if name not in own}


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Write `folder`/manifest.json atomically, so that an incomplete bundle never opens.

    Raises BundleError for a manifest that `Bundle.open` would reject.
    """
    data = manifest.to_json()
    Manifest.from_json(data)
    try:
        text = json.dumps(data, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BundleError(
            f"the manifest contains a value that JSON cannot represent: {error}"
        ) from error
    partial = Path(folder) / PARTIAL_NAME
    partial.write_text(text + "\n", encoding="utf-8")
    return partial.replace(Path(folder) / MANIFEST_NAME)


def _bundle_folder(path: Path) -> Path:
    """Return `path` resolved. Raises BundleError if it cannot be a bundle."""
    if not path.exists():
        raise BundleError(f"{path} does not exist: create a bundle with `eagle3 export`")
    if not path.is_dir():
        raise BundleError(
            f"{path} is a file, but a bundle is a folder: create one with `eagle3 export`"
        )
    if not os.path.lexists(path / MANIFEST_NAME):
        raise BundleError(
            f"{path} is not a bundle: {MANIFEST_NAME} not found; create a bundle with"
            " `eagle3 export`"
        )
    return path.resolve()


def _read_manifest(root: Path) -> Any:
    """Return the parsed JSON of the manifest. The caller adds the path to error messages."""
    path = _regular_file(root, MANIFEST_NAME)
    size = path.stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise BundleError(f"has {size} bytes, more than the limit of {MAX_MANIFEST_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except OSError as error:
        raise BundleError(f"cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"is not valid JSON: {error}; export the bundle again") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return data


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check_size(root: Path, name: str, info: FileInfo) -> None:
    """Raise BundleError unless the file exists with exactly the size it was exported with."""
    if name == MANIFEST_NAME:
        raise BundleError(f"{root / name} lists itself in `files`: export the bundle again")
    size = _regular_file(root, name).stat().st_size
    if size != info.size:
        fault = "truncated" if size < info.size else "altered"
        raise BundleError(
            f"{root / name} is {fault}: it has {size} bytes, expected {info.size};"
            " copy the bundle or export it again"
        )


def _read_ids(path: Path, count: int) -> NDArray[np.int64]:
    """Return the array int64 [count] of a .npy file, after checking its header."""
    try:
        # Memory-mapped, so that a header that claims terabytes allocates nothing.
        stored = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy evaluates the header as Python and raises any exception
        raise BundleError(
            f"{path} is not a .npy file of integers: {error}; export the bundle again"
        ) from error
    if stored.dtype != np.int64 or stored.shape != (count,):
        raise BundleError(
            f"{path} holds {stored.dtype} {list(stored.shape)}, but draft_vocab_size requires"
            f" int64 [{count}]: export the bundle again"
        )
    return np.array(stored)


def _regular_file(root: Path, name: str) -> Path:
    """Return `root / name` with links resolved. Raises BundleError unless a regular file in
    `root`.
    """
    _check_relative(name)
    try:
        path = (root / name).resolve(strict=True)
        is_file = path.is_file()
    except FileNotFoundError as error:
        raise BundleError(
            f"{root / name} is missing: copy the bundle or export it again"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or an invalid name
        raise BundleError(f"{root / name} cannot be read: {error}") from error
    if not path.is_relative_to(root):
        raise BundleError(
            f"{root / name} links to {path}, outside the bundle: copy the file into the bundle"
        )
    if not is_file:
        raise BundleError(f"{root / name} is not a regular file")
    return path


def _check_relative(name: str) -> None:
    """Raise BundleError unless `name` is a normalized relative path with `/` on every system."""
    pure = PurePosixPath(name)
    foreign = "\\" in name or "\0" in name or PureWindowsPath(name).drive
    if foreign or pure.is_absolute() or ".." in pure.parts or str(pure) != name or name == ".":
        raise BundleError(
            f"the file name {name!r} must be a path inside the bundle: relative, with `/`,"
            " without `..`"
        )


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every path under `folder` that is not a folder; links to folders are not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _describe(root: Path, name: str) -> FileInfo:
    path = _regular_file(root, name)
    return FileInfo(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    """Return the SHA-256 of the file as hex. The file is read in blocks."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
