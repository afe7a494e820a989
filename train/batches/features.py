"""The target's hidden states over a data set, computed once and stored in memory-mapped shards.

    features/index.json     layers, hidden size, precision, and the conversations of each shard
    features/00000.npy      uint16 [rows, F], the bits of bfloat16 values; F = layers * d

Layers are hidden_states indices. The last one is after the target's last norm, the input of
lm_head. A shard is written atomically, so an interrupted run computes only the missing shards.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eagle3.runtime.errors import DataError
from eagle3.train.batches.token_dataset import TokenDataset, save_array
from eagle3.train.jobs.journal import write_json
from eagle3.train.jobs.progress import Progress

SHARD_TOKENS = 65_536  # maximum per shard; a longer conversation gets its own shard
Report = Callable[[str], None]


class LiveFeatures:
    """Features computed by running the target on the conversations of a batch; nothing is stored.

    layers: hidden_states indices to return. autocast: compute in bfloat16. device: the target's.
    """

    def __init__(self, model: Any, layers: Sequence[int], autocast: bool) -> None:
        self._decoder: nn.Module = model.base_model
        self.layers, self.autocast = tuple(layers), autocast
        self.device: torch.device = model.device

    @torch.no_grad()
    def rows(self, ids: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Return the features of conversations, bfloat16 [T_i, F] each, on the target's device.

        ids: the token ids of each conversation.
        """
        longest = max(map(len, ids))
        batch = torch.zeros(len(ids), longest, dtype=torch.int64)
        for row, each in zip(batch, ids, strict=True):
            row[: len(each)] = torch.from_numpy(each.astype(np.int64))
        # The padding is on the right, so no token of a causal model attends to it.
        with self._precision():
            hidden = self._decoder(
                input_ids=batch.to(self.device), use_cache=False, output_hidden_states=True
            ).hidden_states
        wide = torch.cat([hidden[layer] for layer in self.layers], -1).to(torch.bfloat16)
        return [row[: len(each)] for row, each in zip(wide, ids, strict=True)]

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)


@dataclass(frozen=True)
class StoredFeatures:
    """Features read from the shards of a data folder.

    layers: hidden_states indices that are stored. hidden_size: the target's. firsts: the first
    conversation of each shard, followed by the number of conversations.
    """

    folder: Path
    layers: tuple[int, ...]
    hidden_size: int
    firsts: tuple[int, ...]

    @cached_property
    def _shards(self) -> list[NDArray[np.uint16]]:
        return [_opened(_shard_path(self.folder, i)) for i in range(len(self.firsts) - 1)]

    def fits(self, data: TokenDataset) -> bool:
        """Return True if the shards have exactly one row for each token of `data`.

        Raises DataError if a shard is damaged.
        """
        rows = np.diff(data.offsets[list(self.firsts)])
        width = len(self.layers) * self.hidden_size
        wanted = [(int(count), width) for count in rows]
        return [shard.shape for shard in self._shards] == wanted

    def rows(self, data: TokenDataset, index: int) -> Tensor:
        """Return the features of conversation `index`, bfloat16 [T_i, F] on the host.

        The result is a view of the memory-mapped shard.
        """
        shard = int(np.searchsorted(self.firsts, index, "right")) - 1
        start = int(data.offsets[index] - data.offsets[self.firsts[shard]])
        bits = self._shards[shard][start : start + int(data.lengths[index])]
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def open_features(folder: Path, data: TokenDataset) -> StoredFeatures | None:
    """Open the features of a data folder; return None if it has none.

    Raises DataError if the features are incomplete or belong to other tokens.
    """
    path = folder / "features" / "index.json"
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        stored = StoredFeatures(
            folder / "features",
            tuple(index["layers"]),
            int(index["hidden_size"]),
            tuple(index["firsts"]),
        )
        fits = index["fingerprint"] == fingerprint(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    missing = [
        i for i in range(len(stored.firsts) - 1) if not _shard_path(stored.folder, i).is_file()
    ]
    if missing or not (fits and stored.fits(data)):
        fault = f"{len(missing)} shards are missing" if missing else "they belong to other tokens"
        raise DataError(
            f"the features in {stored.folder} cannot be used: {fault}; run `eagle3 train data "
            "--features` again"
        )
    return stored


def fingerprint(data: TokenDataset) -> str:
    """Return a hash of a data set's tokens and offsets, which identifies it."""
    digest = hashlib.sha256(data.tokens.tobytes())
    digest.update(data.offsets.tobytes())
    return digest.hexdigest()


def write_features(
    folder: Path,
    data: TokenDataset,
    live: LiveFeatures,
    hidden_size: int,
    *,
    rank: int = 0,
    world: int = 1,
    batch_tokens: int = 2048,
    report: Report = lambda _: None,
) -> None:
    """Compute the missing shards; process `rank` of `world` computes every world-th shard.

    batch_tokens: maximum number of tokens, padding included, that the target runs on at once.
    Raises DataError if the disk is full; finished shards are kept.
    """
    out = folder / "features"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out} cannot be created: {error.strerror}") from error
    firsts = _shard_starts(data)
    index = {
        "layers": list(live.layers),
        "autocast": live.autocast,
        "hidden_size": hidden_size,
        "firsts": firsts,
        "fingerprint": fingerprint(data),
    }
    _claim(out, index, rank)
    mine = [i for i in range(rank, len(firsts) - 1, world) if not _shard_path(out, i).is_file()]
    rows = sum(int(data.offsets[firsts[i + 1]] - data.offsets[firsts[i]]) for i in mine)
    progress = Progress("features", rows, report)
    for i in mine:
        shard = _shard(data, range(firsts[i], firsts[i + 1]), live, batch_tokens, progress)
        save_array(_shard_path(out, i), shard)


def _claim(out: Path, index: dict[str, Any], rank: int) -> None:
    """Write the index, after deleting the shards of another data set, other layers or precision.

    Only process 0 writes; the others wait until the index is there.
    """
    path = out / "index.json"
    if rank != 0:
        while _read_index(path) != index:
            time.sleep(0.1)
    elif _read_index(path) != index:
        path.unlink(missing_ok=True)
        for stale in out.glob("*.npy"):
            stale.unlink()
        write_json(path, index)


def _read_index(path: Path) -> Any:
    """Return the contents of index.json, or None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _shard(
    data: TokenDataset,
    conversations: range,
    live: LiveFeatures,
    batch_tokens: int,
    progress: Progress,
) -> NDArray[np.uint16]:
    """Return the shard uint16 [rows, F] of some conversations.

    Conversations of similar length are run together, to limit the padding.
    """
    base = int(data.offsets[conversations.start])
    result: NDArray[np.uint16] | None = None
    rows = int(data.offsets[conversations.stop]) - base
    for batch in _by_length(data, conversations, batch_tokens):
        ids = [data.tokens[data.span(i)] for i in batch]
        for i, part in zip(batch, live.rows(ids), strict=True):
            bits = part.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
            if result is None:
                result = np.empty((rows, bits.shape[1]), np.uint16)
            span = data.span(i)
            result[span.start - base : span.stop - base] = bits
        progress.add(sum(map(len, ids)))
    assert result is not None
    return result


def _by_length(data: TokenDataset, conversations: range, batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of at most `batch_tokens` tokens, padding included, or of one conversation."""
    batch: list[int] = []
    for i in sorted(conversations, key=lambda i: int(data.lengths[i])):
        if batch and (len(batch) + 1) * int(data.lengths[i]) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _shard_starts(data: TokenDataset) -> list[int]:
    """Return the first conversation of each shard, followed by the number of conversations."""
    starts = [0]
    for i in range(1, len(data)):
        if data.offsets[i + 1] - data.offsets[starts[-1]] > SHARD_TOKENS:
            starts.append(i)
    return [*starts, len(data)]


def _opened(path: Path) -> NDArray[np.uint16]:
    """Open a shard memory-mapped. Raises DataError if it cannot be read."""
    try:
        # Copy-on-write, as torch expects writable memory.
        shard: NDArray[np.uint16] = np.load(path, mmap_mode="c")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): delete it and run `eagle3 train data --features` "
            "again"
        ) from error
    return shard


def _shard_path(out: Path, index: int) -> Path:
    return out / f"{index:05}.npy"
