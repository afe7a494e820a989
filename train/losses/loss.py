"""Cross-entropy of the draft against the target's distribution (method section 6).

The logits of all rows are never in memory at once: logits and gradients are computed for a few
hundred rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK_ROWS = 256  # small enough that a chunk, float32 [rows, Vd], stays in the processor's cache


@dataclass(frozen=True)
class CrossEntropy:
    """Sums over the rows, both scalars.

    total: the cross-entropy in nats. agreed: the number of rows in which the draft's most likely
    token is also the target's; it carries no gradient.
    """

    total: Tensor
    agreed: Tensor


def cross_entropy(
    hidden: Tensor, weight: Tensor, probs: Tensor, dtype: torch.dtype = torch.float32
) -> CrossEntropy:
    """Return -sum over rows and tokens of probs * log softmax(hidden @ weight^T).

    hidden [R,d]: the draft's output. weight [Vd,d]: the draft's lm_head. probs [R,Vd] float32: the
    target's softmax over the draft vocabulary. dtype: data type of the matrix products. R may be 0.
    """
    total, agreed = _CrossEntropy.apply(hidden, weight, probs, dtype)  # type: ignore[no-untyped-call]
    return CrossEntropy(total, agreed)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, probs: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        cast_hidden, cast_weight = hidden.to(dtype), weight.to(dtype)
        grad_hidden = torch.empty_like(cast_hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), device=hidden.device)
        agreed = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            logits = (cast_hidden[rows] @ cast_weight.T).float()
            wanted = probs[rows]
            total += torch.logsumexp(logits, -1).sum() - torch.dot(
                logits.flatten(), wanted.flatten()
            )
            agreed += (logits.argmax(-1) == wanted.argmax(-1)).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            slope = (torch.softmax(logits, -1) - wanted).to(dtype)
            if grad_hidden is not None:
                torch.matmul(slope, cast_weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += slope.T @ cast_hidden[rows]
        ctx.mark_non_differentiable(agreed)
        ctx.grads = (grad_hidden, grad_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = (
            None if part is None else (part * grad).to(dtype)
            for part, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        )
        return hidden, weight, None, None


@torch.no_grad()
def draft_vocabulary_probs(final: Tensor, rows: Tensor) -> Tensor:
    """Return the target's softmax over the tokens of the draft vocabulary, float32 [R,Vd].

    final [R,d]: the target's hidden states after the last norm. rows [Vd,d]: the rows of its
    lm_head that belong to these tokens.
    """
    # Not in bfloat16, which resolves logits around 30 only to about 0.1.
    with torch.autocast(final.device.type, enabled=False):
        return torch.softmax(final.float() @ rows.T, -1)
