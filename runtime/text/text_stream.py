"""Tokens to text, one token at a time, and the strings that end a request.

The round loop commits token ids; `TextStream` turns them into the text that may be shown: whole
characters only (`Detokenizer`), and nothing that may yet be the start of a stop string
(`StopStrings`). Each object serves one answer and costs O(1) a token, whatever came before.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from eagle3.runtime.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 512


class Detokenizer:
    """Incremental `tokenizer.decode(ids)`, special tokens skipped.

    For ids of valid text, all pushes joined equal the decoded whole. Where the ids hold bytes
    that are no UTF-8, each fault becomes U+FFFD as soon as it is certain.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        kinds = _decoder_kinds(tokenizer.decoder)
        self._decode: _Decode
        if kinds and kinds <= {"ByteLevel", "Fuse"}:
            self._decode = _ByteLevelDecode(tokenizer)
        else:
            self._decode = _WindowDecode(tokenizer)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty for a special token or part of a character."""
        return "" if token_id in self._special else self._decode.push(int(token_id))

    def flush(self) -> str:
        """The end: what was held is part of a character and is dropped, so this is empty."""
        self._decode.drop()
        return ""


class _Decode(Protocol):
    def push(self, token_id: int) -> str:
        """The newly complete text."""

    def drop(self) -> None:
        """Forget what is held."""


class _ByteLevelDecode:
    """GPT-2 style vocabularies: a token is a string of bytes, and text is their concatenation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token = tokenizer.id_to_token
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        return "" if token is None else self._utf8.decode(_bytes_from_token(token))

    def drop(self) -> None:
        self._utf8.reset()


class _WindowDecode:
    """Any other decoder: what a token adds to the text is seen behind the tokens before it.

    Decoders treat the first token apart (a leading space goes), so new tokens are decoded behind
    the few before them, `context`. A character that is spelled in byte tokens (`<0xE2>`) is held
    until its last byte: at most 3 tokens are in `held`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        num_ready = len(self._held) - self._num_bytes_open(token_id)
        ready, self._held = self._held[:num_ready], self._held[num_ready:]
        return self._text_of(ready) if ready else ""

    def drop(self) -> None:
        self._utf8.reset()
        self._held = []

    def _num_bytes_open(self, token_id: int) -> int:
        """Byte tokens at the end, this one included, that are the start of a character."""
        byte = _byte_from_token(self._tokenizer.id_to_token(token_id))
        if byte is None:
            self._utf8.reset()
            return 0
        self._utf8.decode(byte)
        return len(self._utf8.getstate()[0])

    def _text_of(self, ready: list[int]) -> str:
        """What `ready` adds behind the context, which it then replaces."""
        before = self._tokenizer.decode(self._context)
        both = self._tokenizer.decode(self._context + ready)
        alone = self._tokenizer.decode(ready)
        # A context without text would leave the next token first, and cost it its leading space.
        self._context = ready if alone else (self._context + ready)[-4:]
        # ByteFallback spoils a whole run of byte tokens for one bad byte, context included.
        return both[len(before) :] if both.startswith(before) else alone


class StopStrings:
    """Holds back text that may be the start of a stop string, and ends at the first one whole.

    The result does not depend on how the text is cut into pushes: the stop string that is complete
    first wins, and of two that end together the longer. Raises RequestError for stop strings that
    are empty, not text, longer than MAX_STOP_CHARS or more than MAX_STOPS.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = _checked_stops(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string was met; from then on nothing is emitted."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is now certain to be shown, and whether a stop string ended it."""
        if self.stopped:
            return "", True
        text = self._held + text
        start = self._first_match(text)
        self.stopped = start is not None
        end = len(text) - self._num_open(text) if start is None else start
        self._held = "" if self.stopped else text[end:]
        return text[:end], self.stopped

    def flush(self) -> str:
        """The end of the text: what was held started no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the match that is complete first starts."""
        found = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(start + size, start) for start, size in found if start >= 0]
        return min(matches)[1] if matches else None

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that is a start of a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


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


def _decoder_kinds(decoder: Any) -> set[str]:
    """The types of a decoder's parts, empty for none or for one that does not tell."""
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # no decoder, or one written in Python, which has no state to read
        return set()
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary -> the byte.

    Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _bytes_from_token(token: str) -> bytes:
    """Bytes of a byte-level token; an added token outside the alphabet is plain text."""
    try:
        return bytes(_BYTE_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_from_token(token: str | None) -> bytes | None:
    """The byte of a fallback token `<0xE2>`, else None."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token or "")
    return bytes.fromhex(match[1]) if match else None


def _checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stops, str | bytes) or not isinstance(stops, Sequence):
        raise RequestError(f"stop is {stops!r:.80}: give a list of texts")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings: give at most {MAX_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise RequestError(f"stop[{i}] is {stop!r:.80}: give a text")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(f"stop[{i}] has {len(stop)} characters: give 1 to {MAX_STOP_CHARS}")
    return tuple(stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper start of `stop` that `text` ends with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start
