"""Joining of short conversations into long ones, so that a head is also trained on late
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle3.train.batches.token_dataset import Conversation
from eagle3.train.data.render import Renderer, Turn


def joined(
    talks: Sequence[Sequence[Turn]], renderer: Renderer, share: float, max_tokens: int, seed: int
) -> list[Conversation]:
    """Return the conversations of `talks`, with about the share `share` joined into long ones.

    Consecutive selected conversations are joined until the next one would exceed `max_tokens`.
    Conversations with a system message are not joined. The selection depends only on `seed`. The
    joined conversations follow the others in the result.
    """
    chosen = np.random.default_rng(seed).random(len(talks)) < share
    single = [renderer.conversation(talk) for talk in talks]
    takes = [bool(c) and talk[0].system is None for c, talk in zip(chosen, talks, strict=True)]
    result = [each for each, take in zip(single, takes, strict=True) if not take]
    group: list[Turn] = []
    length = 0
    for talk, alone, take in zip(talks, single, takes, strict=True):
        if not take:
            continue
        if group and length + len(alone) > max_tokens:
            result.append(renderer.conversation(group))
            group, length = [], 0
        group += talk
        length += len(alone)
    return [*result, renderer.conversation(group)] if group else result
