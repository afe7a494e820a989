"""Token ids to text, one token at a time, in whole characters only."""

import codecs
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer


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
