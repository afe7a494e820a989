"""The draft vocabulary: the most frequent tokens of the target's answers (method section 6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle3.train.batches.token_dataset import TokenDataset


def draft_vocabulary(
    data: TokenDataset, conversations: NDArray[np.int64], vocab_size: int, size: int
) -> NDArray[np.int64]:
    """Return the `size` most frequent tokens that the target wrote in `conversations`.

    The result is int64 [Vd], ascending; ties go to the lower token id. If `size` is at least
    `vocab_size`, it holds every token.
    """
    if size >= vocab_size:
        return np.arange(vocab_size, dtype=np.int64)
    chosen = np.repeat(np.isin(np.arange(len(data)), conversations), data.lengths)
    counts = np.bincount(data.tokens[data.written & chosen], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)


def coverage(data: TokenDataset, target_ids: NDArray[np.int64]) -> float:
    """Return the share of the tokens written by the target that are in the draft vocabulary."""
    written = data.tokens[data.written]
    return float(np.isin(written, target_ids).mean()) if len(written) else 0.0
