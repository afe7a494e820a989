"""Prompt to token ids: tokenizer, chat template, and the checks on what a caller sends.

A request enters here: a text, a list of chat messages, or token ids, and leaves as ids that the
target has embedding rows for (`encode_prompt`). Chat templates are code that came with a
checkpoint, so they run in jinja2's sandbox, set up as transformers does.
"""

import json
import operator
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BundleError, RequestError

TOKENIZER_NAME = "tokenizer.json"

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


def load_tokenizer(source: Bundle | str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a bundle, of a `tokenizer.json`, or of the folder that holds one.

    Truncation and padding that the file asks for are turned off: a prompt is used whole or
    refused. Raises BundleError for a file that is missing or broken.
    """
    path = _tokenizer_path(source)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BundleError(
            f"{path} is not a tokenizer that can be loaded: {error}; export the bundle again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ChatTemplate:
    """A jinja2 chat template, compiled when first used.

    `special_tokens` (`bos_token` and the like -> text) are variables of the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The text of a conversation; `extra` are further variables (`tools`, ...).

        Raises RequestError for messages that are malformed or that the template refuses, and
        BundleError for a template that does not compile or reaches out of its sandbox.
        """
        variables = {"tools": None, "documents": None, **self.special_tokens, **extra}
        checked = _checked_messages(messages)
        template = self._template
        try:
            return template.render(
                messages=checked, add_generation_prompt=add_generation_prompt, **variables
            )
        except SecurityError as error:
            raise BundleError(
                f"the chat template does what its sandbox forbids: {error}"
            ) from error
        except Exception as error:  # a template may fail in any way that Python can
            raise RequestError(
                f"the chat template cannot render these messages: {error or type(error).__name__}"
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(
                f"the chat template is broken at line {error.lineno}: {error.message}; mend it in"
                " the target's folder and export again, or pass chat=False (--raw)"
            ) from error
        except Exception as error:  # nested too deep for Python's compiler, for one
            raise BundleError(f"the chat template cannot be compiled: {error}") from error


def as_messages(prompt: str) -> list[dict[str, str]]:
    """`prompt` as a conversation of one user message."""
    return [{"role": "user", "content": prompt}]


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
        raise RequestError("the prompt is empty, it has no tokens: give at least one")
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
    """The template writes the special tokens itself, so none are added."""
    if not chat:
        raise RequestError("chat=False takes a text or token ids, the prompt is a list of messages")
    if template is None:
        raise RequestError(
            "this bundle has no chat template: pass chat=False (--raw) to send the text as it is"
        )
    return _encode(tokenizer, template.render(messages), add_special_tokens=False)


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except Exception as error:  # half a surrogate pair, for one
        raise RequestError(f"the prompt cannot be encoded: {error}") from error


def _is_messages(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the messages, each with a text as role and content."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {messages!r:.80}: give a list of one or more messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{i}] is {message!r:.80}: give an object with role and content"
            )
        for field in ("role", "content"):
            if field not in message:
                raise RequestError(f"messages[{i}] has no {field}: give it a text")
            if not isinstance(message[field], str):
                raise RequestError(f"messages[{i}].{field} is {message[field]!r:.80}: give a text")
    return [dict(message) for message in messages]


def _checked_ids(prompt: Any) -> list[int]:
    """`prompt` as Python ints; numpy's integers and arrays are welcome, booleans are not."""
    listed = isinstance(prompt, Sequence) or hasattr(prompt, "__array__")
    try:
        if not listed or isinstance(prompt, bytes | bytearray):
            raise TypeError
        items = list(prompt)  # an array without dimensions cannot be iterated
    except TypeError:
        raise RequestError(
            f"the prompt is {prompt!r:.80}: give a text, a list of messages or a list of token ids"
        ) from None
    return [_checked_id(item, i) for i, item in enumerate(items)]


def _checked_id(item: Any, i: int) -> int:
    try:
        if isinstance(item, bool):
            raise TypeError
        return operator.index(item)
    except TypeError:
        raise RequestError(f"prompt[{i}] is {item!r:.80}: give an integer token id") from None


def _check_vocabulary(ids: list[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Added tokens may lie beyond the embedding rows, where a gather would read other memory."""
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            token = tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            name = f" ({token!r})" if token is not None else ""
            raise RequestError(
                f"token id {token_id}{name} at position {i} of the prompt has no embedding: the"
                f" target's vocabulary size is {vocab_size}, ids go from 0 to {vocab_size - 1}"
            )


def _tokenizer_path(source: Bundle | str | os.PathLike[str]) -> Path:
    if isinstance(source, Bundle):
        return source.path(source.manifest.tokenizer.file)
    path = Path(source)
    return path / TOKENIZER_NAME if path.is_dir() else path


# The template's environment: what checkpoints' templates, written for transformers, rely on.


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
