"""Prompts that the target writes itself (MAGPIE, 2024).

The target's input is only the beginning of its chat template, up to the start of the user's text.
Therefore it continues with a prompt like those that it was trained on.

    synthesized.jsonl       {"try": int, "seed": int, "text": str}, one line per try, used or not

Prompts are sampled at temperature 1 with top-p 0.95. The remaining 5% of the probability mass is
where a small target produces text that is not language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from eagle3.runtime.errors import DataError
from eagle3.runtime.ort.batch_engine import BatchRequest
from eagle3.runtime.params import SamplingParams
from eagle3.runtime.text.chat_template import ChatTemplate, as_messages
from eagle3.train.data.answers import Generating
from eagle3.train.data.tasks import draw_of
from eagle3.train.jobs.journal import Journal, read_journals
from eagle3.train.jobs.processes import Processes
from eagle3.train.jobs.progress import Progress, Report

NAME = "synthesized"
TEMPERATURE, TOP_P, MAX_TOKENS = 1.0, 0.95, 128
_MIN_CHARS = 8
_TRIES = 4  # maximum number of tries per requested prompt
_MARK = "eagle3-user-text"


@dataclass(frozen=True)
class UserTurn:
    """The text that a chat template writes around a user's text, and the tokens that end it.

    before_ids: token ids before the user's text. after: the text that ends the user's text; empty
    if it begins with an end token. eos_ids: the end tokens.
    """

    before_ids: tuple[int, ...]
    after: str
    eos_ids: frozenset[int]


def user_turn(tokenizer: Tokenizer, template: ChatTemplate, eos_ids: Sequence[int]) -> UserTurn:
    """Return what the chat template writes around a user's text.

    Raises DataError if the template writes nothing before the user's text.
    """
    text = template.render(as_messages(_MARK), add_generation_prompt=False)
    before, found, after = text.partition(_MARK)
    ids = tokenizer.encode(before, add_special_tokens=False).ids
    if not found or not ids:
        raise DataError(
            "the chat template writes nothing before a user's text, so the target cannot be "
            "prompted to write one: remove --synthesize"
        )
    after = after.strip()
    if set(tokenizer.encode(after, add_special_tokens=False).ids[:1]) & set(eos_ids):
        after = ""
    return UserTurn(tuple(ids), after, frozenset(eos_ids))


def text_of(ids: Sequence[int], tokenizer: Tokenizer, turn: UserTurn) -> str:
    """Return the user's text of sampled ids, or "" if there are special tokens inside it."""
    if ids and ids[-1] in turn.eos_ids:
        ids = ids[:-1]
    text = str(tokenizer.decode(list(ids), skip_special_tokens=False))
    if turn.after:
        text = text.partition(turn.after)[0]
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    inside = special.intersection(tokenizer.encode(text, add_special_tokens=False).ids)
    return "" if inside else text.strip()


def chosen(texts: dict[int, str], count: int) -> list[str]:
    """Return the first `count` texts, in the order of their tries.

    texts: by try. Texts of fewer than 8 characters are left out, and so are repetitions, where a
    difference in white space does not count.
    """
    found: dict[str, str] = {}
    for number in sorted(texts):
        text = texts[number]
        if len(text) >= _MIN_CHARS and len(found) < count:
            found.setdefault(" ".join(text.split()), text)
    return list(found.values())


def synthesize(
    folder: Path,
    count: int,
    seed: int,
    turn: UserTurn,
    tokenizer: Tokenizer,
    engine: Callable[[], Generating],
    processes: Processes,
    report: Report = lambda _: None,
) -> list[str]:
    """Return `count` prompts written by the target, or fewer if 4 * `count` tries give fewer.

    The result does not depend on the number of processes. engine: called to create the engine if
    there is something to sample. An interrupted run continues where it stopped. Raises DataError if
    the disk is full; what was written before that is kept.
    """
    tries = 0
    texts = _written(folder, seed)
    while True:
        prompts = chosen({n: text for n, text in texts.items() if n < tries}, count)
        if len(prompts) == count or tries == count * _TRIES:
            break
        tries = min(tries + count - len(prompts), count * _TRIES)
        processes.wait()  # no process writes before all of them have read
        missing = [n for n in range(tries) if n not in texts]
        if missing:
            making = engine()
            mine = missing[processes.rank :: processes.world]
            _sample(folder, mine, seed, turn, tokenizer, making, processes.rank, report)
            processes.wait()
            texts = _written(folder, seed)
    report(f"synthesized {len(prompts):,} of {count:,} requested prompts in {tries:,} tries")
    return prompts


def _seed(number: int, seed: int) -> int:
    return draw_of(f"synthesize {number}", (TEMPERATURE,), seed)[1]


def _written(folder: Path, seed: int) -> dict[int, str]:
    """Return the texts in the journals by try, without those of another seed."""
    texts: dict[int, str] = {}
    for row in read_journals(folder, NAME):
        try:
            number, own, text = int(row["try"]), int(row["seed"]), str(row["text"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a line of {folder / NAME}.jsonl lacks try, seed or text: delete that line"
            ) from error
        if own == _seed(number, seed):
            texts[number] = text
    return texts


def _sample(
    folder: Path,
    tries: Sequence[int],
    seed: int,
    turn: UserTurn,
    tokenizer: Tokenizer,
    engine: Generating,
    rank: int,
    report: Report,
) -> None:
    def request(number: int) -> BatchRequest:
        own = _seed(number, seed)
        params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=own)
        return BatchRequest(str(number), turn.before_ids, params, MAX_TOKENS)

    progress = Progress("synthesized prompts", len(tries), report, unit="prompts")
    answers = engine.generate(map(request, tries))
    with Journal(folder, NAME, rank) as journal, closing(answers):
        for answer in answers:
            text = text_of(answer.token_ids, tokenizer, turn)
            number = int(answer.key)
            journal.append({"try": number, "seed": _seed(number, seed), "text": text})
            progress.add(1)
