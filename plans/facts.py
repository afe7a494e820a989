"""Sizes of a target and of a draft head, from which memory and latency are estimated. No weights.

Letters: d hidden size, V vocabulary, Vd draft vocabulary, L layers, E experts of a layer, k experts
per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.runtime.errors import PlanError


@dataclass(frozen=True)
class Attention:
    """Sizes of a stack of identical attention layers and of their KV cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _check_count(f"attention.{name}", getattr(self, name))

    @property
    def kv_values_per_token(self) -> int:
        """Number of values that one token adds to the KV cache: 2 * L * kv_heads * head_dim."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def flops(self, rows: int, keys: float) -> float:
        """Return the operations of the scores and the weighted sums.

        That is 4 * L * heads * head_dim for each pair of a row and a key.
        """
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * rows * keys


@dataclass(frozen=True)
class Experts:
    """Experts of a mixture-of-experts model, summed over all layers.

    parameters: parameters of all E experts of all layers. In each layer, a token runs `per_token`
    of the `num_experts` experts.
    """

    num_experts: int
    per_token: int
    parameters: int

    def __post_init__(self) -> None:
        _check_count("experts.num_experts", self.num_experts)
        _check_count("experts.per_token", self.per_token)
        _check_count("experts.parameters", self.parameters)
        if self.per_token > self.num_experts:
            raise PlanError(
                f"experts.per_token is {self.per_token}, but the model has only"
                f" {self.num_experts} experts per layer: correct the model's config"
            )

    @property
    def active_parameters(self) -> float:
        """Number of expert parameters that one token runs: parameters * k / E."""
        return self.parameters * self.per_token / self.num_experts

    def read_parameters(self, rows: float) -> float:
        """Return the parameters that a call of `rows` tokens reads.

        The result is parameters * (1 - (1 - k/E)^rows): the expected share of experts that at
        least one token chooses, if the tokens choose independently and uniformly. It assumes that
        the call reads each chosen expert only once.
        """
        missed: float = (1.0 - self.per_token / self.num_experts) ** rows
        return self.parameters * (1.0 - missed)


@dataclass(frozen=True)
class TargetFacts:
    """Sizes of a target.

    num_parameters: all stored parameters, tied weights counted once. They consist of the decoder
    layers, the embedding [V,d], the lm_head [V,d] unless it is the embedding (`tied`), and the last
    norm. layer_parameters: parameters of the decoder layers, experts included. intermediate_size:
    width of the MLP's widest intermediate row.
    """

    name: str
    num_parameters: int
    layer_parameters: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    tied: bool
    attention: Attention
    max_position_embeddings: int | None = None
    experts: Experts | None = None
    notes: tuple[str, ...] = field(default=())
    """Limitations of these numbers, as sentences for the user."""

    def __post_init__(self) -> None:
        for name in ("num_parameters", "layer_parameters", "vocab_size", "hidden_size"):
            _check_count(f"target.{name}", getattr(self, name))
        _check_count("target.intermediate_size", self.intermediate_size)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding table [V,d]."""
        return self.vocab_size * self.hidden_size

    @property
    def dense_parameters(self) -> int:
        """Parameters of the decoder layers without experts; every token runs them."""
        return self.layer_parameters - (self.experts.parameters if self.experts else 0)


@dataclass(frozen=True)
class DraftFacts:
    """Sizes of an EAGLE head.

    Only parameters of matrices are counted, and none that belong to the target.
    fuse_parameters: parameters of an EAGLE-3 head's fc, read once per round. step_parameters: all
    others that every draft call reads, without the lm_head. lm_head_parameters: parameters of the
    lm_head [Vd,d], also read in every call. own_lm_head: False if the lm_head is the target's
    (EAGLE-1/2). feature_size: width of the target's features.
    """

    name: str
    fuse_parameters: int
    step_parameters: int
    lm_head_parameters: int
    own_lm_head: bool
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    feature_size: int
    attention: Attention

    def __post_init__(self) -> None:
        for name in ("step_parameters", "lm_head_parameters", "draft_vocab_size", "hidden_size"):
            _check_count(f"draft.{name}", getattr(self, name))
        _check_count("draft.intermediate_size", self.intermediate_size)
        _check_count("draft.feature_size", self.feature_size)
        _check_count("draft.fuse_parameters", self.fuse_parameters, low=0)

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the head itself stores."""
        own = self.lm_head_parameters if self.own_lm_head else 0
        return self.fuse_parameters + self.step_parameters + own


def _check_count(name: str, value: object, low: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise PlanError(f"{name} must be an integer of at least {low}, got {value!r}")
