"""Rendering of chat messages to token ids, the same ids that the runtime would use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from eagle3.runtime.errors import DataError, RequestError
from eagle3.runtime.text.chat_template import ChatTemplate, Message, as_messages
from eagle3.runtime.text.prompt_encoding import encode_prompt
from eagle3.train.batches.token_dataset import Conversation


@dataclass(frozen=True)
class Turn:
    """A prompt of the user and the target's answer.

    answer_ids: the token ids of the answer, including its end token. system: the system message
    that opens the conversation; only the first turn may have one.
    """

    prompt: str
    answer: str
    answer_ids: tuple[int, ...]
    system: str | None = None

    @property
    def asked(self) -> list[Message]:
        """The messages of this turn before the answer."""
        before: list[Message] = []
        if self.system is not None:
            before.append({"role": "system", "content": self.system})
        return [*before, *as_messages(self.prompt)]


class Renderer:
    """Renders conversations with the target's chat template; without one, uses prompts as they are.

    template: the chat template, or None. vocab_size: the number of tokens that have an embedding in
    the target. eos_ids: the tokens that end an answer. eos_token: the token that ends an answer if
    the template does not determine one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        eos_token: str | None = None,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._vocab_size, self._eos_ids = vocab_size, frozenset(eos_ids)
        self._eos_token = eos_token

    def prompt_ids(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a prompt up to the start of its answer, as `Engine.encode` does.

        Raises RequestError if the template refuses the prompt, if there are several messages but no
        template, or if a token has no embedding in the target.
        """
        if self._template is None and not isinstance(prompt, str):
            if len(prompt) != 1:
                raise RequestError(
                    f"a prompt of {len(prompt)} messages requires a chat template; use a single "
                    "message, or a target with a chat template"
                )
            prompt = str(prompt[0]["content"])
        chat = self._template is not None
        return tuple(encode_prompt(prompt, self._tokenizer, self._template, chat, self._vocab_size))

    def answer_ids(
        self, prompt: str | Sequence[Message], answer: str, ended: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids of an answer that is known only as text.

        prompt: the messages before the answer. ended: append the end token. Raises DataError if a
        token has no embedding in the target.
        """
        before = self.prompt_ids(prompt)
        if self._template is None:
            text, special = str(prompt) if isinstance(prompt, str) else prompt[0]["content"], True
        else:
            messages = as_messages(prompt) if isinstance(prompt, str) else prompt
            text, special = self._template.render(messages), False
        whole = self._tokenizer.encode(text + answer, add_special_tokens=special).ids
        if tuple(whole[: len(before)]) != before:
            # A token spans the boundary of prompt and answer, so the answer is encoded alone.
            before = ()
            whole = self._tokenizer.encode(answer, add_special_tokens=False).ids
        end = () if self._end_id is None or not ended else (self._end_id,)
        return (*self._known(whole[len(before) :]), *end)

    def spells(self, answer: str, answer_ids: Sequence[int]) -> bool:
        """Return True if the ids are valid for this target and decode to the answer.

        White space around the answer is ignored.
        """
        if min(answer_ids) < 0 or max(answer_ids) >= self._vocab_size:
            return False
        return self.decode(answer_ids).strip() == answer.strip()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def conversation(self, turns: Sequence[Turn]) -> Conversation:
        """Return the conversation of one or more turns; only answers are marked as written.

        Raises DataError if the template rewrites earlier turns, so that they cannot be joined.
        """
        messages = turns[0].asked
        ids: list[int] = list(self.prompt_ids(messages))
        written = [False] * len(ids)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            ids += turn.answer_ids
            written += [True] * len(turn.answer_ids)
            if following is not None:
                between = self._between(messages, turn, following)
                ids += between
                written += [False] * len(between)
                answered = {"role": "assistant", "content": turn.answer}
                messages = [*messages, answered, *following.asked]
        return Conversation(tuple(ids), tuple(written))

    def _between(self, messages: Sequence[Message], turn: Turn, following: Turn) -> list[int]:
        """Return the token ids that the template writes between an answer and the next one."""
        if self._template is None:
            raise DataError(
                "conversations of several turns require a chat template: use a target that has "
                "one, or conversations of one turn"
            )
        before = self._template.render(messages)
        answered = {"role": "assistant", "content": turn.answer}
        after = self._template.render([*messages, answered, *following.asked])
        # Some templates strip the answers.
        starts = [before + turn.answer, before + turn.answer.strip()]
        start = next((start for start in starts if after.startswith(start)), None)
        if start is None:
            raise DataError(
                "the chat template rewrites earlier answers, so turns cannot be joined: remove "
                "--long-share, and use conversations of one turn"
            )
        ids = self._known(self._encoded(after[len(start) :]))
        ended = bool(turn.answer_ids) and turn.answer_ids[-1] in self._eos_ids
        return ids[1:] if ended and ids and ids[0] == turn.answer_ids[-1] else ids

    @cached_property
    def _end_id(self) -> int | None:
        """The token that ends an answer: the template's, else `eos_token`, else the lowest id."""
        if self._template is not None:
            mark = "eagle3-answer"
            answered = [*as_messages("a"), {"role": "assistant", "content": mark}]
            rest = self._template.render(answered, add_generation_prompt=False).partition(mark)[2]
            if (ids := self._encoded(rest)) and ids[0] in self._eos_ids:
                return ids[0]
        token = None if self._eos_token is None else self._tokenizer.token_to_id(self._eos_token)
        return token if token is not None else min(self._eos_ids, default=None)

    def _known(self, ids: list[int]) -> list[int]:
        """Return `ids`. Raises DataError if one of them has no embedding in the target.

        A tokenizer may have more tokens than its target.
        """
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise DataError(
                f"token id {highest} has no embedding: the target has {self._vocab_size} tokens; "
                "remove the text that contains it"
            )
        return ids

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
