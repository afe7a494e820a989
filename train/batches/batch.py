"""One batch of conversations, as the losses read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Conversations of one step, padded behind. ids [B,T] int64; written [B,T] bool, true where the
    target wrote the token; features [B,T,F] what the head fuses and final [B,T,d] what lm_head
    reads, both of the target.
    """

    ids: Tensor
    written: Tensor
    features: Tensor
    final: Tensor
