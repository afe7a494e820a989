"""Input and output of the command line: stdin, streamed answers, Ctrl-C and printed statistics.

`cli.py` calls `answer` and `compare`; `conversation.py` calls `answer` for every turn of a chat.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from eagle3.runtime.drafters.lookup import LookupDrafter
from eagle3.runtime.engine import Engine, Result
from eagle3.runtime.errors import RequestError
from eagle3.runtime.stats import NEAR_ZERO_ACCEPTANCE, Stats
from eagle3.runtime.text.prompt_encoding import Prompt

_ENOUGH_ROUNDS = 8  # fewer rounds with a draft are too few to judge its acceptance
_WARM_UP_TOKENS = 8

Write = Callable[[str], None]


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets instead of raising KeyboardInterrupt; a second Ctrl-C raises.

    Python delivers signals to the main thread only, so in any other thread the event is never set.
    """
    cancel = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield cancel
        return

    def on_interrupt(number: int, frame: object) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def stdin_text(note: Write) -> str:
    """Return all of stdin without its final newline.

    Raises RequestError if stdin is closed or its text is not valid UTF-8.
    """
    stdin = _open_stdin()
    if stdin.isatty():
        note("enter the prompt, then press Ctrl-D on a new line")
    try:
        text = stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on stdin is not UTF-8 text: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def typed_lines(note: Write) -> Iterator[str]:
    """Return an iterator over the lines of stdin; a terminal gets a prompt and line editing.

    A line that is not valid UTF-8 is reported with `note` and skipped. Raises RequestError
    immediately if stdin is closed.
    """
    stdin = _open_stdin()
    if not stdin.isatty():
        raw = iter(stdin.buffer)
        return _lines(lambda: next(raw).decode("utf-8"), note)
    import readline  # noqa: F401  (adds line editing and history to input())

    return _lines(lambda: input("> "), note)


def _open_stdin() -> TextIO:
    if sys.stdin is None:
        raise RequestError("stdin is closed, so no input can be read: keep it open")
    return sys.stdin


def _lines(read: Callable[[], str], note: Write) -> Iterator[str]:
    """Yield what `read` returns until it raises StopIteration or, at a terminal, EOFError."""
    while True:
        try:
            line = read()
        except UnicodeDecodeError as error:
            note(f"error: the line is not UTF-8 text: {error}")
        except StopIteration:
            return
        except EOFError:
            note("")
            return
        else:
            yield line


def answer(engine: Engine, prompt: Prompt, write: Write, **options: Any) -> Result:
    """Generate an answer and pass its text to `write` as it is produced.

    options: those of `Engine.stream`. Ctrl-C ends the answer with finish_reason "cancelled".
    """
    result = None
    with interruptible() as cancel:
        for chunk in engine.stream(prompt, cancel=cancel, **options):
            write(chunk.text)
            result = chunk.result
    assert result is not None
    return result


def stats_lines(result: Result) -> list[str]:
    """Return the statistics of an answer as lines of text, followed by `warnings`."""
    stats = result.stats
    lines = [
        f"{len(result.token_ids)} tokens ({result.finish_reason}),"
        f" {stats.tokens_per_second:.1f} tokens/s; prefill: {result.prompt_tokens} tokens in"
        f" {stats.prefill_ms:.0f} ms"
    ]
    if stats.rounds > stats.plain_rounds:
        lines.append(
            f"tau {stats.acceptance_length:.2f} over {stats.rounds} rounds; accepted by position:"
            f" {positions(stats)}; python overhead {overhead(stats):.1%}"
        )
    return lines + warnings(stats)


def warnings(stats: Stats) -> list[str]:
    """Return a warning if the draft is hardly ever accepted, and a note if drafting was stopped."""
    lines = []
    drafted = stats.rounds - stats.plain_rounds
    first = stats.accepted_by_position[0] if stats.accepted_by_position else 1.0
    # Low acceptance of `lookup` is normal, because a text need not repeat itself.
    a_model = stats.drafter != LookupDrafter.name
    if a_model and drafted >= _ENOUGH_ROUNDS and first < NEAR_ZERO_ACCEPTANCE:
        lines.append(
            f"warning: only {first:.1%} of the first draft tokens were accepted; on ordinary text,"
            " this indicates a wiring fault of the head (fused layers, RoPE, vocabulary mapping,"
            " chat template) or an LM that is too weak to draft; check `eagle3 inspect`, and the"
            " prompt with --show-prompt"
        )
    if stats.fell_back:
        lines.append(
            f"note: drafting did not pay off, so {stats.plain_rounds} of {stats.rounds} rounds"
            " were plain; to keep drafting, set --drafter or a tree size"
        )
    return lines


def positions(stats: Stats) -> str:
    """Return the acceptance rate at each depth of the tree, for example "80% 20% 0%"."""
    return " ".join(f"{share:.0%}" for share in stats.accepted_by_position) or "-"


def overhead(stats: Stats) -> float:
    """Return the fraction of the decoding time that is spent outside the engines."""
    return 1.0 - stats.engine_ms / stats.decode_ms if stats.decode_ms else 0.0


@dataclass(frozen=True)
class Comparison:
    """Results of the same request with and without a draft.

    promised: True if the decoding rule and the data type guarantee equal tokens.
    """

    drafted: Result
    plain: Result
    promised: bool

    @property
    def cancelled(self) -> bool:
        """True if Ctrl-C ended one of the two runs, so that they cannot be compared."""
        return "cancelled" in (self.drafted.finish_reason, self.plain.finish_reason)

    @property
    def token_equal(self) -> bool:
        """True if both runs produced the same token ids."""
        return self.drafted.token_ids == self.plain.token_ids

    @property
    def failed(self) -> bool:
        """True if the tokens differ although equal tokens are guaranteed."""
        return self.promised and not self.token_equal

    @property
    def speedup(self) -> float:
        """Ratio of the speed with the draft to the speed without; 0 if the latter is 0."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else 0.0

    def lines(self) -> list[str]:
        """Return the comparison as five lines of text; scripts rely on their prefixes."""
        drafted, plain = self.drafted.stats, self.plain.stats
        return [
            f"plain: {plain.tokens_per_second:.1f} tokens/s, prefill {plain.prefill_ms:.0f} ms",
            f"speculative: {drafted.tokens_per_second:.1f} tokens/s, prefill"
            f" {drafted.prefill_ms:.0f} ms, python overhead {overhead(drafted):.1%}",
            f"speedup: {self.speedup:.2f}x",
            f"tau: {drafted.acceptance_length:.2f}, accepted by position: {positions(drafted)}",
            f"token-equal: {self._verdict()}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the speculative `Result`, and an object `compare`."""
        compare = {
            "plain": self.plain.to_json(),
            "speedup": self.speedup,
            "token_equal": self.token_equal,
            "token_equality_promised": self.promised,
        }
        return {**self.drafted.to_json(), "compare": compare}

    def _verdict(self) -> str:
        if self.token_equal:
            return "yes"
        if self.promised:
            return "no"
        return (
            "no (not promised: rejection sampling only preserves the distribution, and rounding"
            " below float32 can flip near-ties; equal tokens require float32, and greedy decoding"
            " or --acceptance coupled)"
        )


def compare(engine: Engine, prompt: Prompt, write: Write, **options: Any) -> Comparison:
    """Run a request with its draft and then without, after a short warm-up of both.

    The text of the run with the draft is passed to `write` as it is produced. Raises RequestError
    if there is no draft to compare with.
    """
    if options.get("drafter", engine.default_drafter) == "none":
        raise RequestError(
            "nothing to compare with plain decoding: the bundle has no draft, or drafting is"
            " switched off; choose a drafter with --drafter"
        )
    plain_options = {**options, "drafter": "none"}
    for each in (plain_options, options):
        engine.generate(prompt, **{**each, "max_new_tokens": _warm_up_tokens(options)})
    drafted = answer(engine, prompt, write, **options)
    plain = drafted
    if drafted.finish_reason != "cancelled":
        plain = answer(engine, prompt, lambda _: None, **plain_options)
    sampled = options.get("temperature", 0.0) > 0.0 and options.get("acceptance") != "coupled"
    return Comparison(drafted, plain, promised=not sampled and engine.plan.dtype == "float32")


def _warm_up_tokens(options: Mapping[str, Any]) -> int:
    asked: int = options.get("max_new_tokens", _WARM_UP_TOKENS)
    return min(_WARM_UP_TOKENS, asked)
