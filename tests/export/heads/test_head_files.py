"""The files of a head: sharded, damaged, foreign; and code in them, which never runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.runtime.errors import CheckpointError

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)


@pytest.fixture
def folder(tmp_path: Path, llama: Any) -> Path:
    return tiny.save_head(tmp_path / "head", llama, draft_vocab_size=40)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, FACTS)
    return str(caught.value)


def as_bin(folder: Path, payload: Any, name: str = "pytorch_model.bin") -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(payload, folder / name)


def shard(folder: Path, stem: str, suffix: str) -> dict[str, list[str]]:
    """Splits the weights in two files with an index, as transformers names them."""
    weights = weights_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {
        f"{stem}-0000{i + 1}-of-00002.{suffix}": part
        for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]))
    }
    for file, part in parts.items():
        tensors = {name: weights[name] for name in part}
        if suffix == "bin":
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
    index = {name: file for file, part in parts.items() for name in part}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / f"{stem}.{suffix}.index.json").write_text(text)
    return parts


def same(folder: Path, expected: dict[str, Tensor]) -> bool:
    found = read_head(folder, FACTS).weights
    return set(found) == set(expected) and all(torch.equal(found[n], expected[n]) for n in found)


def test_a_plain_bin_file(folder: Path) -> None:
    expected = weights_of(folder)
    as_bin(folder, expected)
    as_bin(folder, {"step": 3}, "training_args.bin")  # what trainers leave beside it
    assert same(folder, expected)


@pytest.mark.parametrize(
    ("stem", "suffix"), [("model", "safetensors"), ("pytorch_model", "bin")], ids=["st", "bin"]
)
def test_sharded_files(folder: Path, stem: str, suffix: str) -> None:
    expected = weights_of(folder)
    first, second = shard(folder, stem, suffix)
    assert same(folder, expected)
    (folder / f"{stem}.{suffix}.index.json").unlink()  # without it, all files of the kind
    assert same(folder, expected)
    (folder / second).write_bytes((folder / first).read_bytes())
    message = refusal(folder)
    assert first in message and second in message and "is in" in message


@pytest.mark.parametrize(
    ("stem", "suffix"), [("model", "safetensors"), ("pytorch_model", "bin")], ids=["st", "bin"]
)
def test_a_shard_that_is_not_there_is_named(folder: Path, stem: str, suffix: str) -> None:
    _, second = shard(folder, stem, suffix)
    (folder / second).unlink()
    assert second in refusal(folder) and "does not exist" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, ["a"], {"fc.weight": 3}, {"a": "../x.safetensors"}])
def test_an_index_that_makes_no_sense(folder: Path, weight_map: Any) -> None:
    (folder.parent / "x.safetensors").write_bytes(b"")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(folder)


class Payload:
    """Creates a folder when it is unpickled by a loader that runs what it reads."""

    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._victim),)


def test_code_in_a_bin_file_is_refused_and_never_runs(folder: Path, tmp_path: Path) -> None:
    """Trap 12."""
    victim = tmp_path / "was-run"
    as_bin(folder, {**weights_of(folder), "fc.weight": Payload(victim)})
    assert "more than tensors" in refusal(folder)
    assert not victim.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert victim.exists(), "the payload would have worked"


def test_code_in_a_shard_never_runs(folder: Path, tmp_path: Path) -> None:
    _, second = shard(folder, "pytorch_model", "bin")
    victim = tmp_path / "was-run"
    torch.save({"fc.weight": Payload(victim)}, folder / second)
    assert second in refusal(folder) and not victim.exists()


@pytest.mark.parametrize("payload", [[torch.ones(3)], {"state_dict": {"a": torch.ones(3)}}, 5])
def test_a_bin_file_of_something_else(folder: Path, payload: Any) -> None:
    as_bin(folder, payload)
    assert "pytorch_model.bin" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"a":' * 100_000),
        ("model.safetensors", None),
        ("model.safetensors", "short"),
    ],
)
def test_missing_and_damaged_files_are_named(folder: Path, file: str, content: str | None) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    assert str(folder) in refusal(folder)


def test_no_such_head(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            read_head(source, FACTS)
