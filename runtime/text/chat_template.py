"""Chat messages to text, with the target's own chat template.

A chat template is code that comes with a checkpoint, so it runs in jinja2's sandbox, configured as
in transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle3.runtime.errors import BundleError, RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """A jinja2 chat template, compiled on first use.

    special_tokens: name (`bos_token`, ...) -> text, the variables of the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """Return the text of a conversation. extra: further variables (`tools`, ...).

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
            raise BundleError(f"the chat template violates its sandbox: {error}") from error
        except Exception as error:  # a template can raise any exception
            raise RequestError(
                f"the chat template cannot render these messages: {error or type(error).__name__}"
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(
                f"the chat template is broken at line {error.lineno}: {error.message}; fix it in"
                " the target's folder and export again, or pass chat=False (--raw)"
            ) from error
        except Exception as error:  # for example nested too deeply for Python's compiler
            raise BundleError(f"the chat template cannot be compiled: {error}") from error


def as_messages(prompt: str) -> list[dict[str, str]]:
    """Return `prompt` as a conversation with one user message."""
    return [{"role": "user", "content": prompt}]


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return a copy of the messages, whose role and content are checked to be strings."""
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


# The environment that chat templates written for transformers rely on.


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
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

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
    """Return JSON without the HTML escapes of jinja2's own filter."""
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
