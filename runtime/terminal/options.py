"""What all commands share: how options are declared, and where output goes. Imports click alone."""

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


def note(text: str) -> None:
    """A line on stderr: progress, statistics."""
    click.echo(text, err=True)


def print_result(data: dict[str, Any], lines: Sequence[str], as_json: bool) -> None:
    """A result on stdout: `data` as one JSON object, or `lines`."""
    click.echo(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def all_options(*each: Decorator) -> Decorator:
    """Several options as one decorator, shown in this order."""
    return lambda command: reduce(lambda done, option: option(done), reversed(each), command)


def parsed(parse: Callable[[Any], Any], wanted: str) -> Callable[..., Any]:
    """An option's callback: what was given goes through `parse`, whose ValueError is wrong use."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return None if value in (None, ()) else parse(value)
        except ValueError:
            shown = value if isinstance(value, str) else ", ".join(value)
            raise click.BadParameter(f"'{shown}': give {wanted}") from None

    return callback


def layer_numbers(value: str) -> tuple[int, ...]:
    """ "2,15,27" -> (2, 15, 27). Raises ValueError."""
    return tuple(int(part) for part in value.split(","))


def given_fields(cls: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that have an option of their name."""
    return {each.name: flags[each.name] for each in fields(cls) if each.name in flags}


def import_stage(module: str, stage: str, error: type[Eagle3Error]) -> Any:
    """The module of a stage that needs torch and transformers, quiet where nobody watches.

    Raises `error`, which names the extra `stage`, where they are not installed.
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


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


class ManyFiles(click.Command):
    """A command whose repeatable options also take several values at once: `--prompts a b c`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeatable = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        return super().parse_args(ctx, _spread(args, repeatable))


def _spread(args: Sequence[str], repeatable: set[str]) -> list[str]:
    """["--x", "a", "b"] -> ["--x", "a", "--x", "b"] for x that is repeatable."""
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
