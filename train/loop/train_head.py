"""`eagle3 train head`: a data folder in, a head in the official layout out."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead
from eagle3.export.heads.head_config import HeadConfig
from eagle3.export.targets.target import Target, load_target
from eagle3.runtime.errors import TrainingError
from eagle3.train.batches.batch_order import Split, split
from eagle3.train.batches.batch_source import BatchSource
from eagle3.train.batches.draft_vocabulary import coverage, draft_vocabulary
from eagle3.train.batches.features import LiveFeatures, fingerprint, open_features
from eagle3.train.batches.token_dataset import TokenDataset, open_dataset
from eagle3.train.jobs.journal import write_json
from eagle3.train.jobs.lock import locked, make_folder
from eagle3.train.jobs.processes import Processes, joined_processes
from eagle3.train.loop.curves import plot_curves
from eagle3.train.loop.initial_weights import start_from_target, target_fingerprint
from eagle3.train.loop.new_head import new_head, new_head_config, save_head
from eagle3.train.loop.training_loop import Loop
from eagle3.train.losses.objective import Eagle1Objective, Eagle3Objective
from eagle3.train.requests.recipe import Recipe, TrainRequest

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Trainee:
    """What is trained, and what its folder needs to be read by others."""

    config: HeadConfig
    head: EagleHead | Eagle1Head
    target_ids: NDArray[np.int64]


def train_head(request: TrainRequest, report: Report = lambda _: None) -> Path:
    """Trains, or goes on training, and writes the head to request.output; returns that folder.

    Raises DataError for data that cannot be used and TrainingError for a run that cannot start,
    resume or go on; checkpoints stay.
    """
    with joined_processes() as processes, ExitStack() as held:
        say = report if processes.is_first else _silent
        if processes.is_first:
            make_folder(request.output)
            held.enter_context(locked(request.output))
            _prepare(request)
        processes.wait()
        data = open_dataset(request.data)
        target = load_target(_target_of(request), "float32")
        data.check_vocabulary(target.vocab_size)
        recipe = request.recipe
        parts = split(len(data), recipe.holdout, recipe.data_share, recipe.seed)
        trainee = _trainee(recipe, data, parts, target, say)
        loop = _loop(request, processes, data, parts, target, trainee, say)
        del target
        loop.resume()
        loop.train()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(loop.objective, options=options)
        if processes.is_first:
            _finish(request, loop, trainee, weights, say)
        processes.wait()
    return request.output


def _silent(_: str) -> None:
    """What the other processes report."""


def _prepare(request: TrainRequest) -> None:
    """Makes the output, or sees that it may be written to; with `force`, as if it were new."""
    out = request.output
    finished = out / "training.json"
    if finished.is_file() and not request.force:
        raise TrainingError(f"{out} holds a finished head: give --force to train it anew")
    begun = any((out / name).exists() for name in ("training.json", "curves.csv", "checkpoints"))
    if (out / "config.json").exists() and not (begun or request.force):
        raise TrainingError(
            f"{out} holds a model that this command did not make: give another output, or --force "
            "to write over it"
        )
    try:
        if request.force:
            finished.unlink(missing_ok=True)  # a run that is killed from here on can go on
            if (out / "checkpoints").exists():
                shutil.rmtree(out / "checkpoints")
    except OSError as error:
        raise TrainingError(f"{out} cannot be written to: {error.strerror}") from error


def _target_of(request: TrainRequest) -> str:
    if request.target is not None:
        return request.target
    path = request.data / "dataset.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["target"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{path} does not name the target ({error}): give it with --target"
        ) from error


def _trainee(
    recipe: Recipe, data: TokenDataset, parts: Split, target: Target, report: Report
) -> _Trainee:
    size = target.vocab_size if recipe.method == "eagle1" else recipe.draft_vocab_size
    ids = draft_vocabulary(data, parts.train, target.vocab_size, size)
    config = new_head_config(target.config, recipe, len(ids))
    report(f"draft vocabulary {len(ids):,}: {coverage(data, ids):.1%} of the written tokens")
    head = new_head(config, target.model.get_output_embeddings().weight.detach())
    start_from_target(head, target.model, ids, recipe.seed, report)
    return _Trainee(config, head, ids)


def _loop(
    request: TrainRequest,
    processes: Processes,
    data: TokenDataset,
    parts: Split,
    target: Target,
    trainee: _Trainee,
    report: Report,
) -> Loop:
    recipe, config, device = request.recipe, trainee.config, processes.device
    last = int(target.config.num_hidden_layers)
    features = open_features(request.data, data) or LiveFeatures(
        target.model.to(device), sorted({*config.aux_layer_ids, last}), recipe.bf16
    )
    source = BatchSource(
        data, features, config.aux_layer_ids, last, config.hidden_size, recipe.max_len, device
    )
    embedding = target.model.get_input_embeddings().weight.detach().float()
    dtype = torch.bfloat16 if recipe.bf16 else torch.float32
    if isinstance(trainee.head, EagleHead):
        rows = target.model.get_output_embeddings().weight.detach().float()
        rows = rows[torch.from_numpy(trainee.target_ids)]
        objective: Any = Eagle3Objective(trainee.head, embedding, rows, dtype)
    else:
        objective = Eagle1Objective(trainee.head, embedding, dtype)
    _say_unused(source, parts.train, report)
    return Loop(
        recipe=recipe,
        objective=processes.shard(objective.to(device)),
        source=source,
        split=parts,
        processes=processes,
        output=request.output,
        run={
            "recipe": recipe.to_json(),
            "data": fingerprint(data),
            "written": hashlib.sha256(data.written.tobytes()).hexdigest(),
            "target": target_fingerprint(target.model),
        },
        checkpoint_every=request.checkpoint_every,
        log_every=request.log_every,
        report=report,
    )


def _say_unused(source: BatchSource, indices: NDArray[np.int64], report: Report) -> None:
    """Counts what is not trained on. Raises TrainingError where nothing is."""
    cut = int(np.sum(source.data.lengths > source.max_len))
    if cut:
        report(f"{cut} conversations are longer than {source.max_len} tokens and are cut there")
    unused = sum(not source.num_counted(int(i)) for i in indices)
    if unused == len(indices):
        raise TrainingError(
            f"none of {unused} conversations has a token to learn: one that the target wrote, "
            f"behind two others and before --max-len {source.max_len}"
        )
    if unused:
        report(f"{unused} conversations have no token to learn")


def _finish(
    request: TrainRequest, loop: Loop, trainee: _Trainee, weights: dict[str, Any], report: Report
) -> None:
    out = request.output
    own = {n.removeprefix("head."): w for n, w in weights.items() if n.startswith("head.")}
    save_head(out, trainee.config, own, trainee.target_ids)
    versions = {name: version(name) for name in ("torch", "transformers")}
    summary = {**loop.run, "steps": loop.total_steps, "versions": versions}
    write_json(out / "training.json", summary)
    if not plot_curves(out / "curves.csv", out / "curves.png"):
        report("no picture of the curves: pip install 'eagle3[train]' brings matplotlib")
    report(f"head written to {out}")
