"""The files of a draft head: where they lie, config.json, tensors. Nothing in them is ever run.

Every failure is a CheckpointError that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.runtime.errors import CheckpointError


def head_folder(source: str | Path) -> Path:
    """The folder `source`, or the hub id's, fetched."""
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
            f"draft {source}: it is no local folder, and as a hub id it could not be fetched: "
            f"{_first_line(error)}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a draft head has a config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: nested without end
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder; safetensors first, `.bin` without running what it contains."""
    kinds = ("*.safetensors", "pytorch_model*.bin", "*.bin")
    files = next((found for kind in kinds if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise CheckpointError(f"{folder}: no .safetensors and no .bin file with weights")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".bin":
                part = torch.load(file, map_location="cpu", weights_only=True)
            else:
                part = load_file(file)
        except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        except Exception as error:  # pickle.UnpicklingError: code where weights should be
            raise CheckpointError(
                f"{file} holds more than tensors and is refused: {_first_line(error)}"
            ) from error
        if not isinstance(part, dict) or not all(isinstance(t, Tensor) for t in part.values()):
            raise CheckpointError(f"{file} is no mapping of names to tensors")
        weights.update(part)
    return weights


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
