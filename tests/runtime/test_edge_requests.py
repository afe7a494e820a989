"""What a request may not ask, and what two requests at once do."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BundleError, RequestError

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"temperature": None}, "temperature is None"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"min_p": -0.5}, "min_p is -0.5"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
    ({"frequency_penalty": "a"}, "frequency_penalty is 'a'"),
    ({"logit_bias": {64: 1.0}}, "logit_bias names token id 64"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias token id is -1"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias token id is 'a'"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 is nan"),
    ({"logit_bias": [3]}, r"logit_bias is \[3\]"),
    ({"logit_bias": []}, r"logit_bias is \[\]"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"acceptance": "typical"}, "acceptance must be one of rejection, coupled, got 'typical'"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
    ({"max_new_tokens": -3}, "max_new_tokens must be an integer of at least 1, got -3"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer of at least 1, got True"),
    ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer of at least 1, got 2.0"),
    ({"stop": ""}, r"stop\[0\] must have 1 to 512 characters, got 0"),
    ({"stop": ["a", 3]}, r"stop\[1\] must be a string, got 3"),
    ({"stop": 3}, "stop must be a string or a list of strings, got 3"),
    ({"stop": b"ab"}, "stop must be a string or a list of strings, got b'ab'"),
    ({"stop": ["a"] * 17}, "stop must have at most 16 strings, got 17"),
    ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
    ({"logprobs": -1}, "logprobs must be an integer from 0 to 20, got -1"),
    ({"logprobs": 1.0}, "logprobs must be an integer from 0 to 20, got 1.0"),
    ({"drafter": "medusa"}, "drafter 'medusa' is unknown; this bundle has: eagle3, none, lookup"),
    ({"drafter": ["none"]}, r"drafter '\['none'\]' is unknown"),
    ({"draft_top_k": 0}, "draft_top_k must be .*, got 0"),
    ({"draft_depth": 0}, "draft_depth must be .*, got 0"),
    ({"draft_depth": 2000}, "draft_depth must be .*, got 2000"),
    ({"num_draft_tokens": 0}, "num_draft_tokens must be .*, got 0"),
    ({"num_draft_tokens": 33}, "num_draft_tokens is 33, but .* 32"),
    ({"num_draft_tokens": 2.0}, "num_draft_tokens must be .*, got 2.0"),
    ({"draft_top_k": 32, "draft_depth": 32, "num_draft_tokens": 32}, "992 draft rows .* 128"),
    ({"tree": "medusa"}, "tree 'medusa' is unknown: use one of dynamic, eagle1"),
    ({"tree": 5}, "static tree must be a list .*, got 5"),
    ({"tree": [[0], [0, 1]]}, r"path \[0, 1\] .* not follow its better sibling \[0, 0\]"),
    ({"tree": [[i] for i in range(33)]}, "num_draft_tokens is 33, but .* 32"),
    ({"tree": "eagle1", "draft_depth": 0}, "draft_depth must be .*, got 0"),
    ({"cancel": True}, "cancel must be a threading.Event, got True"),
]
BAD_PROMPTS: list[tuple[Any, str]] = [
    ([64], "token id 64"),
    ([-1], "token id -1"),
    ([1.5], r"prompt\[0\] must be an integer token id, got 1.5"),
    ([5, None], r"prompt\[1\] must be an integer token id, got None"),
    (None, "the prompt must be a string, .*, got None"),
    (7, "the prompt must be a string, .*, got 7"),
    (b"t5", "the prompt must be a string, .*, got b't5'"),
    (np.array([[5, 6]]), r"prompt\[0\]"),
    ([{"role": "user"}], r"messages\[0\] has no content"),
    ([{"role": "user", "content": "t5"}, 7], r"messages\[1\] is 7"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_a_bad_option_is_refused_before_anything_runs(
    engine: eagle3.Engine, options: dict[str, Any], message: str
) -> None:
    """By `stream` itself, not by the first chunk; a bad one names itself and its value."""
    calls = dict(engine._clock.calls)
    with pytest.raises(RequestError, match=message):
        engine.stream([5, 6], **options)
    assert engine._clock.calls == calls


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused(engine: eagle3.Engine, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.stream(prompt)


def test_an_unknown_option_is_a_type_error(engine: eagle3.Engine) -> None:
    with pytest.raises(TypeError, match="top_q"):
        engine.generate([5], top_q=1)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2", 10**6])
def test_bad_threads(bundle: Bundle, threads: Any) -> None:
    with pytest.raises(RequestError, match=rf"threads must be .*got {threads!r}"):
        eagle3.load(bundle.root, threads=threads)


@pytest.mark.parametrize("device", ["tpu", "", None])
def test_bad_device(bundle: Bundle, device: Any) -> None:
    with pytest.raises(RequestError, match=f"device '{device}' is not supported"):
        eagle3.load(bundle.root, device=device)


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        eagle3.load(tmp_path / "nothing")


def test_numpy_numbers_are_numbers(engine: eagle3.Engine) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": np.int64(5),
        "seed": np.uint64(3),
        "temperature": np.float32(0.5),
        "top_k": np.int32(4),
    }
    result = engine.generate(np.array([5, 6], np.int32), **options)
    assert len(result.token_ids) <= 5
    assert result.token_ids == (
        engine.generate([5, 6], max_new_tokens=5, seed=3, temperature=0.5, top_k=4).token_ids
    )


def test_threads_take_turns(engine: eagle3.Engine) -> None:
    """Two and more at once, whole answers and streams: each gets what it would get alone."""
    jobs = [([3 + i, 40 - i, 7], {"temperature": float(i % 2), "seed": i}) for i in range(8)]
    options: dict[str, Any] = {"max_new_tokens": 40, "acceptance": "coupled"}
    expected = [engine.generate(p, **o, **options).token_ids for p, o in jobs]
    start = threading.Barrier(4)

    def run(index: int) -> list[int]:
        if index < 4:
            start.wait(timeout=30)
        prompt, sampling = jobs[index]
        if index % 2:
            return engine.generate(prompt, **sampling, **options).token_ids
        chunks = list(engine.stream(prompt, **sampling, **options))
        return [token for chunk in chunks for token in chunk.token_ids]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(8))) == expected


def test_an_open_stream_refuses_its_own_thread_and_holds_others(engine: eagle3.Engine) -> None:
    stream = engine.stream([5, 6], max_new_tokens=30, logit_bias={1: -100.0})
    next(stream)
    with pytest.raises(RequestError, match="still open in this thread"):
        engine.generate([5], max_new_tokens=2)
    done = threading.Event()

    def other() -> None:
        engine.generate([5], max_new_tokens=2)
        done.set()

    waiting = threading.Thread(target=other, daemon=True)
    waiting.start()
    assert not done.wait(0.1), "a second request ran between two rounds of the first"
    assert sum(len(chunk.token_ids) for chunk in stream) > 20
    assert done.wait(30)
    waiting.join()
    assert engine.generate([5], max_new_tokens=2).token_ids


def test_a_stream_belongs_to_the_thread_that_reads_it(engine: eagle3.Engine) -> None:
    """Started here, read elsewhere, as a server's pool does: a request in its loop is refused
    there, not waited for by the thread that it waits for."""
    stream = engine.stream([5, 6], max_new_tokens=30, logit_bias={1: -100.0})
    next(stream)

    def go_on() -> str:
        next(stream)
        with pytest.raises(RequestError, match="still open in this thread"):
            engine.generate([5], max_new_tokens=2)
        return "refused"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(go_on).result(timeout=30) == "refused"
    stream.close()
    assert engine.generate([5], max_new_tokens=2).token_ids


def test_a_stream_that_was_never_started_holds_nothing(engine: eagle3.Engine) -> None:
    stream = engine.stream([5, 6])
    assert engine.generate([5], max_new_tokens=2).token_ids
    del stream


def test_a_stream_closed_in_another_thread_frees_the_engine(engine: eagle3.Engine) -> None:
    stream = engine.stream([5, 6], logit_bias={1: -100.0})
    next(stream)
    closing = threading.Thread(target=stream.close)  # type: ignore[attr-defined]
    closing.start()
    closing.join()
    assert engine.generate([5], max_new_tokens=2).token_ids


def test_an_error_in_the_consumer_frees_the_engine(engine: eagle3.Engine) -> None:
    def consume() -> None:
        for _ in engine.stream([5, 6], logit_bias={1: -100.0}):
            raise OSError("the client went away")

    with contextlib.suppress(OSError):
        consume()
    assert engine.generate([5], max_new_tokens=2).token_ids


def test_a_result_is_json(engine: eagle3.Engine) -> None:
    result = engine.generate([5, 6], max_new_tokens=6, logprobs=1)
    data = json.loads(json.dumps(result.to_json()))
    assert data["token_ids"] == result.token_ids and data["text"] == result.text
    assert data["stats"]["rounds"] == result.stats.rounds
    assert len(data["logprobs"]) == len(result.token_ids)
    assert set(data) == {
        "text", "token_ids", "prompt_tokens", "finish_reason", "stats", "logprobs"
    }  # fmt: skip
