"""Tokens to text, one token at a time, and the strings that end a request.

The round loop commits token ids; `TextStream` turns them into the text that may be shown: whole
characters only (`Detokenizer`), and nothing that may yet be the start of a stop string
(`StopStrings`). Each object serves one answer and costs O(1) a token, whatever came before.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from eagle3.runtime.text.detokenizer import Detokenizer
from eagle3.runtime.text.stop_strings import StopStrings


class TextStream:
    """Token ids to text that may be shown: `Detokenizer`, then `StopStrings`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text to show after this token, and whether a stop string ended it."""
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The rest of the text, once no token follows."""
        text, _ = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()
