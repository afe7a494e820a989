"""Which conversations make which batch: a function of the data and the seed alone, so that a run
that stopped goes on with exactly the batch it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_POOL_BATCHES = 16  # conversations of similar length are looked for among so many batches


@dataclass(frozen=True)
class Split:
    """Conversation indices int64: what is trained on, and what is held out."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]


def split(num_conversations: int, holdout: float, data_share: float, seed: int) -> Split:
    """Holds out a share first, so that every `data_share` is measured on the same conversations;
    a smaller share is a part of any larger one.
    """
    order = np.random.default_rng([seed, 1]).permutation(num_conversations)
    num_held = min(round(num_conversations * holdout), num_conversations - 1)
    rest = order[num_held:]
    return Split(np.sort(rest[: max(1, round(len(rest) * data_share))]), np.sort(order[:num_held]))


def epoch_batches(
    conversations: Sequence[int], lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """The batches of one epoch, each of at most `batch_tokens` tokens, padding included, or of one
    conversation. lengths: of `conversations`, in their order. Longest first within a batch.
    """
    rng = np.random.default_rng([seed, 2, epoch])
    order = rng.permutation(len(conversations))
    batches: list[list[int]] = []
    for pool in _pools(order, lengths, batch_tokens * _POOL_BATCHES):
        batch: list[int] = []
        for i in sorted(pool, key=lambda i: (-lengths[i], i)):
            if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    return [[int(conversations[i]) for i in batches[b]] for b in rng.permutation(len(batches))]


def _pools(order: NDArray[np.int64], lengths: Sequence[int], pool_tokens: int) -> list[list[int]]:
    pools: list[list[int]] = [[]]
    held = 0
    for i in map(int, order):
        if pools[-1] and held + lengths[i] > pool_tokens:
            pools.append([])
            held = 0
        pools[-1].append(i)
        held += lengths[i]
    return pools
