"""The command line: parses and calls, nothing else. Heavy imports stand inside the commands.

Results go to stdout, progress and statistics to stderr. An Eagle3Error is one line and exit 1,
wrong usage exits 2, Ctrl-C 130 with what was generated still shown.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from eagle3 import __version__
from eagle3.export.commands.export_command import export
from eagle3.plans.commands.build_command import build
from eagle3.plans.commands.plan_command import plan_group
from eagle3.plans.tree_paths import DYNAMIC, TREE_CHOICES, read_paths
from eagle3.plans.tree_plan import TreeRequest
from eagle3.runtime.bundle.manifest import BUILT_IN_DRAFTERS, DRAFT_ENGINES
from eagle3.runtime.errors import Eagle3Error
from eagle3.runtime.terminal.options import all_options, json_option, note, parsed, print_result
from eagle3.train.commands.train_command import train

if TYPE_CHECKING:
    from eagle3.runtime.engine import Engine

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Main(click.Group):
    """Turns what may go wrong into a message and an exit code; a closed pipe is click's."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except Eagle3Error as error:
            note(f"error: {' '.join(str(error).split())}")
            ctx.exit(1)
        except KeyboardInterrupt:
            note("")
            ctx.exit(_INTERRUPTED)


@click.group(
    cls=_Main, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="eagle3")
def main() -> None:
    """Compile an LLM with its EAGLE draft into engines, and decode losslessly."""


for _command in (export, build, plan_group, train):
    main.add_command(_command)


def _write(text: str) -> None:
    click.echo(text, nl=False)


def _silent(text: str) -> None:
    """Where --json keeps stdout for its object."""


def _acceptance(value: str) -> str:
    from eagle3.runtime.params import Acceptance

    if value not in get_args(Acceptance):
        raise ValueError(value)
    return value


def _logit_bias(values: Sequence[str]) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in (each.split("=", 1) for each in values)}


_engine_options = all_options(
    click.option("--threads", type=int, help="Of each engine; default: the cores it may use."),
    click.option("--device", default="cpu", help="Where the engines run: cpu or cuda."),
    click.option(
        "--backend",
        help="What runs them on cuda: ort-cuda, tensorrt or tensorrt-rtx; default: what the bundle"
        " was planned for or has plan files of, else ort-cuda.",
    ),
)


def _read_tree(ctx: click.Context, param: click.Parameter, value: str | None) -> TreeRequest | None:
    """`--tree` with its file read; --tree dynamic stays a name, since the bundle has its sizes."""
    return value if value in (None, DYNAMIC) else read_paths(value).paths


_tree_option = click.option(
    "--tree", metavar="NAME|FILE", callback=_read_tree, help=f"Draft tree: {TREE_CHOICES}."
)
# Without a default: what is not given is not passed on, so the engine's own defaults hold.
_request_options = all_options(
    click.option("--max-new-tokens", type=int, help="Longest answer."),
    click.option("--temperature", type=float, help="0, the default, is greedy."),
    click.option("--top-k", type=int, help="Sample from the k most likely tokens."),
    click.option("--top-p", type=float, help="Sample from the smallest set of this mass."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest."),
    click.option("--repetition-penalty", type=float, help="Divides logits of tokens seen."),
    click.option("--presence-penalty", type=float, help="Subtracted once a token was generated."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each time it was."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=parsed(_logit_bias, "ID=VALUE, as in 42=-100"),
        help="Added to a token's logit; repeatable.",
    ),
    click.option("--seed", type=int, help="Of sampling."),
    click.option(
        "--acceptance",
        callback=parsed(_acceptance, "rejection or coupled"),
        metavar="rejection|coupled",
        help="Rule when sampling; coupled: same seed, same text, with any drafter.",
    ),
    click.option("--stop", multiple=True, help="Text that ends the answer; repeatable."),
    click.option("--no-draft", is_flag=True, help="Plain decoding: --drafter none."),
    click.option(
        "--drafter",
        metavar="NAME",
        help=f"One of the bundle's (by default its first), called {', '.join(DRAFT_ENGINES)} unless"
        f" export named it otherwise, or {', '.join(BUILT_IN_DRAFTERS)}; see `eagle3 inspect`.",
    ),
    click.option("--draft-top-k", type=int, help="Children of a node of the draft tree."),
    click.option("--draft-depth", type=int, help="Levels of the draft tree."),
    click.option("--num-draft-tokens", type=int, help="Draft tokens verified in a round."),
    _tree_option,
)


def _request(no_draft: bool, stop: tuple[str, ...], **flags: Any) -> dict[str, Any]:
    """The options of `Engine.stream` that were given."""
    if no_draft and flags.get("drafter") not in (None, "none"):
        raise click.UsageError("--no-draft and --drafter exclude each other")
    options = {name: value for name, value in flags.items() if value is not None}
    if no_draft:
        options["drafter"] = "none"
    return {**options, "stop": stop} if stop else options


def _load(bundle: str, threads: int | None, device: str, backend: str | None) -> Engine:
    from eagle3.runtime.engine import load

    return load(bundle, threads=threads, device=device, backend=backend)


@main.command()
@click.argument("bundle")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="The prompt as it is, without the chat template.")
@click.option("--show-prompt", is_flag=True, help="Rendered prompt on stderr.")
@click.option("--logprobs", type=int, metavar="N", help="N alternatives a token, with --json.")
@click.option("--compare", is_flag=True, help="Run plain decoding too; exit 1 if tokens differ.")
@json_option
@_request_options
@_engine_options
def run(
    bundle: str,
    prompt: str | None,
    raw: bool,
    show_prompt: bool,
    compare: bool,
    as_json: bool,
    threads: int | None,
    device: str,
    backend: str | None,
    **flags: Any,
) -> None:
    """Answer PROMPT, or what stands on stdin, in a stream."""
    from eagle3.runtime.terminal.console import stdin_text

    if flags["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: they are fields of its object")
    options = {**_request(**flags), "chat": not raw}
    text = stdin_text(note) if prompt is None else prompt
    engine = _load(bundle, threads, device, backend)
    if show_prompt:
        note(text if raw else engine.render(text))
    show = _compare if compare else _answer
    show(engine, text, as_json, options)


def _answer(engine: Engine, prompt: str, as_json: bool, options: dict[str, Any]) -> None:
    from eagle3.runtime.terminal.console import answer, stats_lines

    result = answer(engine, prompt, _silent if as_json else _write, **options)
    print_result(result.to_json(), [""], as_json)
    for line in stats_lines(result):
        note(line)
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt


def _compare(engine: Engine, prompt: str, as_json: bool, options: dict[str, Any]) -> None:
    from eagle3.runtime.terminal import console

    comparison = console.compare(engine, prompt, _silent if as_json else _write, **options)
    if comparison.cancelled:
        raise KeyboardInterrupt
    print_result(comparison.to_json(), ["", "", *comparison.lines()], as_json)
    for line in console.warnings(comparison.drafted.stats):
        note(line)
    if comparison.failed:
        raise SystemExit(1)


@main.command()
@click.argument("bundle")
@click.option("--system", help="System message that opens the conversation.")
@_request_options
@_engine_options
def chat(
    bundle: str,
    system: str | None,
    threads: int | None,
    device: str,
    backend: str | None,
    **flags: Any,
) -> None:
    """Talk; /reset forgets, /exit ends, Ctrl-C stops an answer."""
    from eagle3.runtime.terminal.console import typed_lines
    from eagle3.runtime.terminal.conversation import ChatSession, converse

    options, lines = _request(**flags), typed_lines(note)
    talk = ChatSession(_load(bundle, threads, device, backend), note, system, **options)
    converse(talk, lines, _write, note)


@main.command()
@click.argument("bundle")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="Text, a prompt a line, or .jsonl with `prompt` or `turns`; default: built in.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Only the first so many.")
@click.option("--max-new-tokens", type=int, help="Of each answer.")
@_tree_option
@json_option
@_engine_options
def verify(
    bundle: str,
    prompts: Path | None,
    num_prompts: int | None,
    max_new_tokens: int | None,
    tree: TreeRequest | None,
    as_json: bool,
    threads: int | None,
    device: str,
    backend: str | None,
) -> None:
    """Check that no drafter of BUNDLE changes the target's text; exit 1 if one does."""
    from eagle3.runtime.checks import verify as checks
    from eagle3.runtime.text.prompt_files import PROMPTS, load_prompts

    texts = PROMPTS if prompts is None else load_prompts(prompts)
    limit = checks.MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    engine = _load(bundle, threads, device, backend)
    report = checks.verify(engine, texts[:num_prompts], limit, tree=tree, report=note)
    print_result(report.to_json(), report.lines(), as_json)
    if not report.passed:
        raise SystemExit(1)


@main.command()
@click.argument("bundle")
@click.option("--hashes", is_flag=True, help="Read every file and compare its SHA-256.")
@json_option
def inspect(bundle: str, hashes: bool, as_json: bool) -> None:
    """Say what is inside BUNDLE."""
    from eagle3.plans.tensorrt.plan_file_text import plan_files_json, plan_files_text
    from eagle3.runtime.bundle.describe import describe, description_lines
    from eagle3.runtime.bundle.folder import Bundle

    opened = Bundle.open(bundle)
    if hashes:
        opened.verify_hashes()
        note("every file has the SHA-256 that the manifest names")
    data = describe(opened, plan_files_json(opened))
    print_result(data, description_lines(opened, plan_files_text(opened)), as_json)


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can run and what is missing; exit 1 if nothing can run."""
    from eagle3.runtime.checks.doctor import diagnose

    found = diagnose()
    print_result(found.to_json(), found.lines(), as_json)
    if not found.can_run:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
