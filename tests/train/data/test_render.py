"""Rendered conversations: the ids of the template's own text, and who wrote which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.runtime.errors import DataError, RequestError
from eagle3.runtime.text.chat_template import ChatTemplate, as_messages
from eagle3.train.data.join import joined
from eagle3.train.data.render import Renderer, Turn
from eagle3.train.data.target_files import TargetTexts, read_target_texts

EOS = 1
# Ids that the template does not write: prompts and answers are told apart by their numbers. In the
# words t10 to t19 the tokenizer finds its end token, t1.
ASKED, WRITTEN = st.integers(20, 30), st.integers(31, 63)
END = st.booleans()


def words(ids: list[int]) -> str:
    return " ".join(f"t{i}" for i in ids)


def turn(prompt: list[int], answer: list[int], ended: bool, system: str | None = None) -> Turn:
    return Turn(words(prompt), words(answer), (*answer, *([EOS] if ended else [])), system)


TURNS = st.lists(
    st.builds(
        turn,
        st.lists(ASKED, min_size=1, max_size=5),
        st.lists(WRITTEN, min_size=1, max_size=5),
        END,
    ),
    min_size=1,
    max_size=5,
)


def messages_of(turns: list[Turn]) -> list[dict[str, str]]:
    said: list[dict[str, str]] = []
    for each in turns:
        if each.system is not None:
            said.append({"role": "system", "content": each.system})
        said.append({"role": "user", "content": each.prompt})
        said.append({"role": "assistant", "content": each.answer})
    return said


@settings(max_examples=40, deadline=None)
@given(turns=TURNS, system=st.none() | st.just("t40 t41"))
def test_a_conversation_is_the_templates_own_text(
    texts: TargetTexts, turns: list[Turn], system: str | None
) -> None:
    """Less what the template writes behind the last answer, which nobody reads."""
    assert texts.template is not None
    turns = [Turn(turns[0].prompt, turns[0].answer, turns[0].answer_ids, system), *turns[1:]]
    made = texts.renderer.conversation(turns)
    text = texts.template.render(messages_of(turns), add_generation_prompt=False)
    whole = texts.tokenizer.encode(text, add_special_tokens=False).ids
    assert list(made.ids) == whole[: len(made.ids)]
    assert whole[len(made.ids) :] == ([] if turns[-1].answer_ids[-1] == EOS else [EOS])


@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_written_is_what_the_target_wrote(texts: TargetTexts, turns: list[Turn]) -> None:
    """No token of a prompt or of the template, and every token of an answer, its end included."""
    made = texts.renderer.conversation(turns)
    marked = [i for i, written in zip(made.ids, made.written, strict=True) if written]
    assert marked == [i for each in turns for i in each.answer_ids]
    for i, written in zip(made.ids, made.written, strict=True):
        if i != EOS:  # the template writes it too: behind a prompt, and a cut answer
            assert written is (i > 30)


@settings(max_examples=20, deadline=None)
@given(
    talks=st.lists(TURNS, min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    limit=st.integers(1, 80),
)
def test_joining_loses_nothing(
    texts: TargetTexts, talks: list[list[Turn]], share: float, limit: int
) -> None:
    made = joined(talks, texts.renderer, share, limit, seed=3)
    answers = sorted(i for talk in talks for each in talk for i in each.answer_ids)
    kept = [(i, w) for c in made for i, w in zip(c.ids, c.written, strict=True)]
    assert sorted(i for i, written in kept if written) == answers
    assert made == joined(talks, texts.renderer, share, limit, seed=3)
    if share == 0:
        assert made == [texts.renderer.conversation(talk) for talk in talks]
    longest = max(len(texts.renderer.conversation(talk)) for talk in talks)
    ends = sum(len(talk) for talk in talks)  # a cut answer gets its end from the template
    assert max(map(len, made)) <= max(limit, longest) + ends


def test_a_system_message_is_not_joined(texts: TargetTexts) -> None:
    talks = [[turn([5], [40], True, "t9" if i % 2 else None)] for i in range(8)]
    made = joined(talks, texts.renderer, 1.0, 1000, seed=0)
    assert sorted(len(each) for each in made)[:4] == [9] * 4
    assert len(made) == 5


def test_answers_known_as_text(texts: TargetTexts) -> None:
    renderer = texts.renderer
    assert renderer.answer_ids("t5", "t40 t41") == (40, 41, EOS)
    assert renderer.answer_ids("t5", "t40 t41", ended=False) == (40, 41)
    assert renderer.spells("t40 t41 ", (40, 41)) and renderer.spells("", (EOS,))
    assert not renderer.spells("t40", (41,))
    assert not renderer.spells("t40", (40, 64)) and not renderer.spells("t40", (-1,))


def test_a_token_without_embedding_is_refused(texts: TargetTexts) -> None:
    """A tokenizer may have more tokens than the target."""
    small = Renderer(texts.tokenizer, texts.template, 40, [EOS], "t1")
    assert small.answer_ids("t5", "t39") == (39, EOS)
    with pytest.raises(DataError, match="token id 41 has no embedding"):
        small.answer_ids("t5", "t39 t41")
    turns = [turn([5], [20], True), turn([50], [21], True)]
    with pytest.raises(DataError, match="token id 50 has no embedding"):
        small.conversation(turns)


def renderer_of(template: str) -> Renderer:
    tokenizer = tiny.tiny_tokenizer(64).backend_tokenizer
    return Renderer(tokenizer, ChatTemplate(template, {}), 64, [EOS], "t1")


def test_a_template_that_trims_answers_can_be_joined() -> None:
    template = "{% for m in messages %}t3 {{ m['content'] | trim }} t1 {% endfor %}t4 "
    trimming = renderer_of(template.replace("t4 ", "{% if add_generation_prompt %}t3 {% endif %}"))
    made = trimming.conversation([Turn("t5", " t40 ", (40, EOS)), Turn("t6", "t41", (41, EOS))])
    assert made.ids == (3, 5, 1, 3, 40, 1, 3, 6, 1, 3, 41, 1)


def test_a_template_that_rewrites_answers_cannot_be_joined() -> None:
    rewriting = renderer_of("{% for m in messages %}t3 {{ m['content'] | reverse }} {% endfor %}")
    turns = [Turn("t5", "t40", (40, EOS)), Turn("t6", "t41", (41, EOS))]
    with pytest.raises(DataError, match="remove --long-share"):
        rewriting.conversation(turns)
    assert rewriting.conversation(turns[:1]).written[-2:] == (True, True)


def test_without_template_a_prompt_is_used_as_it_is(talker: Path) -> None:
    raw = read_target_texts(str(talker), raw=True)
    assert raw.template is None
    assert raw.renderer.prompt_ids("t5 t6") == (5, 6)
    assert raw.renderer.prompt_ids(as_messages("t5 t6")) == (5, 6)
    assert raw.renderer.answer_ids("t5", "t40") == (40, EOS)
    made = raw.renderer.conversation([Turn("t5", "t40", (40, EOS))])
    assert made.ids == (5, 40, EOS) and made.written == (False, True, True)
    with pytest.raises(RequestError, match="requires? a chat template"):
        raw.renderer.prompt_ids([{"role": "system", "content": "a"}, *as_messages("b")])
    with pytest.raises(DataError, match="requires? a chat template"):
        raw.renderer.conversation([Turn("t5", "t40", (40,))] * 2)


def test_the_light_texts_are_those_of_the_bundle(texts: TargetTexts, talker_bundle: Path) -> None:
    """No weight is read for them."""
    from eagle3.runtime.bundle.folder import Bundle
    from eagle3.runtime.text.tokenizer import load_tokenizer

    bundle = Bundle.open(talker_bundle)
    target: Any = bundle.manifest.target
    assert (texts.vocab_size, texts.num_layers) == (target.vocab_size, target.num_layers)
    assert texts.eos_token_ids == bundle.manifest.tokenizer.eos_token_ids
    assert texts.template is not None and texts.template.source == bundle.chat_template()
    assert texts.tokenizer.to_str() == load_tokenizer(bundle).to_str()
    assert np.isin(texts.eos_token_ids, range(texts.vocab_size)).all()
