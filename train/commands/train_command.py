"""`eagle3 train ...`: parses and calls; torch is imported within the commands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

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
from eagle3.train.commands.head_command import evaluate, head
from eagle3.train.requests.data_request import DataRequest

_FILE = click.Path(path_type=Path)
_DATA: dict[str, Any] = {each.name: each.default for each in fields(DataRequest)}


def _temperatures(value: str) -> tuple[float, ...]:
    return tuple(float(part) for part in value.split(","))


@click.group()
def train() -> None:
    """Train a draft head: data from the target, the head, its evaluation."""


train.add_command(head)
train.add_command(evaluate)


@train.command(cls=ManyFiles)
@click.option("--target", required=True, help="Hugging Face id, folder, or .gguf file.")
@click.option(
    "--prompts",
    multiple=True,
    type=_FILE,
    metavar="FILES...",
    help=".jsonl with `prompt`, `turns` or `messages`, answered or not; or text, a prompt a line.",
)
@click.option("-o", "--output", required=True, type=_FILE, metavar="DIR", help="Folder of data.")
@click.option(
    "--evaluation",
    multiple=True,
    type=_FILE,
    metavar="FILES...",
    help="Never train on a prompt of these.",
)
@click.option("--rows", default=_DATA["rows"], help="Prompts answered at once.")
@click.option("--max-new-tokens", default=_DATA["max_new_tokens"], help="Of each answer.")
@click.option("--max-len", default=_DATA["max_len"], help="Prompt and answer, in tokens.")
@click.option(
    "--temperatures",
    default=",".join(f"{t:g}" for t in _DATA["temperatures"]),
    callback=parsed(_temperatures, "numbers, as in 0,0.7,1.0"),
    metavar="T,...",
    help="One of them for each prompt.",
)
@click.option("--seed", default=_DATA["seed"], help="Of sampling and joining.")
@click.option(
    "--synthesize", default=_DATA["synthesize"], metavar="N", help="Prompts the target makes up."
)
@click.option(
    "--long-share", default=_DATA["long_share"], help="Of the conversations, joined to long ones."
)
@click.option("--long-tokens", default=_DATA["long_tokens"], help="Length of a long one.")
@click.option("--features", is_flag=True, help="Store the target's hidden states too.")
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    callback=parsed(layer_numbers, "layer numbers, as in 2,15,27"),
    metavar="L,M,H",
    help="Layers of --features as hidden_states indices; default: 2, half, last but two.",
)
@click.option("--bf16", is_flag=True, help="Compute --features in bfloat16.")
@click.option("--threads", type=int, help="Of the target's engine; default: the cores.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts that are used.")
@click.option("--raw", is_flag=True, help="Prompts as they are, without the chat template.")
@json_option
def data(as_json: bool, **flags: Any) -> None:
    """Let the target answer prompts, and pack its conversations for training.

    Run again, it goes on where it stopped. With torchrun, processes share the work.
    """
    stage = import_stage("eagle3.train.data.make_data", "train", TrainingError)
    summary = stage.make_data(DataRequest(**given_fields(DataRequest, flags)), report=note)
    print_result(summary.to_json(), summary.lines(), as_json)
