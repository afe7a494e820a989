"""The training loop: batches in, weights out, with checkpoints that a stopped run goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eagle3.runtime.errors import TrainingError
from eagle3.train.batches.batch import Batch
from eagle3.train.batches.batch_order import Split, epoch_batches
from eagle3.train.batches.batch_source import BatchSource
from eagle3.train.jobs.processes import Processes
from eagle3.train.jobs.progress import Progress
from eagle3.train.loop.checkpoint import load_checkpoint, newest_run, save_checkpoint
from eagle3.train.loop.curves import Curves
from eagle3.train.loop.window import Window
from eagle3.train.losses.objective import StepSums
from eagle3.train.requests.recipe import Recipe

Report = Callable[[str], None]


@dataclass
class Loop:
    """One run. `objective` is sharded already; `run` is what a checkpoint must agree with."""

    recipe: Recipe
    objective: nn.Module
    source: BatchSource
    split: Split
    processes: Processes
    output: Path
    run: dict[str, Any]
    checkpoint_every: int = 200
    log_every: int = 10
    report: Report = lambda _: None
    step: int = field(default=0, init=False)
    _tokens_before: int = field(
        default=0, init=False
    )  # those of the runs that this one goes on from
    _seconds_before: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        trained = [p for p in self.objective.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained,
            lr=self.recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.recipe.weight_decay,
            fused=True,
        )
        self._trained = trained
        columns = ["epoch", "loss", "learning_rate", "tokens", "seconds", "held_loss"]
        steps = range(self.recipe.num_steps)
        columns += [f"{kind}_{i}" for kind in ("agree", "held_agree") for i in steps]
        self._curves = Curves(self.output / "curves.csv", columns)

    @cached_property
    def _lengths(self) -> list[int]:
        return [self.source.length(int(i)) for i in self.split.train]

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        epochs = sum(len(self._batches(epoch)) for epoch in range(self.recipe.epochs))
        return min(epochs, self.recipe.max_steps or epochs)

    def resume(self) -> None:
        """Goes to the newest checkpoint, if any. Raises TrainingError for a foreign one."""
        run = newest_run(self.output / "checkpoints")
        if run is not None:
            self._check_same(run)
            self.step = int(run["step"])
            load_checkpoint(
                self.output / "checkpoints",
                self.step,
                self.objective,
                self._optimizer,
                self.processes,
            )
            self.report(f"going on after step {self.step} of {self.total_steps}")
        if self.processes.is_first:
            self._curves.truncate(self.step)
            self._seconds_before = self._curves.largest("seconds")
            self._tokens_before = self._num_tokens(islice(self._all_steps(), self.step))

    def _check_same(self, run: dict[str, Any]) -> None:
        wanted = {**self.run, "step": run["step"]}
        for name in sorted({*run, *wanted}):
            if run.get(name) != wanted.get(name):
                before, now = _differing(run.get(name), wanted.get(name))
                raise TrainingError(
                    f"{self.output} holds a run with {name} {before!r}, not {now!r}: give another "
                    "output, or --force to start anew"
                )

    def train(self) -> None:
        """Runs to the last step; evaluates on the held-out conversations after every epoch."""
        progress = Progress("training", self._num_tokens(self._steps_left()), self.report)
        window = Window(self.recipe.num_steps)
        for epoch, batch, ends_epoch in self._steps_left():
            sums = self._step(batch)
            window.add(sums)
            self.step += 1
            progress.add(sum(map(self.source.length, batch)), window.note())
            last = self.step == self.total_steps
            saves = self.step % self.checkpoint_every == 0 or last
            if self.step % self.log_every == 0 or saves:  # so that a resumed run logs the same
                self._log(epoch, window, progress)
                window = Window(self.recipe.num_steps)
            if ends_epoch or last:
                self._evaluate(epoch)
            if saves:
                save_checkpoint(
                    self.output / "checkpoints",
                    self.step,
                    self.objective,
                    self._optimizer,
                    self.run,
                    self.processes,
                )

    def _batches(self, epoch: int) -> list[list[int]]:
        return epoch_batches(
            self.split.train.tolist(),
            self._lengths,
            self.recipe.batch_tokens,
            self.recipe.seed,
            epoch,
        )

    def _all_steps(self) -> Iterator[tuple[int, list[int], bool]]:
        """(epoch, batch, whether it is the epoch's last) of the whole run."""
        for epoch in range(self.recipe.epochs):
            batches = self._batches(epoch)
            for n, batch in enumerate(batches):
                yield epoch, batch, n == len(batches) - 1

    def _steps_left(self) -> Iterator[tuple[int, list[int], bool]]:
        """Those from self.step on."""
        return islice(self._all_steps(), self.step, self.total_steps)

    def _num_tokens(self, steps: Iterable[tuple[int, list[int], bool]]) -> int:
        return sum(sum(map(self.source.length, batch)) for _, batch, _ in steps)

    def _step(self, batch: Sequence[int]) -> StepSums:
        """One optimizer step on this process's share of `batch`; returns the sums of all."""
        progress = self.step / self.total_steps
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._schedule(progress)
        num_steps = self.recipe.steps_at(progress)
        share = self._share(batch)
        sums = self._forward(self.source.batch(share), num_steps, share)
        rows = self.processes.sum(sums.rows.clone())
        decay = self.recipe.step_decay ** torch.arange(len(rows), device=rows.device)
        loss = (sums.loss * decay / rows.clamp(min=1)).sum()
        torch.autograd.backward(
            loss * self.processes.world
        )  # sharded gradients are means over the processes
        nn.utils.clip_grad_norm_(self._trained, self.recipe.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not math.isfinite(float(loss.detach())):
            raise TrainingError(
                f"the loss of step {self.step} is {float(loss)}: lower --learning-rate; the newest "
                "checkpoint is from before"
            )
        return StepSums(
            self.processes.sum(sums.loss.detach().clone()),
            self.processes.sum(sums.agreed.clone()),
            rows,
        )

    def _schedule(self, progress: float) -> float:
        """Linear warm-up, then cosine to 0; `progress` from 0 to 1."""
        warmup = self.recipe.warmup
        if progress < warmup:
            return (progress * self.total_steps + 1) / (warmup * self.total_steps + 1)
        return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))

    def _share(self, batch: Sequence[int]) -> Sequence[int]:
        return batch[self.processes.rank :: self.processes.world]

    def _forward(self, batch: Batch, num_steps: int, noisy: Sequence[int] = ()) -> StepSums:
        """noisy: the conversations of the batch, where EAGLE-1's noise is added."""
        device = self.processes.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.recipe.bf16):
            if self.recipe.method == "eagle3":
                return self.objective(batch, num_steps)  # type: ignore[no-any-return]
            return self.objective(batch, self._noise(batch.features, noisy))  # type: ignore[no-any-return]

    def _noise(self, features: Tensor, conversations: Sequence[int]) -> Tensor:
        """Uniform in +- recipe.noise, like features [B,T,d]; of each conversation and step its own,
        so that it does not depend on how a batch is shared out.
        """
        noise = torch.zeros_like(features)
        for row, index in zip(noise, conversations, strict=False):  # no noise, or an empty share
            rng = np.random.default_rng([self.recipe.seed, 3, self.step, index])
            uniform = rng.random((self.source.length(index), row.shape[1]), np.float32) * 2 - 1
            row[: len(uniform)] = torch.from_numpy(uniform * np.float32(self.recipe.noise))
        return noise

    def _log(self, epoch: int, window: Window, progress: Progress) -> None:
        if not self.processes.is_first:
            return
        values = window.values("agree")
        rate = self.recipe.learning_rate * self._schedule((self.step - 1) / self.total_steps)
        self._curves.add(
            self.step,
            {
                "epoch": epoch,
                "loss": f"{window.loss(self.recipe.step_decay):.5f}",
                "learning_rate": f"{rate:.3e}",
                "tokens": self._tokens_before + progress.done,
                "seconds": f"{self._seconds_before + progress.seconds:.1f}",
                **values,
            },
        )

    def _evaluate(self, epoch: int) -> None:
        """Loss and agreement on the held-out conversations, by draft step."""
        held = self.split.held_out.tolist()
        if not held:
            return
        window = Window(self.recipe.num_steps)
        self.objective.eval()
        with torch.no_grad():
            for batch in self.source.batches(held, self.recipe.batch_tokens):
                held_batch = self.source.batch(self._share(batch))
                sums = self._forward(held_batch, self.recipe.num_steps)
                window.add(StepSums(*map(self.processes.sum, vars(sums).values())))
        self.objective.train()
        if self.processes.is_first:
            loss = window.loss(self.recipe.step_decay)
            values = window.values("held_agree")
            self._curves.add(self.step, {"epoch": epoch, "held_loss": f"{loss:.5f}", **values})
            self.report(f"epoch {epoch + 1}: held-out loss {loss:.4f}{window.note()}")


def _differing(before: Any, now: Any) -> tuple[Any, Any]:
    """Of two recipes, the fields that differ; anything else as it is."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before, now
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: before.get(name) for name in names}, {name: now.get(name) for name in names}
