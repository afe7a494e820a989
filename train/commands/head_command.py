"""`eagle3 train head` and `eagle3 train eval`: parse and call; torch is imported within them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from eagle3.plans.plan import DRAFT_WEIGHTS
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import TrainingError
from eagle3.runtime.terminal.options import (
    ManyFiles,
    given_fields,
    import_stage,
    json_option,
    layer_numbers,
    note,
    parsed,
    print_result,
)
from eagle3.train.requests.eval_request import EvalRequest
from eagle3.train.requests.recipe import METHODS, Recipe, TrainRequest

_FOLDER = click.Path(path_type=Path)
_RECIPE = Recipe()
_RUN: dict[str, Any] = {each.name: each.default for each in fields(TrainRequest)}
_EVAL: dict[str, Any] = {each.name: each.default for each in fields(EvalRequest)}


@click.command()
@click.option("--data", required=True, type=_FOLDER, metavar="DIR", help="Of `train data`.")
@click.option(
    "-o", "--output", required=True, type=_FOLDER, metavar="DIR", help="The head's folder."
)
@click.option("--target", help="Default: the one that the data came from.")
@click.option("--method", type=click.Choice(METHODS), default=_RECIPE.method)
@click.option(
    "--fusion/--no-fusion", default=_RECIPE.fusion, help="Fuse three layers, or the top one."
)
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    callback=parsed(layer_numbers, "layer numbers, as in 2,15,27"),
    metavar="L,M,H",
    help="Fused layers as hidden_states indices; default: 2, half, last but two.",
)
@click.option("--norm-output", is_flag=True, help="Feed back after the norm, as EAGLE-3.1 does.")
@click.option("--ttt-steps", default=_RECIPE.ttt_steps, help="Draft steps unrolled in training.")
@click.option("--ttt-ramp", default=_RECIPE.ttt_ramp, help="Share of the run in which they grow.")
@click.option("--step-decay", default=_RECIPE.step_decay, help="Weight of step s is this ** s.")
@click.option("--draft-vocab-size", default=_RECIPE.draft_vocab_size, help="Of an EAGLE-3 head.")
@click.option("--epochs", default=_RECIPE.epochs)
@click.option("--max-steps", type=int, help="Optimizer steps, if fewer than the epochs have.")
@click.option("--batch-tokens", default=_RECIPE.batch_tokens, help="Of all processes together.")
@click.option("--max-len", default=_RECIPE.max_len, help="Longer conversations are cut there.")
@click.option("--learning-rate", default=_RECIPE.learning_rate, help="At its highest; cosine.")
@click.option("--warmup", default=_RECIPE.warmup, help="Share of the run in which it rises.")
@click.option("--weight-decay", default=_RECIPE.weight_decay)
@click.option("--max-grad-norm", default=_RECIPE.max_grad_norm)
@click.option("--noise", default=_RECIPE.noise, help="On EAGLE-1's features, uniform.")
@click.option(
    "--data-share", default=_RECIPE.data_share, help="Of the conversations that are used."
)
@click.option("--holdout", default=_RECIPE.holdout, help="Share of them kept for evaluation.")
@click.option("--seed", default=_RECIPE.seed)
@click.option("--bf16", is_flag=True, help="Matrix products in bfloat16; weights stay float32.")
@click.option("--checkpoint-every", default=_RUN["checkpoint_every"], metavar="STEPS")
@click.option("--log-every", default=_RUN["log_every"], metavar="STEPS")
@click.option("--threads", type=click.IntRange(min=1), help="Of this process.")
@click.option("--force", is_flag=True, help="Start anew over what DIR holds.")
def head(threads: int | None, **flags: Any) -> None:
    """Train a draft head by training-time test; run again, it goes on where it stopped.

    With torchrun, processes share every batch, and weights and optimizer are sharded over them.
    """
    stage = import_stage("eagle3.train.loop.train_head", "train", TrainingError)
    recipe = Recipe(**given_fields(Recipe, flags))
    request = TrainRequest(**{**given_fields(TrainRequest, flags), "recipe": recipe})
    if threads is not None:
        stage.torch.set_num_threads(threads)
    click.echo(str(stage.train_head(request, report=note)))


@click.command("eval", cls=ManyFiles)
@click.option("--target", required=True, help="Hugging Face id, folder, or .gguf file.")
@click.option("--draft", required=True, type=_FOLDER, help="The head's folder.")
@click.option(
    "--prompts",
    multiple=True,
    required=True,
    type=_FOLDER,
    metavar="FILES...",
    help="A task each: .jsonl with `prompt` or `turns`, or text, a prompt a line.",
)
@click.option("--num-prompts", default=_EVAL["num_prompts"], help="The first so many of each.")
@click.option("--max-new-tokens", default=_EVAL["max_new_tokens"], help="Of each answer.")
@click.option("--draft-top-k", default=_EVAL["tree"].draft_top_k, help="Of the tree.")
@click.option("--draft-depth", default=_EVAL["tree"].draft_depth, help="Of the tree.")
@click.option("--num-draft-tokens", default=_EVAL["tree"].num_draft_tokens, help="Of the tree.")
@click.option("--draft-weights", type=click.Choice(DRAFT_WEIGHTS), default=_EVAL["draft_weights"])
@click.option("--max-seq-len", default=_EVAL["max_seq_len"], help="Prompt and answer, in tokens.")
@click.option(
    "--compare", is_flag=True, help="Decode plainly too: speed, and whether tokens differ."
)
@click.option("--data", type=_FOLDER, help="Teacher-forced agreement on its held-out part, beside.")
@click.option("--bundle", type=_FOLDER, help="Where the head's bundle is kept, or found.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine.")
@json_option
def evaluate(as_json: bool, **flags: Any) -> None:
    """Decode prompts with a head: acceptance length and acceptance by position, for each task."""
    stage = import_stage("eagle3.train.evaluation.evaluate", "train", TrainingError)
    tree = TreePlan(**given_fields(TreePlan, flags))
    request = EvalRequest(**{**given_fields(EvalRequest, flags), "tree": tree})
    result = stage.evaluate(request, report=note)
    print_result(result.to_json(), result.lines(), as_json)
