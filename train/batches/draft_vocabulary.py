"""The draft vocabulary: the target's tokens that answers are made of (method section 6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle3.train.batches.token_dataset import TokenDataset


def draft_vocabulary(
    data: TokenDataset, conversations: NDArray[np.int64], vocab_size: int, size: int
) -> NDArray[np.int64]:
    """The `size` most frequent tokens that the target wrote in `conversations`, ascending, int64
    [Vd]; ties go to the lower id. size at or above `vocab_size` gives every token.
    """
    if size >= vocab_size:
        return np.arange(vocab_size, dtype=np.int64)
    chosen = np.repeat(np.isin(np.arange(len(data)), conversations), data.lengths)
    counts = np.bincount(data.tokens[data.written & chosen], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)


def coverage(data: TokenDataset, target_ids: NDArray[np.int64]) -> float:
    """Share of the written tokens that the draft vocabulary has."""
    written = data.tokens[data.written]
    return float(np.isin(written, target_ids).mean()) if len(written) else 0.0
