"""The options of a request on the command line, shared by `run`, `chat` and `verify`.

Options that are not given are not passed on, so the defaults of `Engine.stream` apply. The help
texts repeat them, because importing the engine is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import click

from eagle3.plans.tree_paths import DYNAMIC, TREE_CHOICES, read_paths
from eagle3.plans.tree_plan import TreeRequest
from eagle3.runtime.bundle.manifest import BUILT_IN_DRAFTERS, DRAFT_ENGINES
from eagle3.runtime.terminal.options import (
    DRAFT_DEPTH_HELP,
    DRAFT_TOP_K_HELP,
    MAX_NEW_TOKENS_HELP,
    NUM_DRAFT_TOKENS_HELP,
    THREADS_HELP,
    all_options,
    parsed,
)


def _acceptance(value: str) -> str:
    from eagle3.runtime.params import Acceptance

    if value not in get_args(Acceptance):
        raise ValueError(value)
    return value


def _logit_bias(values: Sequence[str]) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in (each.split("=", 1) for each in values)}


engine_options = all_options(
    click.option("--threads", type=int, help=THREADS_HELP),
    click.option(
        "--device", default="cpu", metavar="cpu|cuda", help="Device that the engines run on."
    ),
    click.option(
        "--backend",
        metavar="NAME",
        help="Backend that runs the engines on cuda: ort-cuda, tensorrt or tensorrt-rtx."
        "  [default: the one that the bundle was planned or built for, otherwise ort-cuda]",
    ),
)


def _read_tree(ctx: click.Context, param: click.Parameter, value: str | None) -> TreeRequest | None:
    """Return the paths that `--tree` names or that its file holds.

    "dynamic" is passed on as a name, because the sizes of that tree are in the bundle.
    """
    return value if value in (None, DYNAMIC) else read_paths(value).paths


tree_option = click.option(
    "--tree",
    metavar="NAME|FILE",
    callback=_read_tree,
    help=f"Draft tree: {TREE_CHOICES}.  [default: the bundle's]",
)


request_options = all_options(
    click.option("--max-new-tokens", type=int, help=f"{MAX_NEW_TOKENS_HELP}  [default: 256]"),
    click.option("--temperature", type=float, help="Sampling temperature.  [default: 0, greedy]"),
    click.option("--top-k", type=int, help="Sample from the K most likely tokens.  [default: all]"),
    click.option(
        "--top-p",
        type=float,
        help="Sample from the fewest tokens with this total probability (0 to 1).  [default: 1]",
    ),
    click.option(
        "--min-p",
        type=float,
        help="Discard tokens below this fraction (0 to 1) of the highest probability."
        "  [default: 0]",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Penalty on tokens that occur in the prompt or the answer; values above 1 make them"
        " less likely.  [default: 1]",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Value subtracted from the logit of every token in the answer.  [default: 0]",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="Value subtracted from a logit for each occurrence in the answer.  [default: 0]",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=parsed(_logit_bias, "ID=VALUE, for example 42=-100"),
        help="Value added to the logit of token ID, for example 42=-100. Repeatable.",
    ),
    click.option("--seed", type=int, help="Random seed for sampling.  [default: 0]"),
    click.option(
        "--acceptance",
        callback=parsed(_acceptance, "rejection or coupled"),
        metavar="rejection|coupled",
        help="Acceptance rule when sampling. With coupled, a seed gives the same text with any"
        " drafter.  [default: rejection]",
    ),
    click.option("--stop", multiple=True, help="Text that ends the answer. Repeatable."),
    click.option("--no-draft", is_flag=True, help="Decode plainly, as with --drafter none."),
    click.option(
        "--drafter",
        metavar="NAME",
        help=f"Drafter: {', '.join(BUILT_IN_DRAFTERS)}, or a draft of the bundle, whose name is its"
        f" method ({', '.join(DRAFT_ENGINES)}) unless the export set another one; `eagle3 inspect`"
        " lists the drafts.  [default: the bundle's first draft]",
    ),
    click.option("--draft-top-k", type=int, help=f"{DRAFT_TOP_K_HELP}  [default: the bundle's]"),
    click.option("--draft-depth", type=int, help=f"{DRAFT_DEPTH_HELP}  [default: the bundle's]"),
    click.option(
        "--num-draft-tokens", type=int, help=f"{NUM_DRAFT_TOKENS_HELP}  [default: the bundle's]"
    ),
    tree_option,
)


def request_arguments(no_draft: bool, stop: tuple[str, ...], **flags: Any) -> dict[str, Any]:
    """Return the options that were given, as keyword arguments of `Engine.stream`."""
    if no_draft and flags.get("drafter") not in (None, "none"):
        raise click.UsageError("--no-draft and --drafter cannot be used together")
    options = {name: value for name, value in flags.items() if value is not None}
    if no_draft:
        options["drafter"] = "none"
    return {**options, "stop": stop} if stop else options
