"""Token ids to text, one token at a time, in complete characters only.

A detokenizer serves one answer and costs O(1) per token.
"""

import codecs
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer


class Detokenizer:
    """Incremental `tokenizer.decode(ids)` that skips special tokens.

    For ids of valid text, the concatenation of all pushes equals the decoded whole. Bytes that are
    not valid UTF-8 become U+FFFD as soon as that is certain.
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
        """Return the text that `token_id` completes; "" for special tokens and partial
        characters.
        """
        return "" if token_id in self._special else self._decode.push(int(token_id))

    def flush(self) -> str:
        """End the text. An incomplete character is dropped, so the result is always ""."""
        self._decode.drop()
        return ""


class _Decode(Protocol):
    def push(self, token_id: int) -> str:
        """Return the newly completed text."""

    def drop(self) -> None:
        """Discard the incomplete character."""


class _ByteLevelDecode:
    """GPT-2 style vocabularies: a token is a byte string, and text is their concatenation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token = tokenizer.id_to_token
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        return "" if token is None else self._utf8.decode(_bytes_from_token(token))

    def drop(self) -> None:
        self._utf8.reset()


class _WindowDecode:
    """Any other decoder: the text of a token is what it adds after the tokens before it.

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
        """Return the number of byte tokens, up to `token_id`, that start an incomplete
        character.
        """
        byte = _byte_from_token(self._tokenizer.id_to_token(token_id))
        if byte is None:
            self._utf8.reset()
            return 0
        self._utf8.decode(byte)
        return len(self._utf8.getstate()[0])

    def _text_of(self, ready: list[int]) -> str:
        """Return the text that `ready` adds after the context, and update the context."""
        before = self._tokenizer.decode(self._context)
        both = self._tokenizer.decode(self._context + ready)
        alone = self._tokenizer.decode(ready)
        # Without text in the context, the next token would be decoded first and lose its space.
        self._context = ready if alone else (self._context + ready)[-4:]
        # For one invalid byte, ByteFallback replaces the whole run of byte tokens, even in the
        # context.
        return both[len(before) :] if both.startswith(before) else alone


def _decoder_kinds(decoder: Any) -> set[str]:
    """Return the types of a decoder's parts; empty if there is no decoder or it has no state."""
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # no decoder, or one written in Python without state
        return set()
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_alphabet() -> dict[str, int]:
    """Return the map from the characters of a byte-level vocabulary to bytes.

    Printable Latin-1 characters map to their own byte, U+0100 onwards to the other 68 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _bytes_from_token(token: str) -> bytes:
    """Return the bytes of a byte-level token. An added token outside the alphabet is plain text."""
    try:
        return bytes(_BYTE_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_from_token(token: str | None) -> bytes | None:
    """Return the byte of a fallback token such as `<0xE2>`, otherwise None."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token or "")
    return bytes.fromhex(match[1]) if match else None
