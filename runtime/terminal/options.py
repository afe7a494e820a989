"""Helpers that all commands share: declaring options, and printing to stdout and stderr.

Of the third-party packages, only click is imported, so that `eagle3 --help` stays fast.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import reduce
from typing import Any

import click

from eagle3.runtime.errors import Eagle3Error

Decorator = Callable[[Any], Any]

# Help texts of options that several commands have. A command appends its own default in square
# brackets where click does not know it.
TARGET_HELP = "Target model: Hugging Face id, folder or .gguf file."
PLAN_HELP = "Plan: name of a preset (see `eagle3 plan list`) or path of a .toml file."
COMPUTE_CAPABILITY_HELP = (
    "Compute capability of the GPU that plan files are built for, for example 8.9."
    "  [default: the plan's, otherwise this machine's]"
)
BATCH_HELP = "Maximum number of sequences per call."
MAX_NEW_TOKENS_HELP = "Maximum number of tokens generated per answer."
MAX_SEQ_LEN_HELP = "Maximum sequence length in tokens, prompt and answer together."
PREFILL_CHUNK_HELP = "Maximum number of prompt tokens per prefill call."
DRAFT_TOP_K_HELP = "Children per node of the draft tree."
DRAFT_DEPTH_HELP = "Levels of the draft tree, root excluded."
NUM_DRAFT_TOKENS_HELP = "Draft tokens verified per round, root excluded."
TARGET_WEIGHTS_HELP = (
    "Storage of the target's weights: same (the data type of --dtype) or int8 (a quarter of the"
    " memory and about twice as fast on CPUs; the output is that of the quantized model, whose"
    " difference from the original is measured)."
)
DRAFT_WEIGHTS_HELP = (
    "Storage of the draft's weights: same (the target's data type) or int8 (faster, but slightly"
    " fewer tokens are accepted). The output stays exact."
)
AUX_LAYERS_HELP = "Target layers to fuse, as hidden_states indices."
THREADS_HELP = "CPU threads of each engine.  [default: all available cores]"
TRUST_REMOTE_CODE_HELP = "Allow running Python code from the target's repository."
PROMPT_FILE_HELP = "text with one prompt per line, or .jsonl with `prompt` or `turns`"


def note(text: str) -> None:
    """Print a line to stderr, for progress and statistics."""
    click.echo(text, err=True)


def print_result(data: dict[str, Any], lines: Sequence[str], as_json: bool) -> None:
    """Print a result to stdout: `data` as one JSON object if `as_json`, otherwise `lines`."""
    click.echo(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def all_options(*each: Decorator) -> Decorator:
    """Combine several options into one decorator; `--help` shows them in this order."""
    return lambda command: reduce(lambda done, option: option(done), reversed(each), command)


def parsed(parse: Callable[[Any], Any], wanted: str) -> Callable[..., Any]:
    """Return a callback for an option that converts the given value with `parse`.

    A ValueError of `parse` becomes a usage error. wanted: what a correct value looks like.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return None if value in (None, ()) else parse(value)
        except ValueError:
            shown = value if isinstance(value, str) else ", ".join(value)
            raise click.BadParameter(f"expected {wanted}, got '{shown}'") from None

    return callback


def layer_numbers(value: str) -> tuple[int, ...]:
    """Parse layer numbers: "2,15,27" becomes (2, 15, 27). Raises ValueError."""
    return tuple(int(part) for part in value.split(","))


def given_fields(cls: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the values in `flags` whose names are fields of the dataclass `cls`."""
    return {each.name: flags[each.name] for each in fields(cls) if each.name in flags}


def import_stage(module: str, stage: str, error: type[Eagle3Error]) -> Any:
    """Import and return `module`, which needs torch and transformers.

    Progress bars and log messages of transformers are switched off unless stderr is a terminal.
    Raises `error` if a package is not installed; the message names the extra `stage` to install.
    """
    watched = sys.stderr.isatty()
    if not watched:
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        logging = importlib.import_module("transformers.utils").logging
        if not watched:
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        return importlib.import_module(module)
    except ImportError as reason:
        raise error(
            f"{stage} needs torch and transformers: pip install 'eagle3[{stage}]' ({reason})"
        ) from reason


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object."
)


class ManyFiles(click.Command):
    """A command whose repeatable options also accept several values at once: `--prompts a b c`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeatable = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        return super().parse_args(ctx, _spread(args, repeatable))


def _spread(args: Sequence[str], repeatable: set[str]) -> list[str]:
    """Repeat an option for each of its values: --x a b becomes --x a --x b if x is repeatable."""
    spread: list[str] = []
    current = None  # the repeatable option whose values are being read
    for word in args:
        if word.startswith("-") and word != "-":
            current = word if word in repeatable else None
            spread.append(word)
        elif current is None or spread[-1] == current:
            spread.append(word)
        else:
            spread += [current, word]
    return spread
