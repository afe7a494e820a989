"""One batch of conversations, the input of the losses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Conversations of one optimizer step, padded on the right.

    ids [B,T] int64: token ids. written [B,T] bool: True where the target wrote the token.
    features [B,T,F] float32: the target's hidden states that the head fuses. final [B,T,d] float32:
    the target's hidden states after its last norm, the input of its lm_head.
    """

    ids: Tensor
    written: Tensor
    features: Tensor
    final: Tensor
