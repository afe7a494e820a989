"""Training-time test: run the head as drafting runs it (method section 6; EAGLE-3, section 3.1).

Letters: B conversations, T tokens of the longest conversation, d hidden size, S steps. In step 0,
row t reads the target's feature of position t and the embedding of token t+1, has RoPE position t
and predicts token t+2. In step s, row t reads its own output of step s-1 and the embedding of token
t+1+s, has RoPE position t+s and predicts token t+2+s. A step computes all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.export.draft_graphs.head_modules import Attend


class DraftHead(Protocol):
    """The common interface of `EagleHead` and `Eagle1Head`."""

    head_dim: int

    def fuse(self, features: Tensor) -> Tensor:
        """Project the target's features [B,T,F] to the head's input g [B,T,d]."""

    def __call__(
        self, embedding: Tensor, g: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """Run one step: embedding and g, [B,T,d] each -> the head's output [B,T,d]."""

    def feed_back(self, out: Tensor) -> Tensor:
        """Return g of the next step, [B,T,d], from the output `out` [B,T,d] of this one."""


class UnrolledAttention:
    """Attention with the tree mask of drafting, for all prefixes at once.

    In step s, row t attends to the rows <= t of step 0, which were made from the target's features,
    and to row t of each of the steps 1 to s: the drafted tokens before it on its own path, and
    itself. One object serves one unrolling, and each call is the next step.
    """

    def __init__(self, head_dim: int) -> None:
        self._scale = head_dim**-0.5
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in the next step: q [B,Hq,T,D], k and v [B,Hkv,T,D] -> [B,T,Hq,D].

        k and v are kept for the later steps.
        """
        self._keys.append(k)
        self._values.append(v)
        out = self._first(q) if len(self._keys) == 1 else self._later(q)
        return out.transpose(1, 2)

    def _first(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, self._keys[0], self._values[0], is_causal=True, enable_gqa=True, scale=self._scale
        )

    def _later(self, q: Tensor) -> Tensor:
        batch, heads, length, dim = q.shape
        kv_heads = self._keys[0].shape[1]
        grouped = (batch, kv_heads, heads // kv_heads, length, -1)
        # The query heads of a group share their keys, so they are rows of one matrix product.
        folded = (batch, kv_heads, heads // kv_heads * length, -1)
        q = q * self._scale
        prefix = (q.reshape(folded) @ self._keys[0].transpose(-1, -2)).view(grouped)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        prefix = prefix.masked_fill(future, torch.finfo(prefix.dtype).min)
        by_group = q.view(grouped)
        own = [(by_group * k[:, :, None]).sum(-1, keepdim=True) for k in self._keys[1:]]
        weights = torch.softmax(torch.cat([prefix, *own], -1).float(), -1).to(q.dtype)
        seen = weights[..., :length].reshape(folded) @ self._values[0]
        out = seen.view(grouped)
        for step, v in enumerate(self._values[1:]):
            out = out + weights[..., length + step, None] * v[:, :, None]
        return out.reshape(batch, heads, length, dim)


def unrolled(
    head: DraftHead, embeddings: Tensor, features: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Yield the head's output of each step, [B,T,d]: row t of step s predicts token t+2+s.

    embeddings [B,T,d]: of the tokens. features [B,T,F]: of the target. Rows whose input token is
    past the end of the conversation read zeros. Their outputs are meaningless, and no earlier row
    attends to them.
    """
    attend = UnrolledAttention(head.head_dim)
    g = head.fuse(features).to(embeddings.dtype)
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)[None]
    for step in range(num_steps):
        out = head(shifted(embeddings, 1 + step), g, positions + step, attend)
        yield out
        g = head.feed_back(out)


def shifted(x: Tensor, by: int) -> Tensor:
    """Return x [B,T,...] shifted so that row t holds x[:, t + by], with zeros past the end."""
    kept = x[:, by:]
    return torch.cat([kept, torch.zeros_like(x[:, : x.shape[1] - kept.shape[1]])], 1)
