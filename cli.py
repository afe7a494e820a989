"""The `eagle3` command line.

It only parses options, calls the stages and prints; heavy packages are imported inside the
commands, so that `--help` is fast. Results go to stdout, progress and statistics to stderr.

Exit status: 1 for an Eagle3Error, which is printed as one line, 2 for wrong usage, and 130 for
Ctrl-C, after printing what was generated so far.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3 import __version__
from eagle3.export.commands.export_command import export
from eagle3.plans.commands.build_command import build
from eagle3.plans.commands.plan_command import plan_group
from eagle3.plans.tree_plan import TreeRequest
from eagle3.runtime.errors import Eagle3Error, EngineError, EngineMissing
from eagle3.runtime.terminal.options import (
    MAX_NEW_TOKENS_HELP,
    PROMPT_FILE_HELP,
    json_option,
    note,
    print_result,
)
from eagle3.runtime.terminal.request_options import (
    engine_options,
    request_arguments,
    request_options,
    tree_option,
)
from eagle3.train.commands.train_command import train

if TYPE_CHECKING:
    from eagle3.runtime.bundle.folder import Bundle
    from eagle3.runtime.engine import Engine

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Main(click.Group):
    """The main group: turns errors into a message and an exit status.

    Click itself handles a closed output pipe.
    """

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A character that the terminal's encoding lacks is replaced instead of raising.
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
    cls=_Main,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, prog_name="eagle3")
def main() -> None:
    """Compile an LLM and its EAGLE draft into engines, and decode losslessly."""


for _command in (export, build, plan_group, train):
    main.add_command(_command)


def _write(text: str) -> None:
    click.echo(text, nl=False)


def _silent(text: str) -> None:
    """Discard the streamed text, because --json prints one object to stdout instead."""


def _load(bundle: str, threads: int | None, device: str, backend: str | None) -> Engine:
    from eagle3.runtime.engine import load

    return load(bundle, threads=threads, device=device, backend=backend)


@main.command(short_help="Generate an answer to PROMPT and stream it.")
@click.argument("bundle")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the chat template.")
@click.option("--show-prompt", is_flag=True, help="Print the rendered prompt to stderr.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="Include the log-probabilities of each token and of its N most likely alternatives (0 to"
    " 20); requires --json.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Also run plain decoding, and print both speeds. Exit with status 1 if tokens differ that"
    " must be equal (greedy or coupled decoding in float32).",
)
@json_option
@request_options
@engine_options
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
    """Generate an answer to PROMPT (default: read from stdin) and stream it.

    If drafting does not make a request faster, the rest of it is decoded plainly, unless an option
    names a drafter, a tree or a tree size.
    """
    from eagle3.runtime.terminal.console import stdin_text

    if flags["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs requires --json, which prints the log-probabilities")
    options = {**request_arguments(**flags), "chat": not raw}
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
@click.option("--system", help="System message that opens the conversation.  [default: none]")
@request_options
@engine_options
def chat(
    bundle: str,
    system: str | None,
    threads: int | None,
    device: str,
    backend: str | None,
    **flags: Any,
) -> None:
    """Chat in the terminal.

    /reset clears the conversation, /exit quits, and Ctrl-C stops the current answer.
    """
    from eagle3.runtime.terminal.console import typed_lines
    from eagle3.runtime.terminal.conversation import ChatSession, converse

    options, lines = request_arguments(**flags), typed_lines(note)
    talk = ChatSession(_load(bundle, threads, device, backend), note, system, **options)
    converse(talk, lines, _write, note)


@main.command()
@click.argument("bundle")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Prompt file: {PROMPT_FILE_HELP}.  [default: 40 built-in prompts]",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    metavar="INTEGER",
    help="Number of prompts to use, from the first one on.  [default: all]",
)
@click.option("--max-new-tokens", type=int, help=f"{MAX_NEW_TOKENS_HELP}  [default: 128]")
@tree_option
@json_option
@engine_options
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
    """Check that no drafter of BUNDLE changes the target's output.

    Greedy and coupled decoding must produce the tokens of plain decoding, and rejection sampling
    must follow the target's distribution. Exits with status 1 if a check fails.
    """
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
@click.option("--hashes", is_flag=True, help="Also check the SHA-256 of every file.")
@json_option
def inspect(bundle: str, hashes: bool, as_json: bool) -> None:
    """Describe BUNDLE: its files, target, drafts, plan and self-check."""
    from eagle3.plans.tensorrt.plan_file_text import plan_files_json, plan_files_text
    from eagle3.runtime.bundle.describe import describe, description_lines
    from eagle3.runtime.bundle.folder import Bundle

    opened = Bundle.open(bundle)
    if hashes:
        opened.verify_hashes()
        note("the SHA-256 of every file matches the manifest")
    form = _int8_form(opened)
    data = describe(opened, plan_files_json(opened), form)
    print_result(data, description_lines(opened, plan_files_text(opened), form), as_json)


def _int8_form(bundle: Bundle) -> str | None:
    """Return how this machine runs an int8 target; None for other targets, and if it cannot."""
    from eagle3.runtime.ort.int8_form import int8_form

    if bundle.manifest.plan.target_weights != "int8":
        return None
    try:
        return int8_form()
    except (EngineError, EngineMissing) as error:
        note(str(error))
        return None


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Report what this machine can run, and what is missing.

    Exits with status 1 if this machine cannot run bundles.
    """
    from eagle3.runtime.checks.doctor import diagnose

    found = diagnose()
    print_result(found.to_json(), found.lines(), as_json)
    if not found.can_run:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
