"""A bundle folder: its manifest, and the checks made before anything in it is loaded.

`Bundle.open` reads `manifest.json` and looks at the name, kind and size of every file it lists,
so a copy that was cut short or a path that leaves the folder is refused by name, in
milliseconds; small files, where a mix-up keeps the size, are hashed too. Hashing gigabytes is
`Bundle.verify_hashes`, for whoever asks. `describe_files` and `write_manifest` are the other
direction, for export.
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
    """An opened bundle: `root` is its resolved folder, and every file in `manifest` is there."""

    root: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Bundle":
        """Open the folder `path`.

        Raises BundleError when it is no bundle, is of another schema, or when a file is missing,
        truncated, foreign, not a regular file or outside the folder. Files larger than
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
        """Absolute path of the file that the manifest lists as `name`; BundleError if none."""
        if name not in self.manifest.files:
            raise BundleError(f"{self.root} has no file {name!r}; it has {[*self.manifest.files]}")
        return self.root / name

    def chat_template(self) -> str | None:
        """The source of the chat template, None when there is none; BundleError if not UTF-8."""
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
        """The target's id of every draft id of the head `draft`, [Vd] int64.

        Raises BundleError unless they are different ids of the target's vocabulary.
        """
        path, info = self.path(target_ids_name(draft)), self.manifest.drafts[draft]
        ids = _read_ids(path, info.draft_vocab_size)
        vocab_size = self.manifest.target.vocab_size
        if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
            raise BundleError(
                f"{path} holds ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different"
                f" ones of {len(ids)}; all must differ and be below target.vocab_size {vocab_size}:"
                " export the bundle again"
            )
        return ids

    def verify_hashes(self) -> None:
        """Read every file and compare its SHA-256; BundleError names the first that differs."""
        self._check_hashes(None)

    def _check_weight_files(self) -> None:
        """Weights that stand beside an engine's graph are read by it, so they must be listed."""
        for engine in self.manifest.engines.values():
            name = f"{engine.file}.data"
            if name not in self.manifest.files and os.path.lexists(self.root / name):
                raise BundleError(
                    f"{self.root / name} is foreign: `files` does not list it, but"
                    f" {engine.file} may read it; export the bundle again"
                )

    def _check_hashes(self, max_bytes: int | None) -> None:
        """Compares the SHA-256 of every file of at most `max_bytes`."""
        for name, info in self.manifest.files.items():
            if max_bytes is not None and info.size > max_bytes:
                continue
            found = _sha256(_regular_file(self.root, name))
            if found != info.sha256:
                raise BundleError(
                    f"{self.root / name} is foreign or altered: its SHA-256 is {found}, the"
                    f" manifest says {info.sha256}; copy the bundle or export it again"
                )


def describe_files(folder: str | os.PathLike[str]) -> dict[str, FileInfo]:
    """Size and SHA-256 of every file under `folder` but the manifest, by relative path, sorted.

    Raises BundleError for what a bundle cannot hold: a link that leaves the folder, a pipe.
    """
    root = Path(folder).resolve()
    names = sorted(path.relative_to(root).as_posix() for path in _walk(root))
    own = (MANIFEST_NAME, PARTIAL_NAME)
    return {name: _describe(root, name) for name in names if name not in own}


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Write `folder`/manifest.json; an interrupted export leaves none, so no half bundle opens.

    Raises BundleError for a manifest that `Bundle.open` would refuse.
    """
    data = manifest.to_json()
    Manifest.from_json(data)
    try:
        text = json.dumps(data, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BundleError(f"the manifest holds a value that JSON has not: {error}") from error
    partial = Path(folder) / PARTIAL_NAME
    partial.write_text(text + "\n", encoding="utf-8")
    return partial.replace(Path(folder) / MANIFEST_NAME)


def _bundle_folder(path: Path) -> Path:
    """`path` resolved, or a BundleError that says why it cannot be a bundle."""
    if not path.exists():
        raise BundleError(f"{path} does not exist: `eagle3 export` makes a bundle")
    if not path.is_dir():
        raise BundleError(f"{path} is a file; a bundle is a folder that `eagle3 export` makes")
    if not os.path.lexists(path / MANIFEST_NAME):
        raise BundleError(
            f"{path} is not a bundle, it has no {MANIFEST_NAME}: `eagle3 export` makes one"
        )
    return path.resolve()


def _read_manifest(root: Path) -> Any:
    """The parsed JSON of the manifest; the caller adds its path to the message."""
    path = _regular_file(root, MANIFEST_NAME)
    size = path.stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise BundleError(f"is {size} bytes, more than the {MAX_MANIFEST_BYTES} a manifest has")
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
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return data


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check_size(root: Path, name: str, info: FileInfo) -> None:
    """The file must be there with exactly the size it was exported with."""
    if name == MANIFEST_NAME:
        raise BundleError(f"{root / name} lists itself in `files`: export the bundle again")
    size = _regular_file(root, name).stat().st_size
    if size != info.size:
        fault = "truncated" if size < info.size else "altered"
        raise BundleError(
            f"{root / name} is {fault}: it has {size} bytes, the manifest says {info.size};"
            " copy the bundle or export it again"
        )


def _read_ids(path: Path, count: int) -> NDArray[np.int64]:
    """The array [count] int64 in the .npy file; its header is checked before anything is read."""
    try:
        # Mapped: a header that promises terabytes allocates nothing.
        stored = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy parses the header as Python and raises what that raises
        raise BundleError(
            f"{path} is no .npy file of integers: {error}; export the bundle again"
        ) from error
    if stored.dtype != np.int64 or stored.shape != (count,):
        raise BundleError(
            f"{path} holds {stored.dtype} {list(stored.shape)}, but draft_vocab_size asks for"
            f" int64 [{count}]: export the bundle again"
        )
    return np.array(stored)


def _regular_file(root: Path, name: str) -> Path:
    """`root / name` with links resolved; BundleError unless a regular file inside `root`."""
    _check_relative(name)
    try:
        path = (root / name).resolve(strict=True)
        is_file = path.is_file()
    except FileNotFoundError as error:
        raise BundleError(
            f"{root / name} is missing: copy the bundle or export it again"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an impossible name
        raise BundleError(f"{root / name} cannot be read: {error}") from error
    if not path.is_relative_to(root):
        raise BundleError(f"{root / name} links to {path}, outside the bundle: copy the file in")
    if not is_file:
        raise BundleError(f"{root / name} is not a regular file")
    return path


def _check_relative(name: str) -> None:
    """A name of a bundle is relative, normal, with `/`, and means the same on every system."""
    pure = PurePosixPath(name)
    foreign = "\\" in name or "\0" in name or PureWindowsPath(name).drive
    if foreign or pure.is_absolute() or ".." in pure.parts or str(pure) != name or name == ".":
        raise BundleError(
            f"the file name {name!r} must be a path inside the bundle: relative, with `/`,"
            " without `..`"
        )


def _walk(folder: Path) -> Iterator[Path]:
    """Every path under `folder` that is no folder; a linked folder counts as such a path."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _describe(root: Path, name: str) -> FileInfo:
    path = _regular_file(root, name)
    return FileInfo(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    """Hex SHA-256 of the file, read in blocks."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
