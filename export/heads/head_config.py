"""The resolved description of a head: everything that its graph is built from, with sources.

Letters: d hidden size of the head, D of the target, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from eagle3.export.heads.checkpoint_files import Checkpoint
from eagle3.runtime.errors import CheckpointError

OWN_EMBEDDING = "embed_tokens.weight"
AUX_LAYERS = "aux_layer_ids (hidden_states indices)"


@dataclass(frozen=True)
class Resolved:
    """A value and its source: "config", "dialect default", "tensors" or "flag", which a remark in
    brackets can follow.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class HeadConfig:
    """A draft head (method section 2). Widths: d hidden, A = heads * head_dim.

    method: "eagle3" or "eagle1". attention_bias: q, k, v and o have biases; qkv_bias: all except
    o. aux_layer_ids: hidden_states indices, low to high; index L of a target with L layers is the
    final hidden state after the target's last norm, and the only one that an EAGLE-1/2 head reads.
    norm_output: the output is normed before it is fed back. fc_bias: fc has a bias (EAGLE-1/2
    only). target_hidden_size: D if it is not d. norm_before_residual: the residual is the normed
    hidden state. norm_before_fc: one norm over the fused features; fc_norm: one norm per feature.
    qk_norm: queries and keys are normed before RoPE. own_embedding: tokens are looked up in the
    head's table [V,d], not in the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]
    max_position_embeddings: int
    draft_vocab_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    conventions: Mapping[str, Resolved]
    method: str = "eagle3"
    norm_output: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    dialect: str = "eagle3-official"
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    qk_norm: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise CheckpointError(
                "the head has norm_before_fc (one norm over the fused features) and fc_norm (one "
                "for each): they are exclusive; choose one with --assume fc_norm=false or "
                "--assume norm_before_fc=false"
            )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs")

    @property
    def drafter(self) -> str:
        """The runtime's name of the method."""
        return {"eagle1": "eagle", "eagle3": "eagle3"}[self.method]

    @property
    def target_width(self) -> int:
        """D, the width of one fused feature."""
        return self.target_hidden_size or self.hidden_size


@dataclass(frozen=True)
class TargetSizes:
    """The sizes of the target that a head must fit.

    embedding [V,D]: used to detect a head's own copy of it; None disables that.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding: Tensor | None = None


@dataclass(frozen=True)
class Head:
    """A head's resolved configuration, its weights by official name, and draft -> target ids.

    target_ids [Vd] int64: the target's id of every draft id. checkpoint, target, aux_layer_ids and
    assume are the inputs it was read from, for `reread`.
    """

    config: HeadConfig
    weights: Mapping[str, Tensor]
    target_ids: np.ndarray
    checkpoint: Checkpoint
    target: TargetSizes
    aux_layer_ids: tuple[int, ...] | None = None
    assume: Mapping[str, str] = field(default_factory=dict)

    @property
    def own_embedding(self) -> Tensor | None:
        """The head's table [V,d], or None if tokens are looked up in the target's."""
        return self.weights[OWN_EMBEDDING] if self.config.own_embedding else None
