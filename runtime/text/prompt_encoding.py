"""Prompts to token ids.

A prompt is a string, a list of chat messages, or token ids. It is checked here, and every resulting
id has an embedding row in the target.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from eagle3.runtime.errors import RequestError
from eagle3.runtime.text.chat_template import ChatTemplate, Message, as_messages

Prompt = str | Sequence[Message] | Sequence[int]


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    chat: bool,
    vocab_size: int,
) -> list[int]:
    """Token ids of a prompt, at least one, each in [0, vocab_size).

    A text is rendered by the template as one user message, or with chat=False encoded as it is,
    with the special tokens that the tokenizer adds; messages are rendered; ids are used as they
    are. Raises RequestError that names what is wrong.
    """
    if isinstance(prompt, str):
        ids = _ids_of_text(prompt, tokenizer, template, chat)
    elif _is_messages(prompt):
        ids = _ids_of_messages(prompt, tokenizer, template, chat)
    else:
        ids = _checked_ids(prompt)
    if not ids:
        raise RequestError("the prompt has no tokens: it must have at least one")
    _check_vocabulary(ids, tokenizer, vocab_size)
    return ids


def _ids_of_text(
    text: str, tokenizer: Tokenizer, template: ChatTemplate | None, chat: bool
) -> list[int]:
    if chat:
        return _ids_of_messages(as_messages(text), tokenizer, template, chat)
    return _encode(tokenizer, text, add_special_tokens=True)


def _ids_of_messages(
    messages: Any, tokenizer: Tokenizer, template: ChatTemplate | None, chat: bool
) -> list[int]:
    """Return the ids of rendered messages. The template writes the special tokens itself."""
    if not chat:
        raise RequestError("chat=False requires a string or token ids, got a list of messages")
    if template is None:
        raise RequestError(
            "this bundle has no chat template: pass chat=False (--raw) to use the raw text"
        )
    return _encode(tokenizer, template.render(messages), add_special_tokens=False)


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except Exception as error:  # for example half a surrogate pair
        raise RequestError(f"the prompt cannot be encoded: {error}") from error


def _is_messages(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def _checked_ids(prompt: Any) -> list[int]:
    """Return `prompt` as Python ints. NumPy integers and arrays are accepted, booleans are not."""
    listed = isinstance(prompt, Sequence) or hasattr(prompt, "__array__")
    try:
        if not listed or isinstance(prompt, bytes | bytearray):
            raise TypeError
        items = list(prompt)  # raises TypeError for a 0-d array
    except TypeError:
        raise RequestError(
            f"the prompt must be a string, a list of messages or a list of token ids, got"
            f" {prompt!r:.80}"
        ) from None
    return [_checked_id(item, i) for i, item in enumerate(items)]


def _checked_id(item: Any, i: int) -> int:
    try:
        if isinstance(item, bool):
            raise TypeError
        return operator.index(item)
    except TypeError:
        raise RequestError(f"prompt[{i}] must be an integer token id, got {item!r:.80}") from None


def _check_vocabulary(ids: list[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise RequestError for ids without an embedding row, where a gather reads other memory.

    Added tokens of a tokenizer can be beyond the embedding.
    """
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            token = tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            name = f" ({token!r})" if token is not None else ""
            raise RequestError(
                f"token id {token_id}{name} at position {i} of the prompt has no embedding: the"
                f" target's vocabulary size is {vocab_size}, ids go from 0 to {vocab_size - 1}"
            )
