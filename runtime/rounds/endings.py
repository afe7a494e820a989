"""When a request ends, and which part of its text can be shown: one state machine for every
drafter.

Every committed token passes through `commit`, in order. Tokens that a round accepted after an
ending are dropped here (method section 5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3.runtime.text.text_stream import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Committed:
    """What one round added: token ids, the text that can be shown now, and the reason
    if it ended.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


class TokenSequence:
    """The generated token ids of one request.

    limit: maximum number of tokens, from max_new_tokens and from the context.
    """

    def __init__(self, limit: int, eos_token_ids: Collection[int], text_stream: TextStream) -> None:
        self._limit, self._eos, self._text = limit, frozenset(eos_token_ids), text_stream
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None if limit > 0 else "length"

    @property
    def remaining(self) -> int:
        """The number of tokens that can still be generated."""
        return self._limit - len(self.token_ids)

    def commit(self, tokens: Sequence[int]) -> Committed:
        """Add tokens up to and including the one that ends the request.

        An EOS token is part of token_ids but never of the text. The token that completes a stop
        string is part of token_ids too; the text ends before the stop string.
        """
        shown: list[str] = []
        first = len(self.token_ids)
        for token in tokens:
            shown.append(self._add(token))
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None:
            shown.append(self._text.flush())
        return Committed(tuple(self.token_ids[first:]), "".join(shown), self.finish_reason)

    def cancel(self) -> Committed:
        """End the request at its current length."""
        self.finish_reason = "cancelled"
        return Committed((), self._text.flush(), "cancelled")

    def _add(self, token: int) -> str:
        self.token_ids.append(token)
        if token in self._eos:
            self.finish_reason = "stop"
            return ""
        text, stopped = self._text.push(token)
        if stopped:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return text
