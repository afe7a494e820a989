"""Small data folders for the trainer's tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from eagle3.train.batches.token_dataset import Conversation, TokenDataset, write_dataset


def conversations(count: int = 24, seed: int = 0, vocab_size: int = 64) -> list[Conversation]:
    """Random ones of 6 to 20 tokens, the first three of which are the prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(6, 21))
        ids = tuple(map(int, rng.integers(2, vocab_size, length)))
        made.append(Conversation(ids, tuple(i >= 3 for i in range(length))))
    return made


def data_folder(folder: Path, target: Path, count: int = 24, seed: int = 0) -> TokenDataset:
    """A data folder without features for the target in `target`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"target": str(target)}))
    return write_dataset(folder, conversations(count, seed))
