"""What is minimised: the draft's loss over the unrolled steps of a batch (method section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead
from eagle3.train.batches.batch import Batch
from eagle3.train.losses.loss import cross_entropy, draft_vocabulary_probs
from eagle3.train.losses.unroll import unrolled

_EAGLE1_TOKEN_WEIGHT = 0.1  # EAGLE, section 3.2


@dataclass(frozen=True)
class StepSums:
    """Sums over the counted rows, [S] each: loss, tokens on which draft and target agree, rows."""

    loss: Tensor
    agreed: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Rows:
    """The tokens that a batch's loss counts: (conversation, position) each [R], positions >= 2."""

    conversation: Tensor
    position: Tensor

    @classmethod
    def of(cls, written: Tensor) -> Rows:
        """Those that the target wrote and a row of step 0 can predict."""
        conversation, position = written.nonzero(as_tuple=True)
        keep = position >= 2
        return cls(conversation[keep], position[keep])

    def at(self, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,T,d] of a step -> the rows [R',d] that predict tokens, and which those are [R]."""
        keep = self.position >= 2 + step
        return x[self.conversation[keep], self.position[keep] - 2 - step], keep


class Eagle3Objective(nn.Module):
    """Token loss only: cross-entropy against the target over the draft vocabulary, every step.

    forward: Batch, number of steps S -> StepSums.
    """

    embedding: Tensor
    target_rows: Tensor

    def __init__(
        self, head: EagleHead, embedding: Tensor, target_rows: Tensor, dtype: torch.dtype
    ) -> None:
        """embedding [V,d] and target_rows [Vd,d] (of its lm_head) are the target's, frozen.

        dtype: of the matrix products over the vocabulary.
        """
        super().__init__()
        self.head, self._dtype = head, dtype
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_rows", target_rows, persistent=False)

    def forward(self, batch: Batch, num_steps: int) -> StepSums:
        rows = Rows.of(batch.written)
        probs = draft_vocabulary_probs(
            batch.final[rows.conversation, rows.position - 1], self.target_rows
        )
        embeddings = F.embedding(batch.ids, self.embedding)
        sums = []
        for step, out in enumerate(unrolled(self.head, embeddings, batch.features, num_steps)):
            picked, keep = rows.at(step, out)
            wanted = probs if bool(keep.all()) else probs[keep]
            entropy = cross_entropy(
                self.head.norm(picked), self.head.lm_head.weight, wanted, self._dtype
            )
            sums.append((entropy.total, entropy.agreed, keep.sum()))
        return _stacked(sums)


class Eagle1Objective(nn.Module):
    """EAGLE-1, one step: SmoothL1 on the next feature + 0.1 cross-entropy over all tokens.

    forward: Batch, noise [B,T,d] that is added to the features -> StepSums of one step.
    """

    embedding: Tensor

    def __init__(self, head: Eagle1Head, embedding: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self._dtype = head, dtype
        self.register_buffer("embedding", embedding, persistent=False)

    def forward(self, batch: Batch, noise: Tensor) -> StepSums:
        rows = Rows.of(batch.written)
        final = batch.final[rows.conversation, rows.position - 1].float()
        lm_head = self.head.lm_head.weight
        probs = draft_vocabulary_probs(final, lm_head)
        embeddings = F.embedding(batch.ids, self.embedding)
        (out,) = unrolled(self.head, embeddings, batch.features + noise, 1)
        picked, keep = rows.at(0, out)
        feature_loss = F.smooth_l1_loss(picked.float(), final, reduction="none").mean(-1).sum()
        entropy = cross_entropy(picked, lm_head, probs, self._dtype)
        loss = feature_loss + _EAGLE1_TOKEN_WEIGHT * entropy.total
        return _stacked([(loss, entropy.agreed, keep.sum())])


def _stacked(sums: list[tuple[Tensor, Tensor, Tensor]]) -> StepSums:
    loss, agreed, rows = (torch.stack(column) for column in zip(*sums, strict=True))
    return StepSums(loss, agreed, rows.to(loss.dtype))
