"""The assignment of conversations to batches.

It depends only on the data and the seed, so that an interrupted run continues with exactly the
batches that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_POOL_BATCHES = 16  # conversations are sorted by length within pools of this many batches


@dataclass(frozen=True)
class Split:
    """Conversation indices, int64, ascending: those to train on, and the held-out ones."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]


def split(num_conversations: int, holdout: float, data_share: float, seed: int) -> Split:
    """Split `num_conversations` conversations into a training part and a held-out part.

    The share `holdout` is taken first, so that every `data_share` is evaluated on the same
    conversations. The training part is the share `data_share` of the others, at least one
    conversation; a smaller share is a subset of any larger one.
    """
    order = np.random.default_rng([seed, 1]).permutation(num_conversations)
    num_held = min(round(num_conversations * holdout), num_conversations - 1)
    rest = order[num_held:]
    return Split(np.sort(rest[: max(1, round(len(rest) * data_share))]), np.sort(order[:num_held]))


def epoch_batches(
    conversations: Sequence[int], lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the batches of one epoch as lists of conversations.

    A batch has at most `batch_tokens` tokens, padding included, or a single conversation. The
    longest conversation of a batch comes first. lengths: tokens of each of `conversations`, in the
    same order.
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
