"""Measure an engine's rounding noise: how much wide and narrow calls of it differ.

`verify.py` uses the noise to tell a near-tie, which rounding may flip, from a real divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3.runtime.acceptance.sampling import (
    log_softmax,
)
from eagle3.runtime.engine import Engine
from eagle3.runtime.trees.tree import Tree

_NOISE_WINDOWS = 4  # number of wide calls that are compared with narrow ones
_NOISE_TOP = 16  # most likely tokens compared per row: only these can tie


def measure_noise(engine: Engine, text: Sequence[int], num_rows: int) -> float:
    """Return the largest difference of a log-probability between wide and narrow calls.

    A wide call has `num_rows` tokens (fewer if the engine's limit is lower), a narrow call has one.
    Both run over `text` (token ids), and only the most likely tokens of each row are compared.
    """
    target, worst = engine.target, 0.0
    width = min(num_rows, target.max_verify_rows)
    text = text[: min(width * _NOISE_WINDOWS, target.capacity)]
    with engine.turn():
        for past in range(0, len(text), width):
            part = text[past : past + width]
            output = target.verify(Tree.chain(part[0], part[1:]), past, want_logits=True)
            assert output.logits is not None
            wide = log_softmax(output.logits)
            for row, token in enumerate(part):
                output = target.verify(Tree.root_only(token), past + row, want_logits=True)
                assert output.logits is not None
                narrow = log_softmax(output.logits[0])
                likely = np.argsort(-narrow)[:_NOISE_TOP]
                worst = max(worst, float(np.abs(wide[row][likely] - narrow[likely]).max()))
    return worst


def measure_draft_noise(engine: Engine, prompt: Sequence[int], max_new_tokens: int) -> float:
    """Return the noise of an engine whose target cannot be called directly, as on a GPU.

    Decodes the greedy continuation of `prompt` (token ids) plainly and with the default drafter,
    and returns the largest difference of a log-probability up to the first token that differs.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "logprobs": _NOISE_TOP}
    plain, drafted = (
        engine.generate(prompt, drafter=name, **options).logprobs or ()
        for name in ("none", engine.default_drafter)
    )
    worst = 0.0
    for one, other in zip(plain, drafted, strict=False):
        theirs = dict(other.top)
        worst = max([worst, *(abs(p - theirs[i]) for i, p in one.top if i in theirs)])
        if one.token_id != other.token_id:
            break
    return worst
