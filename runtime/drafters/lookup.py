"""Prompt lookup: the text itself as a draft. No engine, no features, no model."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from eagle3.runtime.drafters.base import DraftRequest, Int64s
from eagle3.runtime.trees.tree import Tree

MAX_NGRAM = 8
"""The longest match that is looked for, root included."""


class LookupDrafter:
    """Proposes what followed the longest earlier match of the newest tokens, as a chain.

    Nothing is proposed where even the root is new to the text. The chain is deterministic, so
    `rejection` takes it as point masses (method section 4).
    """

    name = "lookup"
    proposes = True

    def __init__(self) -> None:
        self._index = NgramIndex(MAX_NGRAM)

    def reset(self) -> None:
        """Forgets the text."""
        self._index.clear()

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Appends to the text."""
        for token in tokens.tolist():
            self._index.append(token)

    def rewind(self, num_tokens: int) -> None:
        """Drops the newest tokens of the text."""
        self._index.drop(num_tokens)

    def propose(self, request: DraftRequest) -> Tree:
        """The continuation of the match that ends in request.root."""
        tokens = self._index.continuation(request.root, request.tree.depth_in_use)
        return Tree.chain(request.root, tokens)


class NgramIndex:
    """A text and, of every n-gram in it up to `max_ngram`, where it last ended.

    The newest of several matches wins: what was said last is likeliest to be repeated, and one
    place an n-gram is all that is kept, so that neither a token nor a look-up costs more in a long
    text than in a short one. What a place replaced is kept too, so `drop` undoes `append` exactly.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self.clear()

    def clear(self) -> None:
        """The empty text."""
        self._text: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> index of its last token
        self._replaced: list[tuple[int | None, ...]] = []  # by token: the place before, by length

    def append(self, token: int) -> None:
        """One more token."""
        self._text.append(token)
        end = len(self._text) - 1
        before = []
        for ngram in self._ending_here():
            before.append(self._newest.get(ngram))
            self._newest[ngram] = end
        self._replaced.append(tuple(before))

    def drop(self, num_tokens: int) -> None:
        """The text without its newest tokens, as if they had never been there."""
        assert num_tokens <= len(self._text)
        for _ in range(num_tokens):
            for ngram, before in zip(self._ending_here(), self._replaced.pop(), strict=True):
                if before is None:
                    del self._newest[ngram]
                else:
                    self._newest[ngram] = before
            self._text.pop()

    def continuation(self, token: int, num_tokens: int) -> list[int]:
        """What would follow `token` behind the text; [] if the text never had that token.

        A copy that reaches the end of the text goes on with itself, as a text in a loop does.
        """
        self._text.append(token)
        found = next((n for n in self._ending_here()[::-1] if n in self._newest), None)
        end = len(self._text)
        if found is not None:
            period = end - 1 - self._newest[found]
            for _ in range(num_tokens):
                self._text.append(self._text[-period])
        copied = self._text[end:]
        del self._text[end - 1 :]
        return copied

    def _ending_here(self) -> list[tuple[int, ...]]:
        """The n-grams that end with the text, shortest first."""
        newest = tuple(self._text[-self._max_ngram :])
        return [newest[start:] for start in range(len(newest) - 1, -1, -1)]
