"""Which tokens a draft vocabulary has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eagle3.train.batches.draft_vocabulary import coverage, draft_vocabulary
from eagle3.train.batches.token_dataset import Conversation, TokenDataset, write_dataset


def data(folder: Path) -> TokenDataset:
    """Token 9 is a prompt's; the second conversation writes 7 most often."""
    first = Conversation((9, 9, 9, 9, 3, 5, 3), (False,) * 4 + (True,) * 3)
    second = Conversation((9, 7, 7, 7, 7), (False,) + (True,) * 4)
    return write_dataset(folder, [first, second])


def test_it_has_the_tokens_that_the_training_part_writes(tmp_path: Path) -> None:
    """What is held out for measuring has no say."""
    tokens = data(tmp_path)
    assert draft_vocabulary(tokens, np.array([0, 1]), 10, 2).tolist() == [3, 7]
    assert draft_vocabulary(tokens, np.array([0]), 10, 2).tolist() == [3, 5]
    assert draft_vocabulary(tokens, np.array([0]), 10, 10).tolist() == list(range(10))


def test_ties_go_to_the_lower_id(tmp_path: Path) -> None:
    assert draft_vocabulary(data(tmp_path), np.array([0]), 10, 3).tolist() == [0, 3, 5]


def test_coverage_is_of_written_tokens(tmp_path: Path) -> None:
    tokens = data(tmp_path)
    assert coverage(tokens, np.array([3, 7])) == 6 / 7
