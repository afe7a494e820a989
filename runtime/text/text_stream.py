"""Committed token ids to the text that can be shown.

The text contains complete characters only (`Detokenizer`), and nothing that may start a stop string
(`StopStrings`). A stream serves one answer and costs O(1) per token.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from eagle3.runtime.text.detokenizer import Detokenizer
from eagle3.runtime.text.stop_strings import StopStrings


class TextStream:
    """Token ids to text that can be shown: `Detokenizer`, then `StopStrings`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Return the text to show after this token, and whether a stop string ended it."""
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """End the text and return the rest of it."""
        text, _ = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()
