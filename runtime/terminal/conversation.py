"""The chat loop of `eagle3 chat`: a conversation's history, shortened when the context is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from eagle3.runtime.engine import DEFAULT_MAX_NEW_TOKENS, Engine
from eagle3.runtime.errors import PromptTooLong, RequestError
from eagle3.runtime.terminal.console import Write, answer, stats_lines

EXIT, RESET = "/exit", "/reset"


class ChatSession:
    """The messages of a conversation; `say` adds a question and its answer.

    note: receives statistics, and a message when turns are dropped. options: those of
    `Engine.stream`. Raises RequestError if the bundle has no chat template or an option is invalid.
    """

    def __init__(
        self, engine: Engine, note: Callable[[str], None], system: str | None = None, **options: Any
    ) -> None:
        if engine.chat_template is None:
            raise RequestError(
                "the bundle has no chat template, which chat requires: use `eagle3 run --raw`"
            )
        engine.stream([0], **options)  # never started; raises if an option is invalid
        self._engine, self._note, self._options = engine, note, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that the target receives, oldest first."""
        return [*self._system, *self._turns]

    def reset(self) -> None:
        """Remove all turns but keep the system message."""
        self._turns.clear()

    def say(self, question: str, write: Write) -> None:
        """Ask a question and pass the answer's text to `write` as it is produced.

        The oldest turns are dropped if the context has no room for an answer. After Ctrl-C, what
        was generated so far is kept as the answer. Raises RequestError (including PromptTooLong)
        if the question cannot be answered; the question is then removed from the history.
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
            self._note(f"the context is full, so the oldest {dropped} turn(s) were dropped")

    def _fits(self) -> bool:
        """Return True if the prompt leaves room for an answer.

        The room is max_new_tokens, but at most a quarter of the context.
        """
        capacity = self._engine.plan.max_seq_len
        wanted: int = self._options.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        room = min(wanted, capacity // 4)
        try:
            return len(self._engine.encode(self.messages)) + room <= capacity
        except PromptTooLong:
            return False


def converse(talk: ChatSession, lines: Iterator[str], write: Write, note: Write) -> None:
    """Answer one line after another until /exit or the end of `lines`; /reset clears the history.

    A question that raises RequestError is reported with `note`, and the conversation continues.
    """
    for line in lines:
        question = line.strip()
        if question == EXIT:
            return
        if question == RESET:
            talk.reset()
            note("the conversation was cleared")
        elif question:
            try:
                talk.say(question, write)
            except RequestError as error:
                note(f"error: {error}")
