"""One conversation: its prompt, what stood before it, and its answer where there is one.

A line of a prompts file is one of

    {"prompt": str}                                            the target is to answer
    {"turns": [str, ...]}                                      the first one is the prompt
    {"messages": [{"role": ..., "content": str}, ...]}         system, user, assistant, user, ...
    {"prompt": str, "answer": str, "answer_ids"?, "ended"?, "temperature"?}     answered already

each with `source` and `license` where they are known. What the assistant says in `messages`, in
every turn, and `answer` are taken as written by this target: the loss counts them.
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
    """A line that is no conversation; the text is the reason, which lines are counted by."""


@dataclass(frozen=True)
class Answer:
    """What the target wrote. ids: its tokens where they are known, the end token included.

    ended: whether it came to its end, or was cut.
    """

    text: str
    ids: tuple[int, ...] | None = None
    ended: bool = True
    temperature: float | None = None


@dataclass(frozen=True)
class Entry:
    """A conversation up to the prompt, and the answer to that, or None where it is to be made.

    history: earlier prompts and the answers they got.
    """

    prompt: str
    answer: Answer | None = None
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    license: str | None = None

    @property
    def is_plain(self) -> bool:
        """True for a prompt with nothing before it."""
        return self.system is None and not self.history

    @property
    def asked(self) -> tuple[str, ...]:
        """What the user says, turn by turn."""
        return (*(prompt for prompt, _ in self.history), self.prompt)

    @property
    def said_to_target(self) -> tuple[str, ...]:
        """What no evaluation text may stand in: the system message and the user's turns."""
        return self.asked if self.system is None else (self.system, *self.asked)

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the prompt."""
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": self.system})
        for prompt, answer in self.history:
            said.append({"role": "user", "content": prompt})
            said.append({"role": "assistant", "content": answer})
        return [*said, {"role": "user", "content": self.prompt}]

    @property
    def opening(self) -> list[Message]:
        """The messages up to the user's first."""
        return self.messages[: 1 + (self.system is not None)]

    @property
    def text(self) -> str:
        """What makes this conversation another one: the prompt, and all before it."""
        return self.prompt if self.is_plain else json.dumps(self.messages)

    @property
    def id(self) -> str:
        """First digits of the SHA-256 of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:_ID_DIGITS]


def entry_of_line(line: bytes, is_json: bool) -> Entry:
    """Raises BrokenLine. line: without its end."""
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
        raise BrokenLine("no JSON object")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BrokenLine("half a surrogate pair") from None
    return entry_of_row(row)


def entry_of_row(row: Mapping[str, Any]) -> Entry:
    """The conversation of a parsed line. Raises BrokenLine."""
    notes = (_optional_text(row, "source"), _optional_text(row, "license"))
    if row.get("messages") is not None:
        return _of_messages(row["messages"], notes)
    prompt = row.get("prompt")
    if prompt is None and isinstance(row.get("turns"), list) and row["turns"]:
        prompt = row["turns"][0]
    if prompt is None:
        raise BrokenLine("no prompt")
    answer = None if row.get("answer") is None else _answer(row)
    return Entry(_prompt(prompt), answer, None, (), *notes)


def _prompt(value: object) -> str:
    if not isinstance(value, str):
        raise BrokenLine("prompt is no text")
    if not value.strip():
        raise BrokenLine("empty prompt")
    return value


def _optional_text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise BrokenLine(f"{name} is no text")
    return value


def _answer(row: Mapping[str, Any]) -> Answer:
    text, ids = row["answer"], row.get("answer_ids")
    ended, temperature = row.get("ended"), row.get("temperature")
    if not isinstance(text, str):
        raise BrokenLine("answer is no text")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise BrokenLine("answer_ids is no list of token ids")
    if not (text if ids is None else ids):
        raise BrokenLine("empty answer")
    if ended is not None and not isinstance(ended, bool):
        raise BrokenLine("ended is neither true nor false")
    if temperature is not None and type(temperature) not in (int, float):
        raise BrokenLine("temperature is no number")
    known = None if ids is None else tuple(ids)
    return Answer(text, known, True if ended is None else ended, temperature)


def _of_messages(messages: object, notes: tuple[str | None, str | None]) -> Entry:
    """system?, then user and assistant in turn; the last assistant's is the answer."""
    said = _said(messages)
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    wanted = ("user", "assistant")
    if not said or any(role != wanted[i % 2] for i, (role, _) in enumerate(said)):
        raise BrokenLine("messages are not user and assistant in turn")
    answer = Answer(said.pop()[1]) if said[-1][0] == "assistant" else None
    texts = [text for _, text in said]
    history = tuple(zip(texts[:-1:2], texts[1::2], strict=True))
    return Entry(texts[-1], answer, system, history, *notes)


def _said(messages: object) -> list[tuple[str, str]]:
    """Role and text of each message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BrokenLine("messages is no list of messages")
    said = []
    for message in messages:
        if not isinstance(message, dict):
            raise BrokenLine("a message is no object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise BrokenLine("a message without role and content, both texts")
        if not content.strip() and role != "system":
            raise BrokenLine("empty prompt" if role == "user" else "empty answer")
        said.append((role, content))
    return said
