"""The settings of `eagle3 train head`: the recipe and the training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from eagle3.runtime.errors import TrainingError

Method = Literal["eagle3", "eagle1"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class Recipe:
    """How a head is trained. A default is that of EAGLE-3 where the paper states one.

    method: eagle3 (fused features, token loss, unrolled steps) or eagle1 (feature and token loss,
    one step). fusion: fuse the features of three layers; without it the head reads only the top
    layer. aux_layer_ids: the fused layers as hidden_states indices; None means 2, L//2, L-3.
    norm_output: feed the head's output back after its final norm, as EAGLE-3.1 does, instead of
    before it. ttt_steps: S, the number of unrolled steps. ttt_ramp: share of the training in which
    the number of steps grows from 1 to S. step_decay: step s has the loss weight step_decay ** s.
    draft_vocab_size: tokens in the draft vocabulary of an EAGLE-3 head. max_steps: maximum number
    of optimizer steps. batch_tokens: tokens per batch over all processes, padding included.
    max_len: conversations are cut to this number of tokens. learning_rate: peak of the cosine
    schedule. warmup: share of the training in which it rises linearly to its peak. noise: EAGLE-1's
    feature noise, uniform in +- noise. data_share: share of the conversations to train on, after
    the held-out ones are taken. holdout: share of the conversations held out for evaluation. bf16:
    compute matrix products in bfloat16.

    Raises TrainingError for a value out of range and for options that exclude each other.
    """

    method: Method = "eagle3"
    fusion: bool = True
    aux_layer_ids: tuple[int, ...] | None = None
    norm_output: bool = False
    ttt_steps: int = 7
    ttt_ramp: float = 0.0
    step_decay: float = 0.8
    draft_vocab_size: int = 8192
    epochs: int = 3
    max_steps: int | None = None
    batch_tokens: int = 2048
    max_len: int = 2048
    learning_rate: float = 1e-3
    warmup: float = 0.02
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    noise: float = 0.1
    data_share: float = 1.0
    holdout: float = 0.02
    seed: int = 0
    bf16: bool = False

    def __post_init__(self) -> None:
        _require(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        for name in ("ttt_steps", "draft_vocab_size", "epochs", "batch_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.max_len >= 3, "max_len", self.max_len, "at least 3")
        for name in ("ttt_ramp", "warmup", "holdout"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, value, "at least 0 and below 1")
        for name in ("step_decay", "data_share"):
            value = getattr(self, name)
            _require(0 < value <= 1, name, value, "above 0 and at most 1")
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("weight_decay", "noise", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(
            self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, "at least 1"
        )
        if self.method == "eagle1" and (self.norm_output or self.aux_layer_ids is not None):
            raise TrainingError(
                "--aux-layers and --norm-output do not apply to an EAGLE-1 head, which reads the "
                "target's last hidden state and feeds its output back unchanged: remove them, or "
                "use --method eagle3"
            )
        if not self.fusion and self.aux_layer_ids is not None:
            raise TrainingError(
                "--aux-layers has no effect with --no-fusion, as the head then reads only the top "
                "layer: remove one of the two"
            )

    @property
    def num_steps(self) -> int:
        """Number of unrolled steps S; EAGLE-1 has one."""
        return 1 if self.method == "eagle1" else self.ttt_steps

    def steps_at(self, progress: float) -> int:
        """Return the number of steps to unroll after the fraction `progress` of the training."""
        if progress >= self.ttt_ramp:
            return self.num_steps
        return min(self.num_steps, 1 + int(progress / self.ttt_ramp * self.num_steps))

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the fused hidden_states indices for a target of L = `num_layers` layers.

        Index L is the hidden state after the target's last norm. Raises TrainingError if
        aux_layer_ids does not fit the target.
        """
        if self.method == "eagle1" or not self.fusion:
            return (num_layers,)
        layers = self.aux_layer_ids or (2, num_layers // 2, num_layers - 3)
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
            raise TrainingError(
                f"the fused layers {list(layers)} do not fit a target of {num_layers} layers: use "
                f"--aux-layers with distinct hidden_states indices from 0 to {num_layers}, in "
                "ascending order"
            )
        return layers

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as a JSON object."""
        return {**asdict(self), "aux_layer_ids": self.aux_layer_ids and list(self.aux_layer_ids)}


@dataclass(frozen=True)
class TrainRequest:
    """The settings of one training run, which turns a data folder into a head folder.

    data: the data folder. output: the head folder. target: checkpoint of the target (None: the one
    that wrote the data). checkpoint_every, log_every: in optimizer steps. force: start from
    scratch, even if `output` holds a head or checkpoints.

    Raises TrainingError for a value out of range.
    """

    data: Path
    output: Path
    recipe: Recipe
    target: str | None = None
    checkpoint_every: int = 200
    log_every: int = 10
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "log_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise TrainingError(f"{name} must be {wanted}, got {value!r}")
