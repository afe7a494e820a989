"""Prompts: templates as transformers renders them, and every malformed request by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import Manifest
from eagle3.runtime.errors import BundleError, RequestError
from eagle3.runtime.text.chat_template import ChatTemplate, as_messages
from eagle3.runtime.text.prompt_encoding import encode_prompt
from eagle3.runtime.text.tokenizer import load_tokenizer

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA_STYLE = """{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(last='') %}
{%- for message in messages %}
    {%- if (message.role == 'user') == (ns.last == 'user') %}
        {{- raise_exception('roles must alternate, not ' ~ message.role) }}
    {%- endif %}
    {%- set ns.last = message.role %}
    {{- '[' + message.role + '] ' + message.content | trim }}
    {%- if message.role == 'assistant' %}{{- eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %} [assistant]{% endif %}
"""

TRICKS = """{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
{% generation %}{% set inner = 'kept inside' %}{{ message.content }} {{ inner }}{% endgeneration %}
{{ inner is defined }} {{ {'b': "<é & '", 'a': [1, none]} | tojson }}
{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}
    {%- if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{{ documents is none }} {{ strftime_now('%Y')[:2] }} {{ nothing }}{{ extra_flag }}
"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DIALOGUE = [
    {"role": "user", "content": "  Hi <b> & 日本 😀\n"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]


def make_tokenizer(add_bos: bool = False) -> Tokenizer:
    """A word-level vocabulary: [UNK] 0, <s> 1, </s> 2, then words; <far> has the id 9."""
    words = ["[UNK]", "<s>", "</s>", "hi", "why", "user", "assistant", "[", "]"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<far>")])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


@pytest.mark.parametrize("source", [CHATML, LLAMA_STYLE, TRICKS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [DIALOGUE, DIALOGUE[:1]])
def test_renders_as_transformers_does(
    source: str, add_generation_prompt: bool, messages: list[dict[str, str]]
) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), chat_template=source, **SPECIAL
    )
    for extra in ({}, {"tools": [{"type": "function", "x": "<&>"}]}, {"extra_flag": True}):
        expected = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **extra
        )
        ours = ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt, **extra)
        assert ours == expected


def test_render_by_hand() -> None:
    template = ChatTemplate(LLAMA_STYLE, SPECIAL)
    assert template.render(DIALOGUE) == (
        "<s>[user] Hi <b> & 日本 😀[assistant] Hello</s>[user] Why? [assistant]"
    )
    assert template.render(DIALOGUE[:1], add_generation_prompt=False).endswith("😀")


def test_skipped_messages_and_extra_variables() -> None:
    source = "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{{ m.content }}"
    template = ChatTemplate(source + "{% endfor %}{{ name }}", {"name": "special"})
    messages = [{"role": "x", "content": "a"}, {"role": "y", "content": "b", "name": "n"}]
    assert template.render(messages) == "bspecial"
    assert template.render(messages, name="extra") == "bextra"


def test_a_broken_template_is_found_at_first_use() -> None:
    template = ChatTemplate("line\n{% for %}", {})
    with pytest.raises(BundleError, match="the chat template is broken at line 2: .*--raw"):
        template.render(DIALOGUE)
    with pytest.raises(BundleError, match="broken at line 1: No filter named 'nope'"):
        ChatTemplate("{{ 1 | nope }}", {}).render(DIALOGUE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{{ messages[0].gone.deeper }}", "has no attribute 'gone'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ nothing + 'x' }}", "'nothing' is undefined"),
    ],
)
def test_a_template_that_refuses_the_messages(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"cannot render these messages: .*{message}"):
        ChatTemplate(source, {}).render(DIALOGUE)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(BundleError, match="violates its sandbox"):
        ChatTemplate(source, {}).render(DIALOGUE)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is \[\]: give a list of one or more"),
        ("hi", r"messages is 'hi': give a list"),
        ({"role": "user"}, r"messages is \{'role': 'user'\}: give a list"),
        (None, r"messages is None: give a list"),
        ([DIALOGUE[0], "hi"], r"messages\[1\] is 'hi': give an object with role and content"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([DIALOGUE[0], {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role is 3: give a text"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is None: give a text"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\].content is \[\{'text'"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(CHATML, {}).render(messages)


def test_as_messages() -> None:
    assert as_messages("hi") == [{"role": "user", "content": "hi"}]


WRAP = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"


def encode(prompt: Any, **changes: Any) -> list[int]:
    arguments = {
        "tokenizer": make_tokenizer(add_bos=True),
        "template": ChatTemplate(WRAP, SPECIAL),
        "chat": True,
        "vocab_size": 9,
    }
    return encode_prompt(prompt, **(arguments | changes))


def test_a_text_through_the_template_gets_no_second_bos() -> None:
    assert encode("hi why") == [1, 3, 4, 2]
    assert encode(as_messages("hi why")) == [1, 3, 4, 2]


def test_a_raw_text_gets_the_tokenizers_special_tokens() -> None:
    assert encode("hi why", chat=False, template=None) == [1, 3, 4]
    assert encode("", chat=False) == [1]  # the tokenizer's BOS is a token
    assert encode("hi", chat=False, tokenizer=make_tokenizer()) == [3]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "ids", [[3, 0, 8], (3, 0, 8), np.array([3, 0, 8]), [np.int64(3), np.uint8(0), 8]]
)
def test_ids_are_used_as_they_are(ids: Any, chat: bool) -> None:
    result = encode(ids, chat=chat, template=None)
    assert result == [3, 0, 8]
    assert {type(token) for token in result} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3, 9], r"token id 9 \('<far>'\) at position 1 .* vocabulary size is 9, .* 0 to 8"),
        ([-1], r"token id -1 at position 0"),
        ([2**70], r"token id 1180591620717411303424 at position 0"),
        ("hi <far>", r"token id 9 \('<far>'\) at position 2"),
        ([True], r"prompt\[0\] must be an integer token id, got True"),
        ([np.bool_(True)], r"prompt\[0\] must be an integer token id, got .*True.*"),
        ([3, 1.0], r"prompt\[1\] must be an integer token id, got 1.0"),
        ([3, "hi"], r"prompt\[1\] must be an integer token id, got 'hi'"),
        ([np.array([1, 2])], r"prompt\[0\] must be an integer token id, got array\(\[1, 2\]\)"),
        ([], r"the prompt has no tokens"),
        (np.array([], dtype=np.int64), r"the prompt has no tokens"),
        (np.array(3), r"the prompt must be a string, .*, got array\(3\)"),
        (b"hi", r"the prompt must be a string, .*, got b'hi'"),
        (None, r"the prompt must be a string, .*, got None"),
        (3, r"the prompt must be a string, .*, got 3"),
        (
            {"role": "user", "content": "hi"},
            r"the prompt must be a string, .*, got \{'role': 'user'.*",
        ),
        ({3, 4}, r"the prompt must be a string, .*, got \{3, 4\}"),
        ([{"role": "user", "content": "hi"}, 3], r"messages\[1\] is 3: give an object"),
        ("half a pair \ud800", r"the prompt cannot be encoded"),
    ],
)
def test_a_bad_prompt_is_named(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode(prompt)


def test_an_empty_text_without_bos_is_empty() -> None:
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        encode("", chat=False, tokenizer=make_tokenizer())
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        encode("hi", template=ChatTemplate("", {}))


def test_chat_without_template_tells_the_way_out() -> None:
    for prompt in ("hi", as_messages("hi")):
        with pytest.raises(RequestError, match=r"no chat template: pass chat=False \(--raw\)"):
            encode(prompt, template=None)
    with pytest.raises(RequestError, match="chat=False requires a string or token ids"):
        encode(as_messages("hi"), chat=False)


def test_load_tokenizer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, str(tmp_path / "tokenizer.json")):
        assert load_tokenizer(source).encode("hi why hi").ids == [3, 4, 3]


def test_load_tokenizer_of_a_bundle(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "words.json"))
    manifest = SimpleNamespace(tokenizer=SimpleNamespace(file="words.json"), files={"words.json"})
    assert load_tokenizer(Bundle(tmp_path, cast(Manifest, manifest))).encode("hi").ids == [3]


@pytest.mark.parametrize("content", [None, "", "{}", "[1", json.dumps({"model": 3})])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BundleError, match="tokenizer.json is not a valid tokenizer"):
        load_tokenizer(path)
