"""The target's answers to the prompts; every finished conversation is a line of the journal.

    conversations.jsonl     id, source, license, before?, prompt, temperature, seed,
                            max_new_tokens, ended, answer, answer_ids

`before` holds the messages before the prompt, if there are any. `seed` and `max_new_tokens` are
null for an answer that came with its prompt. A later line with the same id replaces an earlier one
(see `finished`).
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
    """The interface of `BatchEngine` that is used here."""

    def generate(self, requests: Iterable[BatchRequest]) -> Any:
        """Yield a BatchAnswer for each request, in any order."""


def finished(folder: Path, tasks: Iterable[Task] = ()) -> dict[str, dict[str, Any]]:
    """Return the lines of all journals by id, including those of other processes and earlier runs.

    If several lines have the same id, the last one is returned. However, a line that answers one of
    `tasks` takes precedence, because the journal of another process may hold an answer to an
    earlier request. Raises DataError if a journal cannot be read.
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
    """Write the conversations that came with their answers to the journal of process 0.

    known: the lines that the journals hold already, by id; these are not written again. Raises
    DataError if the journal cannot be written.
    """
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
    """Answer `tasks`, and write the answers to the journal of process `rank`.

    Raises DataError if the disk is full and EngineError if the target fails. The answers finished
    before that are kept, also after Ctrl-C.
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
    """Return the answer of a finished task. Raises DataError if its line has no answer."""
    row = known[task.entry.id]
    try:
        ids = tuple(map(int, row["answer_ids"]))
        return Answer(str(row["answer"]), ids, bool(row["ended"]), row["temperature"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the journal's line of conversation {task.entry.id} has no answer ({error!r}): "
            "delete that line and run again"
        ) from error
