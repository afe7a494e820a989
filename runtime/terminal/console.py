"""What the command line reads and shows: stdin, an answer's stream, Ctrl-C, statistics in words."""

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

_ENOUGH_ROUNDS = 8  # with a draft, before its acceptance says anything
_WARM_UP_TOKENS = 8

Write = Callable[[str], None]


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of raising; a second one raises KeyboardInterrupt.

    Off the main thread, where Python delivers no signals, the event is only never set.
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
    """All of stdin, less the newline that ends it. Raises RequestError if it is not UTF-8."""
    stdin = _open_stdin()
    if stdin.isatty():
        note("reading the prompt from the terminal; Ctrl-D ends it")
    try:
        text = stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on stdin is not UTF-8: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def typed_lines(note: Write) -> Iterator[str]:
    """Lines of the terminal, with a prompt and line editing, or of whatever stdin is.

    A line that is not UTF-8 is named and left out. Raises RequestError, at once, without a stdin.
    """
    stdin = _open_stdin()
    if not stdin.isatty():
        raw = iter(stdin.buffer)
        return _lines(lambda: next(raw).decode("utf-8"), note)
    import readline  # noqa: F401  (gives input() its editing and history)

    return _lines(lambda: input("> "), note)


def _open_stdin() -> TextIO:
    if sys.stdin is None:
        raise RequestError("stdin is closed, so no text can be read from it: leave it open")
    return sys.stdin


def _lines(read: Callable[[], str], note: Write) -> Iterator[str]:
    """What `read` gives until the end, which is StopIteration or, at a terminal, EOFError."""
    while True:
        try:
            line = read()
        except UnicodeDecodeError as error:
            note(f"error: the line is not UTF-8: {error}")
        except StopIteration:
            return
        except EOFError:
            note("")
            return
        else:
            yield line


def answer(engine: Engine, prompt: Prompt, write: Write, **options: Any) -> Result:
    """Streams the answer's text to `write`. Ctrl-C ends it with finish_reason "cancelled"."""
    result = None
    with interruptible() as cancel:
        for chunk in engine.stream(prompt, cancel=cancel, **options):
            write(chunk.text)
            result = chunk.result
    assert result is not None
    return result


def stats_lines(result: Result) -> list[str]:
    """The statistics of an answer in words, with what the user should know about them."""
    stats = result.stats
    lines = [
        f"{len(result.token_ids)} tokens ({result.finish_reason}),"
        f" {stats.tokens_per_second:.1f} tokens/s; prefill of {result.prompt_tokens} tokens"
        f" {stats.prefill_ms:.0f} ms"
    ]
    if stats.rounds > stats.plain_rounds:
        lines.append(
            f"tau {stats.acceptance_length:.2f} over {stats.rounds} rounds; accepted by position:"
            f" {positions(stats)}; python overhead {overhead(stats):.1%}"
        )
    return lines + warnings(stats)


def warnings(stats: Stats) -> list[str]:
    """A draft that misses, speculation that was given up."""
    lines = []
    drafted = stats.rounds - stats.plain_rounds
    first = stats.accepted_by_position[0] if stats.accepted_by_position else 1.0
    # A text need not repeat itself: only a model that misses is at fault.
    a_model = stats.drafter != LookupDrafter.name
    if a_model and drafted >= _ENOUGH_ROUNDS and first < NEAR_ZERO_ACCEPTANCE:
        lines.append(
            f"warning: only {first:.1%} of the first draft tokens were accepted: on ordinary text"
            " that is a wiring fault of a head (fused layers, RoPE, vocabulary mapping, chat"
            " template), or an LM too weak to draft; see `eagle3 inspect`, and the prompt with"
            " --show-prompt"
        )
    if stats.fell_back:
        lines.append(
            f"note: speculation did not pay here, {stats.plain_rounds} of {stats.rounds} rounds"
            " were plain; naming --drafter or a draft size keeps it on"
        )
    return lines


def positions(stats: Stats) -> str:
    """Acceptance at each depth of the tree."""
    return " ".join(f"{share:.0%}" for share in stats.accepted_by_position) or "-"


def overhead(stats: Stats) -> float:
    """The part of the rounds' time that is spent outside the engines."""
    return 1.0 - stats.engine_ms / stats.decode_ms if stats.decode_ms else 0.0


@dataclass(frozen=True)
class Comparison:
    """The same request with and without a draft. promised: the tokens must be equal."""

    drafted: Result
    plain: Result
    promised: bool

    @property
    def cancelled(self) -> bool:
        """Ctrl-C ended one of the two, so there is nothing to compare."""
        return "cancelled" in (self.drafted.finish_reason, self.plain.finish_reason)

    @property
    def token_equal(self) -> bool:
        """Both gave the same token ids."""
        return self.drafted.token_ids == self.plain.token_ids

    @property
    def failed(self) -> bool:
        """The tokens differ although the rule promises that they do not."""
        return self.promised and not self.token_equal

    @property
    def speedup(self) -> float:
        """Speed with the draft over speed without; 0 when there was nothing to time."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else 0.0

    def lines(self) -> list[str]:
        """The comparison in words."""
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
        """Result's fields of the speculative run, and `compare`."""
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
            "no (not promised: `rejection` sampling promises the distribution and lower precision"
            " rounds near-ties; --acceptance coupled and float32 promise the tokens)"
        )


def compare(engine: Engine, prompt: Prompt, write: Write, **options: Any) -> Comparison:
    """Runs a request with and without its draft, both warm; the text of the first is streamed.

    Raises RequestError where there is no draft to compare with.
    """
    if options.get("drafter", engine.default_drafter) == "none":
        raise RequestError(
            "there is nothing to compare with plain decoding: the bundle has no drafter, or it was"
            " switched off"
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
