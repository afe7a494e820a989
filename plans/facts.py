"""A target and a draft head in numbers: all that memory and cost follow from. No weights.

Letters: d hidden size, V vocabulary, Vd draft vocabulary, L layers, E experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.runtime.errors import PlanError


@dataclass(frozen=True)
class Attention:
    """Attention layers that are all alike, and their cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _check_count(f"attention.{name}", getattr(self, name))

    @property
    def kv_values_per_token(self) -> int:
        """Numbers a token adds to the cache: 2 * L * kv_heads * head_dim."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def flops(self, rows: int, keys: float) -> float:
        """Of scores and weighted sums: 4 * L * heads * head_dim for each row and key."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * rows * keys


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture, all layers together.

    parameters: of all E experts of all layers. A token runs `per_token` of the E of its layer.
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
                f"a token of the model runs {self.per_token} experts of {self.num_experts}:"
                " its config contradicts itself"
            )

    @property
    def active_parameters(self) -> float:
        """That one token runs: parameters * k / E."""
        return self.parameters * self.per_token / self.num_experts

    def read_parameters(self, rows: float) -> float:
        """That a call of `rows` tokens reads: parameters * (1 - (1 - k/E)^rows).

        The expected share of experts that one of the tokens chose, where each chooses by itself and
        evenly: what a call reads that reads no expert twice.
        """
        missed: float = (1.0 - self.per_token / self.num_experts) ** rows
        return self.parameters * (1.0 - missed)


@dataclass(frozen=True)
class TargetFacts:
    """The target. num_parameters: all that is stored, tied weights once.

    layer_parameters: of the decoder layers, experts included; `num_parameters` is these, the
    embedding [V,d], the lm_head [V,d] unless it is the embedding (`tied`), and the last norm.
    intermediate_size: the widest of the MLP's rows that exist at once.
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
    """What these numbers do not know, for the reader."""

    def __post_init__(self) -> None:
        for name in ("num_parameters", "layer_parameters", "vocab_size", "hidden_size"):
            _check_count(f"target.{name}", getattr(self, name))
        _check_count("target.intermediate_size", self.intermediate_size)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def dense_parameters(self) -> int:
        """Of the layers, without experts: every token runs them."""
        return self.layer_parameters - (self.experts.parameters if self.experts else 0)


@dataclass(frozen=True)
class DraftFacts:
    """An EAGLE head. Parameters are of matrices; what is the target's is not counted here.

    fuse_parameters: read once a round, of an EAGLE-3 head's fc. step_parameters: read in every
    call but the lm_head. lm_head_parameters: [Vd,d], read in every call too; `own_lm_head` is
    False where it is the target's (EAGLE-1/2). feature_size: width of the target's features.
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
        """That the head brings along."""
        own = self.lm_head_parameters if self.own_lm_head else 0
        return self.fuse_parameters + self.step_parameters + own


def _check_count(name: str, value: object, low: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise PlanError(f"{name} is {value!r}: a model has at least {low}")
