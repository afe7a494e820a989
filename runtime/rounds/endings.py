"""When a request ends, and what of it may be shown: one state machine for every drafter.

Every committed token passes `commit`, in order; what a round accepted behind an ending is dropped
here and never seen again (method section 5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3.runtime.text.text_stream import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Committed:
    """What one round added: its token ids, the text that may be shown now, and how it ended."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


class TokenSequence:
    """Token ids of one request from the end of its prompt on.

    `limit`: how many tokens it may get, by max_new_tokens and by the context together.
    """

    def __init__(self, limit: int, eos_token_ids: Collection[int], text_stream: TextStream) -> None:
        self._limit, self._eos, self._text = limit, frozenset(eos_token_ids), text_stream
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None if limit > 0 else "length"

    @property
    def remaining(self) -> int:
        """How many more tokens it may get."""
        return self._limit - len(self.token_ids)

    def commit(self, tokens: Sequence[int]) -> Committed:
        """Adds tokens up to and including the one that ends the request.

        An EOS token is part of token_ids and never of the text; so is the token that completes a
        stop string, whose text ends before the string.
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
        """Ends it where it stands."""
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
