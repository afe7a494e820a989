"""The files of a draft head: location, config.json, tensors. No code in them is ever run.

Every failure is a CheckpointError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.runtime.errors import CheckpointError

# Of each kind, the first existing name is the index or the weights; otherwise any file of the kind.
_KINDS = {
    "model.safetensors": "*.safetensors",
    "pytorch_model.bin": "pytorch_model*.bin",
    "": "*.bin",
}


@dataclass(frozen=True)
class Checkpoint:
    """The files of a head: config.json and every tensor, by the names of its dialect."""

    folder: Path
    raw: Mapping[str, Any]
    weights: Mapping[str, Tensor]


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Read the folder or hub id `source`."""
    folder = head_folder(source)
    return Checkpoint(folder, read_config(folder), read_weights(folder))


def head_folder(source: str | Path) -> Path:
    """Return the folder `source`, or that of the downloaded hub id."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists() or str(source).startswith((".", "/")) or str(source).count("/") != 1:
        raise CheckpointError(f"draft {source}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin"])
        )
    except Exception as error:
        raise CheckpointError(
            f"draft {source}: it is not a local folder, and could not be downloaded as a hub id: "
            f"{_first_line(error)}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a head."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} not found; a draft head needs a config.json")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder; safetensors first, `.bin` without running code in it.

    Raises CheckpointError if a file that an index names is missing, or if two files hold a tensor.
    """
    weights: dict[str, Tensor] = {}
    held: dict[str, Path] = {}
    for file in _weight_files(folder):
        part = _read_file(file)
        twice = sorted(set(part) & set(held))
        if twice:
            raise CheckpointError(f"tensor {twice[0]} is in {held[twice[0]]} and in {file}")
        weights.update(part)
        held.update(dict.fromkeys(part, file))
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """Return the single file, the shards of the index, or all files of the first existing kind."""
    for single, pattern in _KINDS.items():
        index = folder / f"{single}.index.json"
        if single and index.is_file():
            return _indexed_files(index)
        if single and (folder / single).is_file():
            return [folder / single]
        if found := sorted(folder.glob(pattern)):
            return found
    raise CheckpointError(f"{folder}: no .safetensors and no .bin file with weights")


def _indexed_files(index: Path) -> list[Path]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{index}: weight_map must name the file of each tensor")
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which does not exist")
    return files


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".bin":
            part = torch.load(file, map_location="cpu", weights_only=True)
        else:
            part = load_file(file)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # pickle.UnpicklingError: code in place of weights
        raise CheckpointError(
            f"{file} contains more than tensors and is refused: {_first_line(error)}"
        ) from error
    if not isinstance(part, dict) or not all(isinstance(t, Tensor) for t in part.values()):
        raise CheckpointError(f"{file} is not a mapping of names to tensors")
    return part


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
