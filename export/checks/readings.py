"""Measures whether another reading of the head's checkpoint would fit its target clearly better.

A head whose fused layers are off by one, or whose vocabulary mapping is misread, runs without an
error and is only slow. The readings next to the resolved one are therefore measured on greedy
texts of the target: how often the head's first token is the target's token, which is the
acceptance of the first draft position, since its rows carry only features of the target. Readings
are compared by the probability that the head gives to the target's token: on a few hundred tokens
it separates readings that counts of hits cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eagle3.export.draft_graphs.draft_engines import head_module
from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead, embedding_table
from eagle3.export.heads.head_config import Head
from eagle3.export.heads.reader import reread
from eagle3.export.targets.target import Target
from eagle3.runtime.errors import CheckpointError
from eagle3.runtime.stats import NEAR_ZERO_ACCEPTANCE

# Number of standard errors that the mean difference must be above zero.
_MIN_DEVIATIONS = 2.5


@dataclass(frozen=True)
class AnsweredText:
    """Token ids [T] of a prompt and the target's greedy answer, which begins at index `start`."""

    tokens: NDArray[np.int64]
    start: int


@dataclass(frozen=True)
class Reading:
    """A way to read a head's checkpoint, and its results on the texts, as fractions.

    acceptance: how often the head's most likely first token is the target's. probability: the mean
    probability that it gives to the target's token.
    """

    name: str
    acceptance: float
    probability: float
    clearly_better: bool = False


def compare_readings(
    head: Head, target: Target, texts: Sequence[AnsweredText]
) -> tuple[Reading, ...]:
    """Return the resolved reading, then its neighbors in the order of `neighbours`.

    Texts without an answer are skipped; if none is left, there are no readings.
    """
    usable = [text for text in texts if len(text.tokens) - text.start >= 2]
    if not usable:
        return ()
    passages = [_Passage(target, text) for text in usable]
    own = _score(head, head_module(head, target), passages)
    readings = [own.reading("as resolved")]
    for name, other in neighbours(head):
        score = _score(other, head_module(other, target), passages)
        readings.append(score.reading(name, better=_clearly_better(score, own)))
    return tuple(readings)


@dataclass(frozen=True)
class _Score:
    """Per answer token [n] except the first: whether it was the most likely one, and its
    probability.
    """

    hits: NDArray[np.bool_]
    probabilities: NDArray[np.float64]

    def reading(self, name: str, better: bool = False) -> Reading:
        return Reading(name, float(self.hits.mean()), float(self.probabilities.mean()), better)


def neighbours(head: Head) -> Iterator[tuple[str, Head]]:
    """Yield other readings of the same checkpoint that load without an error, each with one
    change.
    """
    changes: dict[str, dict[str, Any]] = {}
    for shift in (-1, 1):
        layers = [i + shift for i in head.config.aux_layer_ids]
        changes[f"aux layers {','.join(map(str, layers))}"] = {"aux_layer_ids": layers}
    norm = str(not head.config.norm_before_residual).lower()
    d2t = "offsets" if head.assume.get("d2t") == "absolute" else "absolute"
    for key, value in (("norm_before_residual", norm), ("d2t", d2t)):
        changes[f"{key}={value}"] = {"assume": {key: value}}
    for name, change in changes.items():
        try:
            yield name, reread(head, **change)
        except CheckpointError:  # this reading does not load
            continue


class _Passage:
    """A text with all hidden states of the target: layer -> [T,d]."""

    def __init__(self, target: Target, text: AnsweredText) -> None:
        self.text = text
        self.tokens = torch.from_numpy(text.tokens)[None]
        self._embedding = target.model.get_input_embeddings().weight
        with torch.no_grad():
            out = target.model(input_ids=self.tokens, use_cache=False, output_hidden_states=True)
        self.hidden_states = out.hidden_states

    def score(self, head: Head, module: EagleHead | Eagle1Head) -> _Score:
        """Score the head teacher-forced: row t has the features of position t and predicts token t
        + 2.
        """
        layers = [self.hidden_states[i][:, :-1] for i in head.config.aux_layer_ids]
        features = torch.cat(layers, -1).to(module.fc.weight)
        positions = torch.arange(features.shape[1])[None]
        with torch.no_grad():
            embedding = F.embedding(self.tokens[:, 1:], embedding_table(head, self._embedding)).to(
                features.dtype
            )
            out = module(embedding, module.fuse(features), positions, causal_attention)
            probs = module.logits(out[:, self.text.start - 1 : -1])[0].softmax(-1).double().numpy()
        said = self.text.tokens[self.text.start + 1 :]
        # Columns of the target's ids. A token outside the draft vocabulary has probability 0.
        known = head.target_ids[None] == said[:, None]
        return _Score(
            hits=head.target_ids[probs.argmax(-1)] == said,
            probabilities=np.where(known, probs, 0.0).sum(-1),
        )


def _score(head: Head, module: EagleHead | Eagle1Head, passages: Sequence[_Passage]) -> _Score:
    scores = [passage.score(head, module) for passage in passages]
    return _Score(
        hits=np.concatenate([each.hits for each in scores]),
        probabilities=np.concatenate([each.probabilities for each in scores]),
    )


def _clearly_better(score: _Score, own: _Score) -> bool:
    """Run a paired, one-sided test of the mean difference. A reading that is bad itself never
    wins.
    """
    gains = score.probabilities - own.probabilities
    if len(gains) < 2 or score.hits.mean() < max(own.hits.mean(), NEAR_ZERO_ACCEPTANCE):
        return False
    error = gains.std(ddof=1) / math.sqrt(len(gains))
    return bool(gains.mean() > _MIN_DEVIATIONS * error)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """q [B,Hq,N,D], k and v [B,Hkv,N,D] -> [B,N,Hq,D], causal."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)
