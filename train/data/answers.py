"""The target answers what has no answer yet; every finished one is a line of the journal.

    conversations.jsonl     id, source, license, before?, prompt, temperature, seed,
                            max_new_tokens, ended, answer, answer_ids

`before`: the messages before the prompt, where there are any; `seed` and `max_new_tokens` are null
for an answer that came with its prompt. The same id again replaces the line before (`finished`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from eagle3.runtime.errors import DataError
from eagle3.runtime.ort.batch_engine import BatchAnswer, BatchRequest
from eagle3.train.data.entries import Answer
from eagle3.train.data.render import Renderer
from eagle3.train.data.tasks import Task
from eagle3.train.jobs.journal import Journal, read_journals
from eagle3.train.jobs.progress import Progress, Report

NAME = "conversations"


class Generating(Protocol):
    """What `BatchEngine` does."""

    def generate(self, requests: Iterable[BatchRequest]) -> Any:
        """Yields a BatchAnswer for each request, in no order."""


def finished(folder: Path, tasks: Iterable[Task] = ()) -> dict[str, dict[str, Any]]:
    """The journals' lines by id, those of every process and earlier run.

    Of several with one id, the last; but one that is what `tasks` would make comes first, as
    another process's journal may hold what was asked for earlier. Raises DataError.
    """
    wanted = {task.entry.id: task for task in tasks}
    rows: dict[str, dict[str, Any]] = {}
    for row in read_journals(folder, NAME):
        key = str(row.get("id"))
        task = wanted.get(key)
        if task is None or task.is_done(row) or not task.is_done(rows.get(key)):
            rows[key] = row
    return rows


def write_given(folder: Path, tasks: Iterable[Task], known: Mapping[str, Any]) -> None:
    """Puts conversations that came with their answers into the journal. Raises DataError."""
    with Journal(folder, NAME) as journal:
        for task in tasks:
            if task.entry.answer is not None and not task.is_done(known.get(task.entry.id)):
                journal.append(task.row(task.entry.answer))


def write_answers(
    folder: Path,
    tasks: Sequence[Task],
    engine: Generating,
    renderer: Renderer,
    rank: int = 0,
    report: Report = lambda _: None,
) -> None:
    """Answers `tasks` into the journal of process `rank`.

    Raises DataError when the disk is full and EngineError when the target fails; what was answered
    before stays, as it does on Ctrl-C.
    """
    by_id = {task.entry.id: task for task in tasks}
    progress = Progress("answers", len(tasks), report, unit="prompts")
    num_tokens = 0
    answers = engine.generate(task.request() for task in tasks)
    with Journal(folder, NAME, rank) as journal, closing(answers):
        answer: BatchAnswer
        for answer in answers:
            text = renderer.decode(answer.token_ids)
            ended = answer.finish_reason == "stop"
            row = by_id[answer.key].row(Answer(text, answer.token_ids, ended))
            journal.append(row)
            num_tokens += len(answer.token_ids)
            progress.add(1, f", {num_tokens / max(progress.seconds, 1e-9):,.0f} tok/s")


def answer_of(task: Task, known: Mapping[str, Mapping[str, Any]]) -> Answer:
    """The answer of a finished task. Raises DataError for a line without one."""
    row = known[task.entry.id]
    try:
        ids = tuple(map(int, row["answer_ids"]))
        return Answer(str(row["answer"]), ids, bool(row["ended"]), row["temperature"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the journal's line of conversation {task.entry.id} has no answer ({error!r}): "
            "delete that line and run again"
        ) from error
