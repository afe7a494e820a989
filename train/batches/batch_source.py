"""Batches for the trainer: tokens and target features, which are stored or computed on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.runtime.errors import DataError
from eagle3.train.batches.batch import Batch
from eagle3.train.batches.batch_order import epoch_batches
from eagle3.train.batches.features import LiveFeatures, StoredFeatures
from eagle3.train.batches.token_dataset import TokenDataset


@dataclass(frozen=True)
class BatchSource:
    """Builds batches of conversations that are cut to `max_len` tokens.

    fused: hidden_states indices of the features that the head reads. last: hidden_states index of
    the hidden states after the target's last norm. hidden_size: the target's. device: where the
    batches are placed. Raises DataError if stored features lack one of these layers or have another
    width.
    """

    data: TokenDataset
    features: StoredFeatures | LiveFeatures
    fused: tuple[int, ...]
    last: int
    hidden_size: int
    max_len: int
    device: torch.device

    def __post_init__(self) -> None:
        kept = self.features
        if isinstance(kept, StoredFeatures) and kept.hidden_size != self.hidden_size:
            raise DataError(
                f"the stored features have width {kept.hidden_size}, but the target has hidden "
                f"size {self.hidden_size}: use the target that the features were computed with"
            )
        missing = sorted({*self.fused, self.last} - set(self.features.layers))
        if missing:
            raise DataError(
                f"the data has features of the layers {list(self.features.layers)}, but not of "
                f"{missing}: compute them with `eagle3 train data --features --aux-layers ...`, or "
                "delete the folder `features` to run the target in every epoch"
            )

    def length(self, index: int) -> int:
        """Return the number of tokens of conversation `index` that are used."""
        return min(int(self.data.lengths[index]), self.max_len)

    def num_counted(self, index: int) -> int:
        """Return the number of tokens of conversation `index` that a loss can count.

        These are the tokens that the target wrote, from the third token of the conversation on.
        """
        return int(self.data.written[self.data.span(index)][2 : self.length(index)].sum())

    def batches(self, indices: Sequence[int], batch_tokens: int) -> list[list[int]]:
        """Divide conversations into batches for evaluation, where their order does not matter."""
        return epoch_batches(indices, list(map(self.length, indices)), batch_tokens, 0, 0)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of these conversations, padded to the longest one.

        With no conversations, the batch has a single empty row that the loss does not count.
        """
        lengths = [self.length(i) for i in indices] or [3]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        written = torch.zeros(ids.shape, dtype=torch.bool)
        wide = torch.zeros(*ids.shape, len(self.features.layers) * self.hidden_size)
        rows = self._rows(indices, lengths)
        for n, (index, length) in enumerate(zip(indices, lengths, strict=False)):
            span = self.data.span(index)
            ids[n, :length] = torch.from_numpy(self.data.tokens[span][:length].astype("int64"))
            written[n, :length] = torch.from_numpy(self.data.written[span][:length].copy())
            wide[n, :length] = rows[n][:length].to(wide.dtype)
        wide = wide.to(self.device)
        fused = torch.cat([self._layer(wide, layer) for layer in self.fused], -1)
        return Batch(
            ids.to(self.device), written.to(self.device), fused, self._layer(wide, self.last)
        )

    def _rows(self, indices: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
        if isinstance(self.features, StoredFeatures):
            return [self.features.rows(self.data, i) for i in indices]
        if not indices:
            return []
        ids = [
            self.data.tokens[self.data.span(i)][:length]
            for i, length in zip(indices, lengths, strict=True)
        ]
        return [rows.cpu() for rows in self.features.rows(ids)]

    def _layer(self, wide: Tensor, layer: int) -> Tensor:
        start = self.features.layers.index(layer) * self.hidden_size
        return wide[..., start : start + self.hidden_size]
