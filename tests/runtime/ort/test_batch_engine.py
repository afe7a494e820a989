"""Batched plain decoding: who shares the batch changes nothing but the speed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import EngineError, PromptTooLong, RequestError
from eagle3.runtime.ort.batch_engine import BatchAnswer, BatchEngine, BatchRequest
from eagle3.runtime.params import SamplingParams

EOS = 1
NO_EOS = {"logit_bias": {EOS: -100.0}}
CONTEXT = 128  # of `tiny_plan`, which prefills 16 tokens at once
LENGTHS = [5, 1, 16, 17, 33, 2, 60, 12, 100, 7, 48]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, NO_EOS, {"repetition_penalty": 1.3}],
    "sampled": [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, **NO_EOS},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    ],
}
OPTIONS["mixed"] = OPTIONS["greedy"] + OPTIONS["sampled"]


def request(key: str, ids: Sequence[int], count: int = 12, **params: Any) -> BatchRequest:
    return BatchRequest(key, tuple(ids), SamplingParams(**params), count)


def some_requests(kind: str, vocab_size: int = 64) -> list[BatchRequest]:
    """Prompts and answers of mixed lengths, each with its own options and seed."""
    rng = np.random.default_rng(3)
    options = OPTIONS[kind]
    return [
        request(
            f"r{i}",
            rng.integers(2, vocab_size, length).tolist(),
            int(rng.integers(1, 25)),
            seed=i,
            **options[i % len(options)],
        )
        for i, length in enumerate(LENGTHS)
    ]


def alone(engine: eagle3.Engine, each: BatchRequest) -> BatchAnswer:
    """What plain decoding answers by itself."""
    options = {**vars(each.params), "acceptance": "coupled"}
    options.pop("bias_arrays", None)
    result = engine.generate(
        list(each.prompt_ids), drafter="none", max_new_tokens=each.max_new_tokens, **options
    )
    return BatchAnswer(each.key, tuple(result.token_ids), result.finish_reason)


def by_key(answers: Iterable[BatchAnswer]) -> dict[str, BatchAnswer]:
    return {answer.key: answer for answer in answers}


def num_calls(batch: BatchEngine) -> int:
    return batch.clock.calls.get("target", 0)


@pytest.fixture(scope="module")
def batch(bundle: Bundle) -> BatchEngine:
    return BatchEngine(bundle, rows=3, threads=1)


# The same text as alone


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_answers_are_those_of_plain_decoding(
    bundle: Bundle, engine: eagle3.Engine, kind: str, rows: int
) -> None:
    """More requests than rows, or fewer; every row serves prompts of several chunks."""
    requests = some_requests(kind)
    answers = list(BatchEngine(bundle.root, rows=rows, threads=1).generate(requests))
    assert len(answers) == len(requests)
    assert by_key(answers) == {each.key: alone(engine, each) for each in requests}


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_portable_lowering_serves_batches_too(
    windowed_bundle: Bundle, windowed_engine: eagle3.Engine, kind: str
) -> None:
    """With a sliding window, and rows whose cache holds what an earlier request left behind."""
    requests = some_requests(kind, vocab_size=32)
    answers = by_key(BatchEngine(windowed_bundle, rows=4, threads=1).generate(requests))
    assert answers == {each.key: alone(windowed_engine, each) for each in requests}


def test_the_order_of_requests_does_not_matter(batch: BatchEngine) -> None:
    requests = some_requests("mixed")
    expected = by_key(batch.generate(requests))
    for seed in range(3):
        random.Random(seed).shuffle(requests)
        assert by_key(batch.generate(requests)) == expected


def test_a_sampled_answer_needs_no_named_acceptance(batch: BatchEngine) -> None:
    """Without a draft there is one rule, whatever the default of `SamplingParams` says."""
    answers = {
        acceptance: next(
            batch.generate(
                [request("a", [5, 6, 7], 40, temperature=1.0, seed=4, acceptance=acceptance)]
            )
        )
        for acceptance in ("rejection", "coupled")
    }
    assert answers["rejection"] == answers["coupled"]


def test_a_start_that_prompts_share_is_computed_once(bundle: Bundle, engine: eagle3.Engine) -> None:
    batch = BatchEngine(bundle, rows=2, threads=1)
    start = np.random.default_rng(5).integers(2, 64, 40).tolist()
    requests = [request(f"r{i}", [*start, 20 + i], 1) for i in range(4)]
    calls = []
    for each in requests:
        before = num_calls(batch)
        assert list(batch.generate([each])) == [alone(engine, each)]
        calls.append(num_calls(batch) - before)
    assert calls == [3, 1, 1, 1], "41 tokens are three chunks, one token behind a start is one"
    both = by_key(batch.generate([request("same", [*start, 20], 9), request("short", start, 9)]))
    assert both["same"] == alone(engine, request("same", [*start, 20], 9))
    assert both["short"] == alone(engine, request("short", start, 9))


# Rows are refilled and the batch narrows


def ends_early(engine: eagle3.Engine, ids: Sequence[int]) -> BatchRequest:
    """A sampled request whose answer ends by EOS after two to six tokens."""
    for seed in range(200):
        each = request("early", ids, 40, temperature=1.0, seed=seed, logit_bias={EOS: 3.0})
        answer = alone(engine, each)
        if answer.finish_reason == "stop" and 2 <= len(answer.token_ids) <= 6:
            return each
    raise AssertionError("no seed ends early")


def test_an_end_token_frees_its_row_for_the_next_request(
    batch: BatchEngine, engine: eagle3.Engine
) -> None:
    taken: list[str] = []
    early = ends_early(engine, [9, 8, 7])

    def requests() -> Iterator[BatchRequest]:
        long = [request(f"long{i}", [5 + i, 6], 30 + i, **NO_EOS) for i in range(2)]
        for each in [long[0], early, long[1], request("next", [3, 4], 2, **NO_EOS), early]:
            taken.append(each.key)
            yield each

    answers = batch.generate(requests())
    assert not taken, "nothing is taken before the first answer is asked for"
    first = next(answers)
    assert first == alone(engine, early) and first.token_ids[-1] == EOS
    assert taken == ["long0", "early", "long1"], "a row for each, none read ahead"
    assert next(answers).key == "next", "it joined while the long ones went on"
    assert taken[3:] == ["next"]
    assert [answer.key for answer in answers] == ["early", "long0", "long1"]


def test_a_request_of_one_token_ends_at_its_prefill(batch: BatchEngine) -> None:
    requests = [request(f"r{i}", [5, 6 + i], 1) for i in range(8)]
    before = num_calls(batch)
    assert [answer.key for answer in batch.generate(requests)] == [f"r{i}" for i in range(8)]
    assert num_calls(batch) - before == 8


def test_no_empty_row_is_computed(
    bundle: Bundle, engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 and 1 end first; what is left moves to the front with its cache."""
    batch = BatchEngine(bundle, rows=4, threads=1)
    sizes: list[int] = []
    decode = batch._target.decode
    monkeypatch.setattr(
        batch._target,
        "decode",
        lambda tokens, *rest: (sizes.append(len(tokens)), decode(tokens, *rest))[1],
    )
    requests = [request(f"r{i}", [5 + i] * 20, n, **NO_EOS) for i, n in enumerate([3, 5, 9, 12])]
    answers = by_key(batch.generate(requests))
    assert sizes == [4] * 2 + [3] * 2 + [2] * 4 + [1] * 3
    assert answers == {each.key: alone(engine, each) for each in requests}


def test_no_requests_give_no_answers(batch: BatchEngine) -> None:
    before = num_calls(batch)
    assert list(batch.generate([])) == []
    assert num_calls(batch) == before


# Limits and refusals


@pytest.mark.parametrize("room", [1, 2, 8])
def test_the_end_of_the_context_is_a_length(
    batch: BatchEngine, engine: eagle3.Engine, room: int
) -> None:
    full = request("full", [7] * (CONTEXT - room), 50, **NO_EOS)
    answers = by_key(batch.generate([full, request("other", [5, 6], 20, **NO_EOS)]))
    assert answers["full"].finish_reason == "length"
    assert len(answers["full"].token_ids) == room
    assert answers["full"] == alone(engine, full)


BAD_REQUESTS: list[tuple[BatchRequest, type[RequestError], str]] = [
    (request("bad", [7] * CONTEXT), PromptTooLong, f"{CONTEXT} tokens.*context is {CONTEXT}"),
    (request("bad", [7] * 999), PromptTooLong, f"999 tokens.*context is {CONTEXT}"),
    (request("bad", []), RequestError, "one or more"),
    (request("bad", [5, 64]), RequestError, "token id 64.*0 to 63"),
    (request("bad", [5, -1]), RequestError, "token id -1"),
    (request("bad", [0.5]), RequestError, "token ids"),  # type: ignore[list-item]
    (
        request("bad", [5], 0),
        RequestError,
        "max_new_tokens must be an integer of at least 1, got 0",
    ),
    (request("bad", [5], logit_bias={64: 1.0}), RequestError, "logit_bias names token id 64"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_REQUESTS)
def test_what_cannot_be_served_is_refused_by_key_before_anything_runs(
    batch: BatchEngine, bad: BatchRequest, error: type[RequestError], message: str
) -> None:
    before = num_calls(batch)
    with pytest.raises(error, match=f"request 'bad': .*{message}"):
        list(batch.generate([bad]))
    with pytest.raises(error, match="request 'bad'"):
        batch.check(bad)
    assert num_calls(batch) == before
    assert list(batch.generate([request("good", [5, 6], 2, **NO_EOS)]))[0].key == "good"


@pytest.mark.parametrize("rows", [0, -1, True, 2.5])
def test_rows_that_are_no_count_are_refused(bundle: Bundle, rows: Any) -> None:
    with pytest.raises(RequestError, match="rows must be an integer of at least 1, got"):
        BatchEngine(bundle, rows=rows)


# An iterator that ends before its requests do


def test_a_closed_iterator_leaves_the_engine_usable(
    batch: BatchEngine, engine: eagle3.Engine
) -> None:
    requests = some_requests("mixed")
    answers = batch.generate(iter(requests))
    next(answers)
    answers.close()  # type: ignore[attr-defined]  # it is a generator
    assert by_key(batch.generate(requests)) == {e.key: alone(engine, e) for e in requests}


def test_a_second_open_iterator_is_refused(batch: BatchEngine) -> None:
    requests = [request("a", [5, 6], 3, **NO_EOS), request("b", [5, 7], 9, **NO_EOS)]
    first = batch.generate(requests)
    assert next(first).key == "a"
    with pytest.raises(RequestError, match="still open"):
        next(batch.generate(requests))
    assert next(first).key == "b"
    assert list(first) == []
    assert len(list(batch.generate(requests))) == 2


def test_an_error_of_the_callers_iterator_passes(batch: BatchEngine) -> None:
    def requests() -> Iterator[BatchRequest]:
        yield request("a", [5, 6], 3)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(batch.generate(requests()))
    assert len(list(batch.generate([request("a", [5, 6], 3)]))) == 1


BAD = 30  # its embedding is NaN
NEVER_BAD: Mapping[int, float] = {EOS: -100.0, BAD: -1000.0}


@pytest.mark.parametrize("name", ["bundle", "windowed_bundle"])
def test_logits_that_are_no_numbers_are_an_error_by_key_and_leave_nothing(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a prompt and in mid text; one lowering reads every slot of the cache afterwards."""
    whole: Bundle = request.getfixturevalue(name)
    weights = bytearray(whole.path("target.onnx.data").read_bytes())
    row = np.full(tiny.HIDDEN, np.nan, np.float32).tobytes()
    weights[BAD * len(row) : (BAD + 1) * len(row)] = row
    edited = tiny.edited_bundle(whole, tmp_path / "bad", {"target.onnx.data": bytes(weights)})
    batch = BatchEngine(edited, rows=2, threads=1)
    good = BatchRequest("good", (5, 6), SamplingParams(logit_bias=NEVER_BAD), 20)
    expected = list(BatchEngine(whole, rows=2, threads=1).generate([good, good]))
    drawn = SamplingParams(logit_bias={BAD: 1000.0})
    for ids, params in (((5,) * 20 + (BAD, 6), good.params), ((5, 6), drawn)):
        with pytest.raises(EngineError, match=r"request 'bad': .*logits are NaN"):
            list(batch.generate([good, BatchRequest("bad", ids, params, 20)]))
        assert list(batch.generate([good, good])) == expected
