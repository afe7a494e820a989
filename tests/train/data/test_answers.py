"""The journal: what is finished stays, whatever happens; and how a prompt is answered."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.runtime.errors import DataError
from eagle3.runtime.ort.batch_engine import BatchAnswer, BatchEngine, BatchRequest
from eagle3.train.data.answers import NAME, answer_of, finished, write_answers, write_given
from eagle3.train.data.entries import Answer, Entry
from eagle3.train.data.target_files import TargetTexts
from eagle3.train.data.tasks import Task, draw_of, tasks_of
from eagle3.train.jobs import journal as journal_module
from eagle3.train.jobs.journal import Journal, read_journals, write_json
from eagle3.train.requests.data_request import DataRequest

PROMPTS = [f"t{50 + i} t{20 + i % 7}" for i in range(12)]


def request(**options: Any) -> DataRequest:
    given = {"target": "t", "prompts": (Path("p"),), "output": Path("o"), "max_len": 96}
    return DataRequest(**{**given, "max_new_tokens": 12, **options})


def tasks(texts: TargetTexts, *entries: Entry, **options: Any) -> list[Task]:
    return tasks_of(entries or map(Entry, PROMPTS), texts.renderer, request(**options)).tasks


@pytest.fixture(scope="module")
def engine(talker_bundle: Path) -> BatchEngine:
    return BatchEngine(talker_bundle, rows=3, threads=1)


class Stopping:
    """An engine that raises after some answers."""

    def __init__(self, engine: BatchEngine, count: int, error: BaseException) -> None:
        self._engine, self._count, self._error = engine, count, error

    def generate(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        for number, answer in enumerate(self._engine.generate(requests)):
            if number == self._count:
                raise self._error
            yield answer


# Journals


def test_a_torn_line_is_cut_off_and_counts_for_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path, "j") as journal:
        for number in range(3):
            journal.append({"n": number, "text": "ü\n\u2028"})
    whole = journal.path.read_bytes()
    assert [row["n"] for row in read_journals(tmp_path, "j")] == [0, 1, 2]
    for cut in (1, 2, 5, 10):
        journal.path.write_bytes(whole[:-cut])
        assert [row["n"] for row in read_journals(tmp_path, "j")] == [0, 1]
        assert journal.path.read_bytes() == whole[:-cut], "reading writes nothing"
        with Journal(tmp_path, "j") as again:
            again.append({"n": 2, "text": "ü\n\u2028"})
        assert journal.path.read_bytes() == whole


def test_the_journals_of_all_processes_are_read(tmp_path: Path) -> None:
    for rank in (0, 1, 11):
        with Journal(tmp_path, "j", rank) as journal:
            journal.append({"rank": rank})
    with Journal(tmp_path, "other") as journal:
        journal.append({"rank": 5})
    assert sorted(row["rank"] for row in read_journals(tmp_path, "j")) == [0, 1, 11]
    assert {path.name for path in tmp_path.glob("j*")} == {"j.jsonl", "j.1.jsonl", "j.11.jsonl"}


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "j.jsonl").write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(DataError, match=r"j\.jsonl, line 2 is damaged"):
        list(read_journals(tmp_path, "j"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"), Journal(tmp_path / "none", "j"):
        pass
    with pytest.raises(DataError, match="cannot be written"):
        write_json(tmp_path / "none" / "a.json", {})


# How a prompt is answered


def test_temperature_and_seed_are_of_the_text() -> None:
    draws = {prompt: draw_of(prompt, (0.0, 0.7, 1.0), 0) for prompt in map(str, range(300))}
    assert len({seed for _, seed in draws.values()}) == 300
    for temperature in (0.0, 0.7, 1.0):
        assert 60 < sum(t == temperature for t, _ in draws.values()) < 140
    other = {prompt: draw_of(prompt, (0.0, 0.7, 1.0), 1) for prompt in draws}
    assert sum(draws[p][0] == other[p][0] for p in draws) < 200
    assert draws["0"] == draw_of("0", (0.0, 0.7, 1.0), 0)


def test_what_is_too_long_or_refused_is_counted(texts: TargetTexts) -> None:
    entries = [
        Entry(" ".join(["t5"] * 77)),  # 80 with the template: just fits 96 less 16
        Entry(" ".join(["t5"] * 78)),
        Entry("t6", Answer("t40", (41,))),
        Entry("t7", Answer("t40", (64,))),
        Entry("t8", Answer("t40", (40,))),
        Entry("t9", Answer("t40 " * 100)),  # an answer may be cut by the trainer
    ]
    made = tasks_of(entries, texts.renderer, request())
    assert [task.entry.prompt for task in made.tasks] == [entries[0].prompt, "t8", "t9"]
    assert made.too_long == 1 and sum(made.refused.values()) == 2
    assert made.tasks[0].max_new_tokens == 12
    assert tasks(texts, entries[0], max_new_tokens=288)[0].max_new_tokens == 16


def test_answers_are_the_same_in_any_order(
    texts: TargetTexts, engine: BatchEngine, tmp_path: Path
) -> None:
    every = tasks(texts)
    for name, some in (("a", every), ("b", every[::-1])):
        (tmp_path / name).mkdir()
        write_answers(tmp_path / name, some, engine, texts.renderer)
    rows = finished(tmp_path / "a")
    assert rows == finished(tmp_path / "b") and len(rows) == len(PROMPTS)
    assert {row["temperature"] for row in rows.values()} == {0.0, 0.7, 1.0}
    assert len({row["seed"] for row in rows.values()}) == len(PROMPTS)
    for task in every:
        row = rows[task.entry.id]
        assert task.is_done(row) and row["prompt"] == task.entry.prompt
        assert len(row["answer_ids"]) == 12 or (row["ended"] and row["answer_ids"][-1] == 1)
        answer = answer_of(task, rows)
        assert answer.ids is not None and texts.renderer.spells(answer.text, answer.ids)


def test_other_options_ask_for_other_answers(texts: TargetTexts, engine: BatchEngine) -> None:
    (task,) = tasks(texts, Entry("t5"))
    row = task.row(Answer("t40", (40,), False))
    assert task.is_done(row) and not task.is_done(None)
    for other in ({"seed": 1}, {"max_new_tokens": 13}, {"temperatures": (0.5,)}):
        assert not tasks(texts, Entry("t5"), **other)[0].is_done(row)
    (given,) = tasks(texts, Entry("t5", Answer("t40", (40,), False)))
    assert not given.is_done(row) and not task.is_done(given.row(Answer("t40", (40,), False)))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("killed")])
def test_what_was_answered_before_a_stop_stays(
    texts: TargetTexts, engine: BatchEngine, tmp_path: Path, error: BaseException
) -> None:
    every = tasks(texts)
    with pytest.raises(type(error)):
        write_answers(tmp_path, every, Stopping(engine, 5, error), texts.renderer)
    assert len(finished(tmp_path)) == 5
    list(engine.generate([]))  # it was let go of


def test_a_full_disk_says_what_is_kept(
    texts: TargetTexts,
    engine: BatchEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fourth line is written in part, as a full disk does it."""
    write, left = journal_module.write_whole, [3]

    def full(file: Any, data: bytes) -> None:
        if not left[0]:
            write(file, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        write(file, data)

    monkeypatch.setattr(journal_module, "write_whole", full)
    every = tasks(texts)
    with pytest.raises(
        DataError, match="No space left on device; its earlier lines are kept, 3 of them"
    ):
        write_answers(tmp_path, every, engine, texts.renderer)
    assert len(finished(tmp_path)) == 3
    left[0] = 100
    missing = [task for task in every if task.entry.id not in finished(tmp_path)]
    write_answers(tmp_path, missing, engine, texts.renderer)
    assert len(finished(tmp_path)) == len(PROMPTS)
    for line in (tmp_path / "conversations.jsonl").read_text().splitlines():
        json.loads(line)


def test_given_answers_go_to_the_journal_once(texts: TargetTexts, tmp_path: Path) -> None:
    some = tasks(texts, Entry("t5", Answer("t40"), source="s"), Entry("t6"))
    for _ in range(2):
        write_given(tmp_path, some, finished(tmp_path))
    (row,) = read_journals(tmp_path, "conversations")
    assert row["answer_ids"] == [40, 1] and row["seed"] is None and row["source"] == "s"
    changed = tasks(texts, Entry("t5", Answer("t41"), source="s"))
    write_given(tmp_path, changed, finished(tmp_path))
    assert answer_of(changed[0], finished(tmp_path)).ids == (41, 1)


def test_the_line_that_fits_wins_over_another_process_s(texts: TargetTexts, tmp_path: Path) -> None:
    earlier = tasks(texts, Entry("t5"), seed=1)
    now = tasks(texts, Entry("t5"), seed=2)
    key = now[0].entry.id
    for rank, (task, answer) in enumerate(((earlier[0], 40), (now[0], 41))):
        with Journal(tmp_path, NAME, rank) as journal:
            journal.append(task.row(Answer("t40", (answer,))))
    assert answer_of(now[0], finished(tmp_path, now)).ids == (41,)
    assert answer_of(earlier[0], finished(tmp_path, earlier)).ids == (40,)
    assert finished(tmp_path).keys() == {key}


def test_a_line_without_an_answer_is_named(texts: TargetTexts) -> None:
    (task,) = tasks(texts, Entry("t5"))
    with pytest.raises(DataError, match=f"conversation {task.entry.id} has no answer"):
        answer_of(task, {task.entry.id: {"id": task.entry.id, "answer": "a"}})
