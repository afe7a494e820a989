"""Checkpoints of a training run: weights, optimizer and place, sharded over the processes.

    checkpoints/step-00000200/     torch.distributed.checkpoint's files and run.json

A checkpoint is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from eagle3.runtime.errors import TrainingError
from eagle3.train.jobs.processes import Processes

_KEPT = 2
_RUN = "run.json"


def save_checkpoint(
    folder: Path,
    step: int,
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    processes: Processes,
) -> None:
    """Saves after `step` steps; run.json holds `run`. Older checkpoints than two are deleted.

    Raises TrainingError when the disk is full; earlier checkpoints stay.
    """
    weights, state = get_state_dict(objective, optimizer)
    part, whole = folder / f".part-{step:08}", folder / f"step-{step:08}"
    try:
        if processes.is_first:
            shutil.rmtree(part, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        processes.wait()
        with _quiet():
            save(
                {"weights": weights, "optimizer": state},
                checkpoint_id=part,
                no_dist=processes.world == 1,
            )
        if processes.is_first:
            (part / _RUN).write_text(json.dumps({**run, "step": step}), encoding="utf-8")
            if whole.exists():
                shutil.rmtree(whole)
            part.rename(whole)
            for old in _whole(folder)[:-_KEPT]:
                shutil.rmtree(old)
        processes.wait()
    except (OSError, CheckpointException) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise TrainingError(
            f"checkpoint {whole} cannot be written: {_reason(error)}; make room and run the "
            "command again, it goes on from the newest checkpoint"
        ) from error


def newest_run(folder: Path) -> dict[str, Any] | None:
    """run.json of the newest checkpoint, or None. Raises TrainingError where it cannot be read."""
    found = _whole(folder)
    if not found:
        return None
    path = found[-1] / _RUN
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        int(run["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} cannot be read: {error}; delete {found[-1]}") from error
    return run


def load_checkpoint(
    folder: Path,
    step: int,
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    processes: Processes,
) -> None:
    """Fills module and optimizer from the checkpoint of `step`, by whatever number of processes it
    was saved. Raises TrainingError where it does not fit.
    """
    weights, state = get_state_dict(objective, optimizer)
    values: dict[str, Any] = {"weights": weights, "optimizer": state}
    path = folder / f"step-{step:08}"
    try:
        with _quiet():
            load(values, checkpoint_id=path, no_dist=processes.world == 1)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise TrainingError(
            f"checkpoint {path} does not fit this run: {_reason(error)}; delete it, or give "
            "another output"
        ) from error
    set_state_dict(
        objective,
        optimizer,
        model_state_dict=values["weights"],
        optim_state_dict=values["optimizer"],
    )


def _reason(error: BaseException) -> str:
    """What went wrong, in a line; the library's own exception prints a traceback for each rank."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _whole(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


@contextmanager
def _quiet() -> Iterator[None]:
    """The library warns that one process is one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
