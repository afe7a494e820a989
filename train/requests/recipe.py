"""What `eagle3 train head` is asked for: one frozen recipe, validated once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from eagle3.runtime.errors import TrainingError

Method = Literal["eagle3", "eagle1"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class Recipe:
    """How a head is trained. Defaults are EAGLE-3's where the paper names one.

    method: eagle3 (fused features, token loss, unrolled) or eagle1 (feature and token loss, one
    step). fusion: fuse three layers; without it the head reads the top layer only. aux_layer_ids:
    the fused layers as hidden_states indices; None takes 2, L//2, L-3. ttt_steps: S. ttt_ramp: the
    share of the training in which the number of steps grows from 1 to S. step_decay: weight of
    step s is step_decay ** s. batch_tokens: of all processes together, padding included. max_len:
    conversations are cut there. holdout: share of the conversations kept for evaluation. noise:
    EAGLE-1's, uniform in +- noise.
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
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        for name in ("step_decay", "data_share"):
            _require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, up to 1")
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("weight_decay", "noise", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        _require(
            self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, "at least 1"
        )
        if self.method == "eagle1" and (self.norm_output or self.aux_layer_ids is not None):
            raise TrainingError(
                "an EAGLE-1 head reads the target's last hidden and feeds its output back as it is:"
                " leave out --aux-layers and --norm-output, or train --method eagle3"
            )
        if not self.fusion and self.aux_layer_ids is not None:
            raise TrainingError(
                "without fusion the head reads the top layer only: leave out --no-fusion or "
                "--aux-layers"
            )

    @property
    def num_steps(self) -> int:
        """S: EAGLE-1 has one."""
        return 1 if self.method == "eagle1" else self.ttt_steps

    def steps_at(self, progress: float) -> int:
        """Steps unrolled when `progress` of the training, from 0 to 1, is over."""
        if progress >= self.ttt_ramp:
            return self.num_steps
        return min(self.num_steps, 1 + int(progress / self.ttt_ramp * self.num_steps))

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The fused hidden_states indices for a target of L layers; L is after its last norm."""
        if self.method == "eagle1" or not self.fusion:
            return (num_layers,)
        layers = self.aux_layer_ids or (2, num_layers // 2, num_layers - 3)
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
            raise TrainingError(
                f"fused layers {list(layers)} do not fit a target of {num_layers} layers: give "
                f"different hidden_states indices from 0 to {num_layers}, low to high, with "
                "--aux-layers"
            )
        return layers

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return {**asdict(self), "aux_layer_ids": self.aux_layer_ids and list(self.aux_layer_ids)}


@dataclass(frozen=True)
class TrainRequest:
    """One training run: data folder in, head folder out."""

    data: Path
    output: Path
    recipe: Recipe
    target: str | None = None  # None: the one that the data came from
    checkpoint_every: int = 200
    log_every: int = 10
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "log_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise TrainingError(f"{name} is {value!r}: give {wanted}")
