"""The objectives: the draft's loss over the unrolled steps of a batch (method section 6)."""

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
    """Sums over the counted rows, one value per step, [S] each.

    loss: in nats. agreed: number of rows in which draft and target have the same most likely token.
    rows: number of counted rows.
    """

    loss: Tensor
    agreed: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Rows:
    """The tokens that the loss of a batch counts: conversation and position, [R] each.

    All positions are at least 2, as the first row of step 0 predicts position 2.
    """

    conversation: Tensor
    position: Tensor

    @classmethod
    def of(cls, written: Tensor) -> Rows:
        """Return the tokens that the target wrote and that a row of step 0 can predict.

        written [B,T] bool: True for a token that the target wrote.
        """
        conversation, position = written.nonzero(as_tuple=True)
        keep = position >= 2
        return cls(conversation[keep], position[keep])

    def at(self, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Select the rows of x [B,T,d], the output of `step`, that predict counted tokens.

        Returns these rows [R',d], and a mask [R] of the counted tokens that `step` can predict.
        """
        keep = self.position >= 2 + step
        return x[self.conversation[keep], self.position[keep] - 2 - step], keep


class Eagle3Objective(nn.Module):
    """EAGLE-3: the cross-entropy against the target over the draft vocabulary, in every step.

    There is no feature loss.
    """

    embedding: Tensor
    target_rows: Tensor

    def __init__(
        self, head: EagleHead, embedding: Tensor, target_rows: Tensor, dtype: torch.dtype
    ) -> None:
        """Wrap `head` with the target's frozen weights.

        embedding [V,d]: the target's embedding table. target_rows [Vd,d]: the rows of the target's
        lm_head that belong to the draft vocabulary. dtype: data type of the matrix products over
        the vocabulary.
        """
        super().__init__()
        self.head, self._dtype = head, dtype
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_rows", target_rows, persistent=False)

    def forward(self, batch: Batch, num_steps: int) -> StepSums:
        """Return the sums of each of the S = `num_steps` unrolled steps."""
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
    """EAGLE-1: SmoothL1 on the next feature + 0.1 * cross-entropy over all tokens, in one step."""

    embedding: Tensor

    def __init__(self, head: Eagle1Head, embedding: Tensor, dtype: torch.dtype) -> None:
        """Wrap `head` with the target's frozen embedding table, `embedding` [V,d].

        dtype: data type of the matrix products over the vocabulary.
        """
        super().__init__()
        self.head, self._dtype = head, dtype
        self.register_buffer("embedding", embedding, persistent=False)

    def forward(self, batch: Batch, noise: Tensor) -> StepSums:
        """Return the sums of one step; noise [B,T,d] is added to the features."""
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
