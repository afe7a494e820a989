"""The commands `eagle3 train head` and `eagle3 train eval`. torch is imported inside them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from eagle3.plans.plan import DRAFT_WEIGHTS
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import TrainingError
from eagle3.runtime.terminal.options import (
    AUX_LAYERS_HELP,
    DRAFT_DEPTH_HELP,
    DRAFT_TOP_K_HELP,
    DRAFT_WEIGHTS_HELP,
    MAX_NEW_TOKENS_HELP,
    MAX_SEQ_LEN_HELP,
    NUM_DRAFT_TOKENS_HELP,
    PROMPT_FILE_HELP,
    TARGET_HELP,
    THREADS_HELP,
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

# What `Recipe.layers` chooses for a target of L layers.
DEFAULT_AUX_LAYERS = "[default: 2, L//2, L-3 for L layers]"

_FOLDER = click.Path(path_type=Path)
_RECIPE = Recipe()
_RUN: dict[str, Any] = {each.name: each.default for each in fields(TrainRequest)}
_EVAL: dict[str, Any] = {each.name: each.default for each in fields(EvalRequest)}


@click.command()
@click.option(
    "--data",
    required=True,
    type=_FOLDER,
    metavar="DIR",
    help="Folder with the training data that `eagle3 train data` wrote.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=_FOLDER,
    metavar="DIR",
    help="Folder to write the head to.",
)
@click.option(
    "--target", metavar="MODEL", help=f"{TARGET_HELP}  [default: the one that wrote the data]"
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=_RECIPE.method,
    help="Training method: eagle3 (fused features, token loss, unrolled draft steps) or eagle1"
    " (feature and token loss, one step).",
)
@click.option(
    "--fusion/--no-fusion",
    default=_RECIPE.fusion,
    help="Fuse the features of three target layers, or read those of the top layer only.",
)
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    callback=parsed(layer_numbers, "layer numbers, for example 2,15,27"),
    metavar="L,M,H",
    help=f"{AUX_LAYERS_HELP}  {DEFAULT_AUX_LAYERS}",
)
@click.option(
    "--norm-output",
    is_flag=True,
    help="Feed the head's output back after its final norm, as EAGLE-3.1 does, instead of before.",
)
@click.option(
    "--ttt-steps",
    default=_RECIPE.ttt_steps,
    help="Number of draft steps unrolled in training-time test.",
)
@click.option(
    "--ttt-ramp",
    default=_RECIPE.ttt_ramp,
    help="Fraction (0 to 1) of the training in which the number of unrolled steps grows from 1 to"
    " --ttt-steps.",
)
@click.option(
    "--step-decay",
    default=_RECIPE.step_decay,
    help="Base of the loss weights: draft step s has the weight base ** s.",
)
@click.option(
    "--draft-vocab-size",
    default=_RECIPE.draft_vocab_size,
    help="Number of tokens in the draft vocabulary of an EAGLE-3 head.",
)
@click.option("--epochs", default=_RECIPE.epochs, help="Number of passes over the training data.")
@click.option(
    "--max-steps",
    type=int,
    help="Maximum number of optimizer steps.  [default: all steps of --epochs]",
)
@click.option(
    "--batch-tokens",
    default=_RECIPE.batch_tokens,
    help="Tokens per batch over all processes, padding included.",
)
@click.option(
    "--max-len",
    default=_RECIPE.max_len,
    help="Maximum length of a conversation in tokens; longer ones are cut.",
)
@click.option(
    "--learning-rate",
    default=_RECIPE.learning_rate,
    help="Peak learning rate of the cosine schedule.",
)
@click.option(
    "--warmup",
    default=_RECIPE.warmup,
    help="Fraction (0 to 1) of the training in which the learning rate rises linearly to its peak.",
)
@click.option(
    "--weight-decay", default=_RECIPE.weight_decay, help="Weight decay of the AdamW optimizer."
)
@click.option(
    "--max-grad-norm",
    default=_RECIPE.max_grad_norm,
    help="Maximum norm of the gradient; a larger gradient is scaled down.",
)
@click.option(
    "--noise",
    default=_RECIPE.noise,
    help="Amplitude of the uniform noise added to the features of an EAGLE-1 head.",
)
@click.option(
    "--data-share",
    default=_RECIPE.data_share,
    help="Fraction (0 to 1) of the remaining conversations to train on, after --holdout.",
)
@click.option(
    "--holdout",
    default=_RECIPE.holdout,
    help="Fraction (0 to 1) of the conversations to hold out for evaluation.",
)
@click.option(
    "--seed",
    default=_RECIPE.seed,
    help="Random seed for the initial weights, the data order and the noise.",
)
@click.option(
    "--bf16",
    is_flag=True,
    help="Compute matrix products in bfloat16; the weights stay float32.",
)
@click.option(
    "--checkpoint-every",
    default=_RUN["checkpoint_every"],
    metavar="STEPS",
    help="Optimizer steps between two checkpoints.",
)
@click.option(
    "--log-every",
    default=_RUN["log_every"],
    metavar="STEPS",
    help="Optimizer steps between two entries in the training log, curves.csv.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="INTEGER",
    help="CPU threads of this process.  [default: PyTorch's]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Start from scratch, even if --output holds a head or checkpoints.",
)
def head(threads: int | None, **flags: Any) -> None:
    """Train a draft head with training-time test.

    An interrupted run continues from its newest checkpoint when the command is repeated. With
    torchrun, the processes share every batch, and the weights and the optimizer state are sharded
    over them.
    """
    stage = import_stage("eagle3.train.loop.train_head", "train", TrainingError)
    recipe = Recipe(**given_fields(Recipe, flags))
    request = TrainRequest(**{**given_fields(TrainRequest, flags), "recipe": recipe})
    if threads is not None:
        stage.torch.set_num_threads(threads)
    click.echo(str(stage.train_head(request, report=note)))


@click.command("eval", cls=ManyFiles)
@click.option("--target", required=True, metavar="MODEL", help=TARGET_HELP)
@click.option("--draft", required=True, type=_FOLDER, metavar="DIR", help="Folder of the head.")
@click.option(
    "--prompts",
    multiple=True,
    required=True,
    type=_FOLDER,
    metavar="FILES...",
    help=f"Prompt files, each one a task: {PROMPT_FILE_HELP}.",
)
@click.option(
    "--num-prompts",
    default=_EVAL["num_prompts"],
    help="Number of prompts to use per file, from the first one on.",
)
@click.option("--max-new-tokens", default=_EVAL["max_new_tokens"], help=MAX_NEW_TOKENS_HELP)
@click.option("--draft-top-k", default=_EVAL["tree"].draft_top_k, help=DRAFT_TOP_K_HELP)
@click.option("--draft-depth", default=_EVAL["tree"].draft_depth, help=DRAFT_DEPTH_HELP)
@click.option(
    "--num-draft-tokens", default=_EVAL["tree"].num_draft_tokens, help=NUM_DRAFT_TOKENS_HELP
)
@click.option(
    "--draft-weights",
    type=click.Choice(DRAFT_WEIGHTS),
    default=_EVAL["draft_weights"],
    help=DRAFT_WEIGHTS_HELP,
)
@click.option("--max-seq-len", default=_EVAL["max_seq_len"], help=MAX_SEQ_LEN_HELP)
@click.option(
    "--compare",
    is_flag=True,
    help="Also run plain decoding; report the speedup, and how many answers differ.",
)
@click.option(
    "--data",
    type=_FOLDER,
    metavar="DIR",
    help="Folder with training data; also report the teacher-forced agreement on its held-out"
    " conversations.",
)
@click.option(
    "--bundle",
    type=_FOLDER,
    metavar="DIR",
    help="Folder of the head's bundle, which is exported there and reused while the head, the"
    " target and the plan stay the same.  [default: a temporary folder]",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="INTEGER", help=THREADS_HELP)
@json_option
def evaluate(as_json: bool, **flags: Any) -> None:
    """Measure the acceptance length of a head by decoding prompts.

    Reports the acceptance length and the acceptance by draft position for each prompt file.
    """
    stage = import_stage("eagle3.train.evaluation.evaluate", "train", TrainingError)
    tree = TreePlan(**given_fields(TreePlan, flags))
    request = EvalRequest(**{**given_fields(EvalRequest, flags), "tree": tree})
    result = stage.evaluate(request, report=note)
    print_result(result.to_json(), result.lines(), as_json)
