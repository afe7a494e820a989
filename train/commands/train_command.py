"""The group `eagle3 train` and its command `data`. torch is imported inside the commands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from eagle3.runtime.errors import TrainingError
from eagle3.runtime.terminal.options import (
    AUX_LAYERS_HELP,
    MAX_NEW_TOKENS_HELP,
    MAX_SEQ_LEN_HELP,
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
from eagle3.train.commands.head_command import DEFAULT_AUX_LAYERS, evaluate, head
from eagle3.train.requests.data_request import DataRequest

_FILE = click.Path(path_type=Path)
_DATA: dict[str, Any] = {each.name: each.default for each in fields(DataRequest)}


def _temperatures(value: str) -> tuple[float, ...]:
    return tuple(float(part) for part in value.split(","))


@click.group()
def train() -> None:
    """Train a draft head: make the data, train, evaluate.

    `data` lets the target write the training data, `head` trains an EAGLE head on it, and `eval`
    measures the acceptance length of the head.
    """


train.add_command(head)
train.add_command(evaluate)


@train.command(cls=ManyFiles)
@click.option("--target", required=True, metavar="MODEL", help=TARGET_HELP)
@click.option(
    "--prompts",
    multiple=True,
    type=_FILE,
    metavar="FILES...",
    help="Prompt files: text with one prompt per line, or .jsonl with `prompt`, `turns` or"
    " `messages`, with or without answers.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=_FILE,
    metavar="DIR",
    help="Folder to write the training data to.",
)
@click.option(
    "--evaluation",
    multiple=True,
    type=_FILE,
    metavar="FILES...",
    help="Prompt files for evaluation, whose prompts are excluded from the training data.",
)
@click.option("--rows", default=_DATA["rows"], help="Number of prompts answered at the same time.")
@click.option("--max-new-tokens", default=_DATA["max_new_tokens"], help=MAX_NEW_TOKENS_HELP)
@click.option("--max-len", default=_DATA["max_len"], help=MAX_SEQ_LEN_HELP)
@click.option(
    "--temperatures",
    default=",".join(f"{t:g}" for t in _DATA["temperatures"]),
    callback=parsed(_temperatures, "numbers, for example 0,0.7,1.0"),
    metavar="T,...",
    help="Sampling temperatures, one of which is drawn for each prompt; 0 decodes greedily.",
)
@click.option(
    "--seed",
    default=_DATA["seed"],
    help="Random seed for sampling and for joining conversations.",
)
@click.option(
    "--synthesize",
    default=_DATA["synthesize"],
    metavar="N",
    help="Number of prompts to let the target write itself, in addition to --prompts.",
)
@click.option(
    "--long-share",
    default=_DATA["long_share"],
    help="Fraction (0 to 1) of the conversations to join into longer ones.",
)
@click.option(
    "--long-tokens",
    default=_DATA["long_tokens"],
    help="Maximum length of a joined conversation, in tokens.",
)
@click.option(
    "--features",
    is_flag=True,
    help="Also store the target's hidden states, so that training need not run the target.",
)
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    callback=parsed(layer_numbers, "layer numbers, for example 2,15,27"),
    metavar="L,M,H",
    help=f"{AUX_LAYERS_HELP} Requires --features.  {DEFAULT_AUX_LAYERS}",
)
@click.option(
    "--bf16", is_flag=True, help="Compute the hidden states in bfloat16. Requires --features."
)
@click.option("--threads", type=int, help=THREADS_HELP)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of prompts used from --prompts.  [default: unlimited]",
)
@click.option("--raw", is_flag=True, help="Use the prompts as they are, without the chat template.")
@json_option
def data(as_json: bool, **flags: Any) -> None:
    """Let the target answer prompts, and store the training data.

    An interrupted run continues when the command is repeated. With torchrun, the processes share
    the work.
    """
    stage = import_stage("eagle3.train.data.make_data", "train", TrainingError)
    summary = stage.make_data(DataRequest(**given_fields(DataRequest, flags)), report=note)
    print_result(summary.to_json(), summary.lines(), as_json)
