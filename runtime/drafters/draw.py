"""Sampling of the draft tokens of a chain (method section 4, `rejection`)."""

from __future__ import annotations

import numpy as np

from eagle3.runtime.acceptance.sampling import Float32s, draft_probs, sample_inverse_cdf
from eagle3.runtime.drafters.base import DraftRequest, Int64s


def draw(
    logits: Float32s, request: DraftRequest, vocab_size: int, target_ids: Int64s | None = None
) -> tuple[int, Float32s] | None:
    """Return a token of the target's vocabulary and the distribution q, float32 [V], it was
    sampled from.

    logits: float32 [Vd]. target_ids: the target's id of every draft id, [Vd]; None if they are
    equal. Returns None if the logits contain NaN or Inf.
    """
    assert request.temperature is not None and request.rng is not None
    probs = draft_probs(logits, request.temperature)
    if probs is None:
        return None
    draft_id = sample_inverse_cdf(probs, request.rng.random())
    q = np.zeros(vocab_size, np.float32)
    q[slice(len(probs)) if target_ids is None else target_ids] = probs
    return draft_id if target_ids is None else int(target_ids[draft_id]), q
