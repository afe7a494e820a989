"""The task for each conversation: how the target answers it, unless it came with an answer.

Temperature, seed and maximum length of an answer depend on the text of the prompt and the options,
not on its position. A resumed run, or a run with more processes, therefore gives the same answers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.errors import DataError, RequestError
from eagle3.runtime.ort.batch_engine import BatchRequest
from eagle3.runtime.params import SamplingParams
from eagle3.train.data.entries import Answer, Entry
from eagle3.train.data.render import Renderer, Turn
from eagle3.train.requests.data_request import ANSWER_ROOM, DataRequest

_SEED_BITS = 48


@dataclass(frozen=True)
class Task:
    """A conversation, and the settings to sample its answer with.

    entry: the conversation. prompt_ids int32 [N]: the rendered prompt; empty if the answer was
    given. temperature, seed: of sampling. max_new_tokens: maximum length of the answer, limited to
    the rest of the context. For a given answer, seed and max_new_tokens are None.
    """

    entry: Entry
    prompt_ids: NDArray[np.int32]
    temperature: float | None
    seed: int | None
    max_new_tokens: int | None

    def request(self) -> BatchRequest:
        """Return the request for the engine; its key is the id of the conversation."""
        assert self.temperature is not None and self.seed is not None
        assert self.max_new_tokens is not None
        params = SamplingParams(temperature=self.temperature, seed=self.seed)
        ids = tuple(self.prompt_ids.tolist())
        return BatchRequest(self.entry.id, ids, params, self.max_new_tokens)

    def row(self, answer: Answer) -> dict[str, Any]:
        """Return the journal line of the conversation with `answer`."""
        entry = self.entry
        before = {} if entry.is_plain else {"before": entry.messages[:-1]}
        return {
            "id": entry.id,
            "source": entry.source,
            "license": entry.license,
            **before,
            "prompt": entry.prompt,
            "temperature": self.temperature,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "ended": answer.ended,
            "answer": answer.text,
            "answer_ids": list(answer.ids or ()),
        }

    def is_done(self, row: Mapping[str, Any] | None) -> bool:
        """Return True if `row`, a journal line of the same id, is a result of this task."""
        if row is None:
            return False
        if self.entry.answer is not None:
            return bool(row == self.row(self.entry.answer))
        asked = (self.temperature, self.seed, self.max_new_tokens)
        return asked == tuple(row.get(key) for key in ("temperature", "seed", "max_new_tokens"))


@dataclass
class Tasks:
    """All tasks in input order, and counts of the conversations that were left out.

    too_long: prompts that leave too little of the context. refused: other reasons.
    """

    tasks: list[Task] = field(default_factory=list)
    too_long: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def tasks_of(entries: Iterable[Entry], renderer: Renderer, request: DataRequest) -> Tasks:
    """Render every prompt and return the tasks.

    Raises BundleError if the chat template does not compile.
    """
    result = Tasks()
    for entry in entries:
        try:
            task = _task(entry, renderer, request)
        except (DataError, RequestError) as error:
            result.refused[str(error)] += 1
            continue
        if task is None:
            result.too_long += 1
        else:
            result.tasks.append(task)
    return result


def _task(entry: Entry, renderer: Renderer, request: DataRequest) -> Task | None:
    """Return the task of a conversation, or None if its prompt is too long.

    For a conversation with a given answer, only the first prompt is checked. Raises DataError or
    RequestError if the conversation cannot be rendered.
    """
    given = entry.answer is not None
    ids = renderer.prompt_ids(entry.opening if given else entry.messages)
    if len(ids) > request.max_len - ANSWER_ROOM:
        return None
    if entry.answer is not None:
        answer = _with_ids(entry, entry.answer, renderer)
        _join(entry, answer, renderer)
        none = np.empty(0, np.int32)
        return Task(replace(entry, answer=answer), none, answer.temperature, None, None)
    if entry.history:
        _join(entry, Answer("", ()), renderer)
    temperature, seed = draw_of(entry.text, request.temperatures, request.seed)
    limit = min(request.max_new_tokens, request.max_len - len(ids))
    return Task(entry, np.array(ids, np.int32), temperature, seed, limit)


def _with_ids(entry: Entry, answer: Answer, renderer: Renderer) -> Answer:
    if answer.ids is None:
        return replace(answer, ids=renderer.answer_ids(entry.messages, answer.text, answer.ended))
    if not renderer.spells(answer.text, answer.ids):
        raise DataError("answer_ids do not decode to the answer; were they made by another target?")
    return answer


def _join(entry: Entry, answer: Answer, renderer: Renderer) -> None:
    """Raise DataError if the template cannot render the turns of the conversation in one text."""
    if entry.history:
        renderer.conversation(turns_of(entry, answer, renderer))


def draw_of(text: str, temperatures: Sequence[float], seed: int) -> tuple[float, int]:
    """Return the temperature and the seed for a prompt, which depend only on its text and `seed`.

    The temperature is one of `temperatures`.
    """
    digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
    number = int.from_bytes(digest[:8])
    return temperatures[number % len(temperatures)], int.from_bytes(digest[8:16]) % 2**_SEED_BITS


def turns_of(entry: Entry, answer: Answer, renderer: Renderer) -> list[Turn]:
    """Return the turns of a conversation, with the token ids of all answers.

    answer: the answer to the last prompt.
    """
    turns: list[Turn] = []
    for at, (prompt, text) in enumerate(entry.history):
        asked = replace(entry, prompt=prompt, history=entry.history[:at]).messages
        system = None if turns else entry.system
        turns.append(Turn(prompt, text, renderer.answer_ids(asked, text), system))
    system = None if turns else entry.system
    return [*turns, Turn(entry.prompt, answer.text, answer.ids or (), system)]
