"""One conversation: its prompt, the messages before it, and its answer if there is one.

A line of a prompt file has one of these forms:

    {"prompt": str}                                            the target answers it
    {"turns": [str, ...]}                                      the first turn is the prompt
    {"messages": [{"role": ..., "content": str}, ...]}         system, user, assistant, user, ...
    {"prompt": str, "answer": str, "answer_ids"?, "ended"?, "temperature"?}     already answered

Each form may have `source` and `license`. All assistant messages in `messages`, and `answer`, are
assumed to have been written by this target, so the loss counts them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.runtime.text.chat_template import Message

_ID_DIGITS = 16


class BrokenLine(ValueError):
    """A line is not a conversation. The text is the reason, under which such lines are counted."""


@dataclass(frozen=True)
class Answer:
    """An answer that the target wrote.

    text: the answer. ids: its token ids including the end token, or None if they are not known.
    ended: True if the answer is complete, False if it was cut. temperature: the one it was sampled
    with, or None if it is not known.
    """

    text: str
    ids: tuple[int, ...] | None = None
    ended: bool = True
    temperature: float | None = None


@dataclass(frozen=True)
class Entry:
    """A conversation up to its last prompt, and the answer to that prompt.

    prompt: the user's last message. answer: None if the target still has to write it. system: the
    system message, if any. history: the earlier pairs of prompt and answer. source, license: of the
    conversation, if they are known.
    """

    prompt: str
    answer: Answer | None = None
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    license: str | None = None

    @property
    def is_plain(self) -> bool:
        """True if there is no message before the prompt."""
        return self.system is None and not self.history

    @property
    def asked(self) -> tuple[str, ...]:
        """The user's messages, in order."""
        return (*(prompt for prompt, _ in self.history), self.prompt)

    @property
    def said_to_target(self) -> tuple[str, ...]:
        """The system message and the user's messages; none may contain an evaluation prompt."""
        return self.asked if self.system is None else (self.system, *self.asked)

    @property
    def messages(self) -> list[Message]:
        """The messages of the conversation up to the prompt, which is included."""
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": self.system})
        for prompt, answer in self.history:
            said.append({"role": "user", "content": prompt})
            said.append({"role": "assistant", "content": answer})
        return [*said, {"role": "user", "content": self.prompt}]

    @property
    def opening(self) -> list[Message]:
        """The messages up to the user's first one, which is included."""
        return self.messages[: 1 + (self.system is not None)]

    @property
    def text(self) -> str:
        """Text that identifies the conversation: the prompt, or all messages up to it as JSON."""
        return self.prompt if self.is_plain else json.dumps(self.messages)

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:_ID_DIGITS]


def entry_of_line(line: bytes, is_json: bool) -> Entry:
    """Parse a line of a prompt file: JSON if `is_json`, else a prompt.

    line: without its line break. Raises BrokenLine if it is not a conversation.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise BrokenLine("not UTF-8") from None
    if not is_json:
        return Entry(_prompt(text))
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise BrokenLine("not JSON") from None
    if not isinstance(row, dict):
        raise BrokenLine("not a JSON object")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BrokenLine("unpaired surrogate") from None
    return entry_of_row(row)


def entry_of_row(row: Mapping[str, Any]) -> Entry:
    """Return the conversation of a parsed line. Raises BrokenLine if it is not one."""
    notes = (_optional_text(row, "source"), _optional_text(row, "license"))
    if row.get("messages") is not None:
        return _of_messages(row["messages"], notes)
    prompt = row.get("prompt")
    if prompt is None and isinstance(row.get("turns"), list) and row["turns"]:
        prompt = row["turns"][0]
    if prompt is None:
        raise BrokenLine("prompt is missing")
    answer = None if row.get("answer") is None else _answer(row)
    return Entry(_prompt(prompt), answer, None, (), *notes)


def _prompt(value: object) -> str:
    if not isinstance(value, str):
        raise BrokenLine("prompt is not a string")
    if not value.strip():
        raise BrokenLine("prompt is empty")
    return value


def _optional_text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise BrokenLine(f"{name} is not a string")
    return value


def _answer(row: Mapping[str, Any]) -> Answer:
    text, ids = row["answer"], row.get("answer_ids")
    ended, temperature = row.get("ended"), row.get("temperature")
    if not isinstance(text, str):
        raise BrokenLine("answer is not a string")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise BrokenLine("answer_ids is not a list of integers")
    if not (text if ids is None else ids):
        raise BrokenLine("answer is empty")
    if ended is not None and not isinstance(ended, bool):
        raise BrokenLine("ended is not true or false")
    if temperature is not None and type(temperature) not in (int, float):
        raise BrokenLine("temperature is not a number")
    known = None if ids is None else tuple(ids)
    return Answer(text, known, True if ended is None else ended, temperature)


def _of_messages(messages: object, notes: tuple[str | None, str | None]) -> Entry:
    """Return the conversation of a message list; a final assistant message is its answer.

    The list has an optional system message, followed by alternating user and assistant messages.
    """
    said = _said(messages)
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    wanted = ("user", "assistant")
    if not said or any(role != wanted[i % 2] for i, (role, _) in enumerate(said)):
        raise BrokenLine("messages do not alternate between user and assistant")
    answer = Answer(said.pop()[1]) if said[-1][0] == "assistant" else None
    texts = [text for _, text in said]
    history = tuple(zip(texts[:-1:2], texts[1::2], strict=True))
    return Entry(texts[-1], answer, system, history, *notes)


def _said(messages: object) -> list[tuple[str, str]]:
    """Return the role and the text of each message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BrokenLine("messages is not a list of messages")
    said = []
    for message in messages:
        if not isinstance(message, dict):
            raise BrokenLine("a message is not an object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise BrokenLine("role or content of a message is missing or not a string")
        if not content.strip() and role != "system":
            raise BrokenLine("prompt is empty" if role == "user" else "answer is empty")
        said.append((role, content))
    return said
