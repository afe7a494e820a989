"""Prompts that the target makes up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import tiny

from eagle3.runtime.errors import DataError
from eagle3.runtime.ort.batch_engine import BatchAnswer, BatchEngine, BatchRequest
from eagle3.runtime.text.chat_template import ChatTemplate
from eagle3.train.data.synthesize import UserTurn, chosen, synthesize, text_of, user_turn
from eagle3.train.data.target_files import TargetTexts
from eagle3.train.jobs.processes import Processes


class Scripted:
    """An engine that says what it is told, last request first."""

    def __init__(self, answers: dict[int, tuple[int, ...]], stop_after: int = 1000) -> None:
        self._answers, self._stop_after = answers, stop_after
        self.asked: list[BatchRequest] = []

    def generate(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        every = list(requests)
        self.asked += every
        for number, request in enumerate(reversed(every)):
            if number == self._stop_after:
                raise KeyboardInterrupt
            ids = self._answers.get(int(request.key), ())
            yield BatchAnswer(request.key, ids, "eos")


@pytest.fixture(scope="module")
def turn(texts: TargetTexts) -> UserTurn:
    assert texts.template is not None
    return user_turn(texts.tokenizer, texts.template, texts.eos_token_ids)


def made(
    folder: Path, texts: TargetTexts, turn: UserTurn, engine: Scripted | BatchEngine, count: int
) -> list[str]:
    return synthesize(folder, count, 0, turn, texts.tokenizer, lambda: engine, Processes())


def words(*ids: int) -> str:
    return " ".join(f"t{i}" for i in ids)


def test_the_template_up_to_the_users_text(texts: TargetTexts, turn: UserTurn) -> None:
    assert turn == UserTurn((3,), "", frozenset({1}))
    system = ChatTemplate("t2 t9 t1 {% for m in messages %}t3 {{ m.content }} t8 {% endfor %}", {})
    assert user_turn(texts.tokenizer, system, [1]) == UserTurn((2, 9, 1, 3), "t8", frozenset({1}))


@pytest.mark.parametrize("template", ["{{ messages[0].content }} t1", "t3", "{{ 'x' }}"])
def test_a_template_without_a_beginning(texts: TargetTexts, template: str) -> None:
    with pytest.raises(DataError, match="remove --synthesize"):
        user_turn(texts.tokenizer, ChatTemplate(template, {}), [1])


def test_the_text_ends_where_the_turn_does(texts: TargetTexts, turn: UserTurn) -> None:
    assert text_of((5, 6, 1), texts.tokenizer, turn) == "t5 t6"
    assert text_of((5, 6), texts.tokenizer, turn) == "t5 t6"
    assert text_of((1,), texts.tokenizer, turn) == ""
    other = UserTurn((3,), "t8", frozenset({1}))
    assert text_of((5, 8, 6, 1), texts.tokenizer, other) == "t5"
    assert text_of((5, 1, 6), texts.tokenizer, other) == "", "special tokens inside"


def test_short_and_repeated_texts_are_left_out() -> None:
    texts = {3: "long enough", 0: "short", 1: "also long enough", 2: "long  enough", 4: "one more!"}
    assert chosen(texts, 9) == ["also long enough", "long  enough", "one more!"]
    assert chosen(texts, 2) == ["also long enough", "long  enough"]


def test_it_tries_until_there_are_enough(
    tmp_path: Path, texts: TargetTexts, turn: UserTurn
) -> None:
    engine = Scripted({0: (5, 6, 7, 1), 2: (5, 6, 7), 3: (8, 9, 20), 4: (31, 32, 33)})
    prompts = [words(5, 6, 7), words(8, 9, 20), words(31, 32, 33)]
    assert made(tmp_path, texts, turn, engine, 3) == prompts
    assert [r.key for r in engine.asked] == list("01234")
    assert len({r.params.seed for r in engine.asked}) == len(engine.asked)
    assert all(r.prompt_ids == (3,) and r.params.temperature == 1 for r in engine.asked)
    again = Scripted({})
    assert made(tmp_path, texts, turn, again, 3)[0] == words(5, 6, 7)
    assert not again.asked, "nothing is sampled twice"


def test_it_gives_up_after_four_tries_each(
    tmp_path: Path, texts: TargetTexts, turn: UserTurn
) -> None:
    said: list[str] = []
    engine = Scripted({7: (5, 6, 7)})
    prompts = synthesize(
        tmp_path, 3, 0, turn, texts.tokenizer, lambda: engine, Processes(), said.append
    )
    assert prompts == ["t5 t6 t7"] and len(engine.asked) == 12
    assert said[-1] == "synthesized 1 of 3 requested prompts in 12 tries"


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_stopped_run_goes_on(
    tmp_path: Path, texts: TargetTexts, turn: UserTurn, stop: int
) -> None:
    answers = {n: (5 + n % 3, 20 + n, 7) for n in range(20)}
    whole = made(_folder(tmp_path / "whole"), texts, turn, Scripted(answers), 4)
    folder = _folder(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        made(folder, texts, turn, Scripted(answers, stop_after=stop), 4)
    with (folder / "synthesized.jsonl").open("a") as file:
        file.write('{"try": 3, "te')
    assert made(folder, texts, turn, Scripted(answers), 4) == whole


def test_another_seed_makes_other_prompts(
    tmp_path: Path, texts: TargetTexts, turn: UserTurn, talker_bundle: Path
) -> None:
    engine = BatchEngine(talker_bundle, rows=4, threads=1)
    first = made(tmp_path, texts, turn, engine, 6)
    second = synthesize(tmp_path, 6, 1, turn, texts.tokenizer, lambda: engine, Processes())
    assert first and second and not set(first) & set(second)
    assert made(tmp_path, texts, turn, Scripted({}), 6) == first
    for line in (tmp_path / "synthesized.jsonl").read_text().splitlines():
        assert set(json.loads(line)) == {"try", "seed", "text"}
    assert all(len(text) >= 8 for text in first + second)


def test_a_line_that_is_no_try(tmp_path: Path, texts: TargetTexts, turn: UserTurn) -> None:
    (tmp_path / "synthesized.jsonl").write_text('{"try": 0}\n')
    with pytest.raises(DataError, match="lacks try, seed or text"):
        made(tmp_path, texts, turn, Scripted({}), 1)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_tiny_template_has_no_prompt_to_begin_from() -> None:
    """The plain tiny template begins with the role, as a real one with its marks."""
    tokenizer = tiny.tiny_tokenizer(64).backend_tokenizer
    turn = user_turn(tokenizer, ChatTemplate(tiny.TEMPLATE, {}), [1])
    assert turn.before_ids == (0,) and turn.after == ""
