"""Prompt lookup: the text itself is the draft. It needs no engine, no features and no model."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from eagle3.runtime.drafters.base import DraftRequest, Int64s
from eagle3.runtime.trees.tree import Tree

MAX_NGRAM = 8
"""The longest match that is searched for, root included."""


class LookupDrafter:
    """Proposes, as a chain, what followed the longest earlier match of the newest tokens.

    Nothing is proposed if even the root is new in the text. The chain is deterministic, so
    `rejection` treats its tokens as point masses (method section 4).
    """

    name = "lookup"
    proposes = True

    def __init__(self) -> None:
        self._index = NgramIndex(MAX_NGRAM)

    def reset(self) -> None:
        """Discard the text."""
        self._index.clear()

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Append tokens to the text."""
        for token in tokens.tolist():
            self._index.append(token)

    def rewind(self, num_tokens: int) -> None:
        """Drop the newest tokens of the text."""
        self._index.drop(num_tokens)

    def propose(self, request: DraftRequest) -> Tree:
        """Return the continuation of the match that ends in request.root."""
        tokens = self._index.continuation(request.root, request.tree.depth_in_use)
        return Tree.chain(request.root, tokens)


class NgramIndex:
    """A text and, for every n-gram in it up to `max_ngram`, the position where it last ended.

    Of several matches the newest wins, because recent text is most likely to repeat. Only one
    position per n-gram is kept, so that neither appending nor a lookup costs more in a longer
    text. The positions that were replaced are kept too, so that `drop` undoes `append` exactly.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self.clear()

    def clear(self) -> None:
        """Discard the text."""
        self._text: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> index of its last token
        # per token: the replaced positions, by n-gram length
        self._replaced: list[tuple[int | None, ...]] = []

    def append(self, token: int) -> None:
        """Append one token."""
        self._text.append(token)
        end = len(self._text) - 1
        before = []
        for ngram in self._ending_here():
            before.append(self._newest.get(ngram))
            self._newest[ngram] = end
        self._replaced.append(tuple(before))

    def drop(self, num_tokens: int) -> None:
        """Drop the newest tokens, as if they had never been appended."""
        assert num_tokens <= len(self._text)
        for _ in range(num_tokens):
            for ngram, before in zip(self._ending_here(), self._replaced.pop(), strict=True):
                if before is None:
                    del self._newest[ngram]
                else:
                    self._newest[ngram] = before
            self._text.pop()

    def continuation(self, token: int, num_tokens: int) -> list[int]:
        """Return what would follow `token` after the text; [] if the text does not contain the
        token.

        A copy that reaches the end of the text continues with itself, as a repeating text does.
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
        """Return the n-grams that end the text, shortest first."""
        newest = tuple(self._text[-self._max_ngram :])
        return [newest[start:] for start in range(len(newest) - 1, -1, -1)]
