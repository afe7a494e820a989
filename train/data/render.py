"""Chat messages to the token ids that the runtime would decode them from."""

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
    """What a user asked and what the target answered, in ids (the end token included).

    system: a message that opens the conversation; only its first turn may have one.
    """

    prompt: str
    answer: str
    answer_ids: tuple[int, ...]
    system: str | None = None

    @property
    def asked(self) -> list[Message]:
        """The messages that the answer follows."""
        before: list[Message] = []
        if self.system is not None:
            before.append({"role": "system", "content": self.system})
        return [*before, *as_messages(self.prompt)]


class Renderer:
    """Renders conversations by the target's chat template; without one, prompts as they are.

    eos_ids: tokens that end an answer. eos_token: the one that does where no template says it.
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
        """Ids of a prompt up to where the answer begins, as `Engine.encode` gives them.

        Raises RequestError for what the template refuses or the target has no embedding of.
        """
        if self._template is None and not isinstance(prompt, str):
            if len(prompt) != 1:
                raise RequestError("several messages need a chat template")
            prompt = str(prompt[0]["content"])
        chat = self._template is not None
        return tuple(encode_prompt(prompt, self._tokenizer, self._template, chat, self._vocab_size))

    def answer_ids(
        self, prompt: str | Sequence[Message], answer: str, ended: bool = True
    ) -> tuple[int, ...]:
        """Ids of an answer that is known as text only; ended: with the end token.

        Raises DataError for a token that the target does not have.
        """
        before = self.prompt_ids(prompt)
        if self._template is None:
            text, special = str(prompt) if isinstance(prompt, str) else prompt[0]["content"], True
        else:
            messages = as_messages(prompt) if isinstance(prompt, str) else prompt
            text, special = self._template.render(messages), False
        whole = self._tokenizer.encode(text + answer, add_special_tokens=special).ids
        if tuple(whole[: len(before)]) != before:  # the last token would reach into the answer
            before = ()
            whole = self._tokenizer.encode(answer, add_special_tokens=False).ids
        end = () if self._end_id is None or not ended else (self._end_id,)
        return (*self._known(whole[len(before) :]), *end)

    def spells(self, answer: str, answer_ids: Sequence[int]) -> bool:
        """Whether the ids are of this target, and say the answer, white space around it apart."""
        if min(answer_ids) < 0 or max(answer_ids) >= self._vocab_size:
            return False
        return self.decode(answer_ids).strip() == answer.strip()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def conversation(self, turns: Sequence[Turn]) -> Conversation:
        """One conversation of one or more turns; only what the target wrote counts as written.

        Raises DataError where the template rewrites earlier turns, so that they cannot be joined.
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
        """Ids of what the template writes between an answer and the next one."""
        if self._template is None:
            raise DataError("conversations of several turns need a chat template")
        before = self._template.render(messages)
        answered = {"role": "assistant", "content": turn.answer}
        after = self._template.render([*messages, answered, *following.asked])
        starts = [before + turn.answer, before + turn.answer.strip()]  # some templates trim
        start = next((start for start in starts if after.startswith(start)), None)
        if start is None:
            raise DataError(
                "the chat template rewrites earlier answers, so conversations cannot be joined; "
                "leave out --long-share"
            )
        ids = self._known(self._encoded(after[len(start) :]))
        ended = bool(turn.answer_ids) and turn.answer_ids[-1] in self._eos_ids
        return ids[1:] if ended and ids and ids[0] == turn.answer_ids[-1] else ids

    @cached_property
    def _end_id(self) -> int | None:
        """The token behind an answer: the template's, else the tokenizer's, else the lowest."""
        if self._template is not None:
            mark = "eagle3-answer"
            answered = [*as_messages("a"), {"role": "assistant", "content": mark}]
            rest = self._template.render(answered, add_generation_prompt=False).partition(mark)[2]
            if (ids := self._encoded(rest)) and ids[0] in self._eos_ids:
                return ids[0]
        token = None if self._eos_token is None else self._tokenizer.token_to_id(self._eos_token)
        return token if token is not None else min(self._eos_ids, default=None)

    def _known(self, ids: list[int]) -> list[int]:
        """`ids`; tokenizers may have tokens that the target has no embedding of."""
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise DataError(
                f"token id {highest} has no embedding: the target has {self._vocab_size} tokens"
            )
        return ids

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
