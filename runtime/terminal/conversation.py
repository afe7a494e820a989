"""A conversation with an engine: its history, and what is dropped when the context is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from eagle3.runtime.engine import DEFAULT_MAX_NEW_TOKENS, Engine
from eagle3.runtime.errors import PromptTooLong, RequestError
from eagle3.runtime.terminal.console import Write, answer, stats_lines

EXIT, RESET = "/exit", "/reset"


class ChatSession:
    """Messages so far; `say` adds a question and its answer. note: told of what was dropped."""

    def __init__(
        self, engine: Engine, note: Callable[[str], None], system: str | None = None, **options: Any
    ) -> None:
        if engine.chat_template is None:
            raise RequestError(
                "this bundle has no chat template, so it cannot chat: use `eagle3 run --raw`"
            )
        engine.stream([0], **options)  # never started: a bad option is refused before any question
        self._engine, self._note, self._options = engine, note, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the target is shown, oldest first."""
        return [*self._system, *self._turns]

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self._turns.clear()

    def say(self, question: str, write: Write) -> None:
        """Streams the answer to `write`. Raises RequestError, which PromptTooLong is too.

        The oldest turns are dropped when the context has no room for an answer. What was
        generated before a Ctrl-C is kept as the answer.
        """
        self._turns.append({"role": "user", "content": question})
        try:
            self._make_room()
            result = answer(self._engine, self.messages, write, **self._options)
        except BaseException:
            self._turns.pop()
            raise
        self._turns.append({"role": "assistant", "content": result.text})
        write("\n")
        for line in stats_lines(result):
            self._note(line)

    def _make_room(self) -> None:
        dropped = 0
        while not self._fits() and len(self._turns) > 1:
            del self._turns[:2]
            dropped += 1
        if dropped:
            self._note(f"the context is full: the oldest {dropped} turn(s) were dropped")

    def _fits(self) -> bool:
        """Whether the prompt leaves room for an answer: what was asked for, or a quarter."""
        capacity = self._engine.plan.max_seq_len
        wanted: int = self._options.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        room = min(wanted, capacity // 4)
        try:
            return len(self._engine.encode(self.messages)) + room <= capacity
        except PromptTooLong:
            return False


def converse(talk: ChatSession, lines: Iterator[str], write: Write, note: Write) -> None:
    """Answers line after line until /exit or the end; /reset starts anew.

    A question that cannot be served is named and left out; the conversation goes on.
    """
    for line in lines:
        question = line.strip()
        if question == EXIT:
            return
        if question == RESET:
            talk.reset()
            note("the conversation starts anew")
        elif question:
            try:
                talk.say(question, write)
            except RequestError as error:
                note(f"error: {error}")
