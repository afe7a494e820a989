"""Which embedding and which lm_head an EAGLE-3 head uses, where more than one is possible."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3.export.heads.dialects.fields import boolean
from eagle3.export.heads.head_config import OWN_EMBEDDING, HeadConfig, TargetSizes
from eagle3.export.heads.values import CONFIG, DEFAULT, FLAG, TENSORS, Values
from eagle3.runtime.errors import CheckpointError

LM_HEAD = "lm_head.weight"


def embedding_is_own(
    config: HeadConfig, values: Values, weights: Mapping[str, Tensor], target: TargetSizes
) -> bool:
    """Return whether tokens are looked up in the head's own table [V,d], not in the target's
    [V,D].

    That is the case only if its width differs, or if the user says so: some heads contain a copy,
    some a random table that was never used. Raises CheckpointError for a table that was trained,
    unless the user decides.
    """
    own = weights.get(OWN_EMBEDDING)
    if config.method == "eagle3" and config.hidden_size != config.target_width:
        values.note("embedding", "the head's own, of its width", f"{CONFIG} (target_hidden_size)")
        return True
    if own is None:
        is_own = config.method == "eagle3" and values.assume.take("embedding") == "own"
        values.note("embedding", "the target's", DEFAULT)
        return is_own  # a missing tensor is reported with all others
    assumed = values.assume.take("embedding") if config.method == "eagle3" else None
    compared = _compared(own, target)
    trained = boolean(values.given("embed_requires_grad"), "embed_requires_grad")
    if trained and assumed is None and compared != _EQUAL:
        raise CheckpointError(
            f"the head's config has embed_requires_grad, and its embed_tokens {compared}: say "
            "--assume embedding=own if its embedding was trained, or embedding=target"
        )
    if assumed == "own":
        values.note("embedding", f"the head's own; it {compared}", FLAG)
        return True
    remark = f"the target's; the head's own copy {compared} and is not read"
    values.note("embedding", remark, DEFAULT if assumed is None else FLAG)
    return False


_EQUAL = "equals the target's"


def _compared(own: Tensor, target: TargetSizes) -> str:
    """Describe the head's table relative to the target's, as part of a sentence."""
    theirs = target.embedding
    if theirs is None or theirs.shape != own.shape or not own.is_floating_point():
        return "was not compared with the target's"
    if torch.equal(own, theirs.to(own.dtype)) or torch.equal(own.to(theirs.dtype), theirs):
        return _EQUAL
    return "differs from the target's"


def with_lm_head(
    config: HeadConfig, values: Values, weights: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the weights with the lm_head [Vd,d] that the head uses; EAGLE-1/2 has none.

    `tie_word_embeddings` has a meaning only for the whole vocabulary and with an embedding; many
    configs inherit it from the target's. Raises CheckpointError if it contradicts an existing
    lm_head.
    """
    if config.method == "eagle1":
        values.note("lm_head", "the target's", DEFAULT)
        return weights
    tied = boolean(values.given("tie_word_embeddings"), "tie_word_embeddings")
    own, table = weights.get(LM_HEAD), weights.get(OWN_EMBEDDING)
    could_tie = table is not None and config.draft_vocab_size == config.vocab_size
    assumed = values.assume.take("lm_head") if could_tie else None
    if assumed == "embedding" or (assumed is None and tied and could_tie and own is None):
        source = FLAG if assumed else f"{CONFIG} (tie_word_embeddings)"
        values.note("lm_head", f"tied to {OWN_EMBEDDING}", source)
        assert table is not None
        return {**weights, LM_HEAD: table}
    if assumed is None and tied and could_tie and own is not None and not _same(own, table):
        raise CheckpointError(
            f"the head's config has tie_word_embeddings, but {LM_HEAD} and {OWN_EMBEDDING} differ: "
            "say --assume lm_head=own or lm_head=embedding"
        )
    values.note("lm_head", "the head's own", FLAG if assumed else TENSORS)
    return weights


def _same(own: Tensor, table: Tensor | None) -> bool:
    return table is not None and own.shape == table.shape and torch.equal(own, table)
