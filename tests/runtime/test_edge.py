"""How requests end, at every edge: EOS, stop strings, limits, cancellation, errors (method 5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from drafting import Oracle, Positions, using

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.errors import EngineError, PromptTooLong, RequestError
from eagle3.runtime.trees.tree import Tree

PROMPT = list(range(5, 25))
CAPACITY = 128
NO_EOS = {0: -100.0, 1: -100.0}  # t0 is special too: no text
DEEP = {"draft_top_k": 2, "draft_depth": 6, "num_draft_tokens": 8}
RULES: list[dict[str, Any]] = [{}, {"temperature": 1.0, "acceptance": "coupled", "seed": 3}]


def plain(engine: eagle3.Engine, prompt: Any = PROMPT, **options: Any) -> eagle3.Result:
    return engine.generate(prompt, drafter="none", **{"logit_bias": NO_EOS, **options})


def oracle(
    engine: eagle3.Engine, text: Sequence[int], prompt: Any = PROMPT, **options: Any
) -> tuple[eagle3.Result, list[eagle3.Chunk]]:
    """What a draft that proposes `text` gives: whole paths of 6 are accepted."""
    options = {"logit_bias": NO_EOS, **DEEP, **options}
    with using(engine, Oracle([*prompt, *text])):
        chunks = list(engine.stream(prompt, **options))
    assert chunks[-1].result is not None
    return chunks[-1].result, chunks


@pytest.fixture(scope="module")
def text(engine: eagle3.Engine) -> list[int]:
    """Greedy tokens behind PROMPT."""
    return plain(engine, max_new_tokens=60).token_ids


def first_new(text: list[int], start: int) -> int:
    """Index of a token, from `start` on, that did not occur before."""
    return next(i for i in range(start, len(text)) if text[i] not in [*text[:i], *PROMPT])


@pytest.fixture(scope="module")
def eos_list(
    bundle: Bundle, text: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[eagle3.Engine, int]]:
    """A bundle whose EOS is a list: a token from the middle of `text`, at the given index, too."""
    index = first_new(text, 9)
    generation = replace(bundle.manifest.generation, eos_token_ids=(1, text[index], 63))
    folder = tmp_path_factory.mktemp("eos") / "bundle"
    edited = tiny.edited_bundle(bundle, folder, generation=generation)
    yield eagle3.load(edited.root, threads=1), index


# Endings inside a round


def test_eos_inside_an_accepted_path_ends_the_text_there(
    eos_list: tuple[eagle3.Engine, int], text: list[int]
) -> None:
    engine, index = eos_list
    result, chunks = oracle(engine, text, max_new_tokens=60)
    assert (index - 1) % 7 != 6, "the EOS is the last token of its round: choose another"
    assert result.finish_reason == "stop"
    assert result.token_ids == text[: index + 1]
    assert result.text == "".join(c.text for c in chunks) == words(text[:index])
    assert plain(engine, max_new_tokens=60).token_ids == result.token_ids


def test_eos_as_the_first_token_is_an_empty_text(engine: eagle3.Engine) -> None:
    for options in ({"drafter": "none"}, DEEP):
        result = engine.generate(PROMPT, logit_bias={1: 1000.0}, **options)
        assert (result.text, result.token_ids, result.finish_reason) == ("", [1], "stop")
        assert (result.stats.rounds, result.stats.acceptance_length) == (0, 0.0)


def words(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


@pytest.mark.parametrize("offset", range(7))
def test_a_stop_string_anywhere_in_a_round_hides_what_follows(
    engine: eagle3.Engine, text: list[int], offset: int
) -> None:
    """Of two tokens, so that at each offset of a round of 7 it stands inside or across."""
    start = next(
        i
        for i in range(8 + offset, 50, 7)
        if words(text).find(words(text[i : i + 2])) == len(words(text[:i])) + 1
    )
    stop = words(text[start : start + 2])
    expected = plain(engine, max_new_tokens=60, stop=[stop])
    result, chunks = oracle(engine, text, max_new_tokens=60, stop=["never", stop])
    assert result.finish_reason == expected.finish_reason == "stop"
    assert result.text == expected.text == words(text[:start]) + " "
    assert result.token_ids == expected.token_ids == text[: start + 2]
    assert "".join(chunk.text for chunk in chunks) == result.text


def test_a_stop_string_that_never_completes_is_shown(
    engine: eagle3.Engine, text: list[int]
) -> None:
    stop = words(text[28:30]) + " and more"
    result, chunks = oracle(engine, text, max_new_tokens=30, stop=stop)
    assert (result.text, result.finish_reason) == (words(text[:30]), "length")
    assert "".join(chunk.text for chunk in chunks) == result.text


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 14, 15, 16])
def test_max_new_tokens_in_mid_path(engine: eagle3.Engine, text: list[int], limit: int) -> None:
    result, chunks = oracle(engine, text, max_new_tokens=limit)
    assert (result.token_ids, result.finish_reason) == (text[:limit], "length")
    assert [token for chunk in chunks for token in chunk.token_ids] == text[:limit]
    hostile = engine.generate(PROMPT, logit_bias=NO_EOS, max_new_tokens=limit, **DEEP)
    assert hostile.token_ids == text[:limit]


# The context


def test_a_prompt_of_one_token(engine: eagle3.Engine) -> None:
    for rule in RULES:
        result = engine.generate([9], **rule, **DEEP, logit_bias=NO_EOS, max_new_tokens=127)
        expected = plain(engine, [9], **rule, max_new_tokens=127)
        assert result.prompt_tokens == 1
        assert len(result.token_ids) == 127
        assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("prompt", [[], ""])
def test_an_empty_prompt_is_refused(engine: eagle3.Engine, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        engine.generate(prompt, chat=False)


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_prompts_around_the_capacity(engine: eagle3.Engine, drafter: str) -> None:
    full = engine.generate([7] * CAPACITY, drafter=drafter)
    assert (full.token_ids, full.text, full.finish_reason) == ([], "", "length")
    assert list(engine.stream([7] * CAPACITY, drafter=drafter))[-1].result is not None
    almost = engine.generate([7] * (CAPACITY - 1), drafter=drafter, logit_bias=NO_EOS)
    assert (len(almost.token_ids), almost.finish_reason) == (1, "length")
    with pytest.raises(PromptTooLong, match=r"129 tokens.* 128"):
        engine.generate([7] * (CAPACITY + 1), drafter=drafter)


@pytest.mark.parametrize("length", [*range(100, 128, 3), 125, 126])
def test_a_tree_at_the_context_limit_shrinks(engine: eagle3.Engine, length: int) -> None:
    """Exactly as many tokens as fit, and the same ones; a wide tree and a deep one."""
    prompt = np.random.default_rng(length).integers(2, 64, length).tolist()
    for rule in RULES:
        expected = plain(engine, prompt, **rule, max_new_tokens=500)
        assert len(expected.token_ids) == CAPACITY - length
        assert expected.finish_reason == "length"
        result, _ = oracle(engine, expected.token_ids, prompt, **rule, max_new_tokens=500)
        assert (result.token_ids, result.finish_reason) == (expected.token_ids, "length")
        for tree in ((8, 3, 32), (1, 32, 32)):
            sizes = dict(zip(DEEP, tree, strict=True))
            result = engine.generate(prompt, **rule, **sizes, logit_bias=NO_EOS, max_new_tokens=500)
            assert (result.token_ids, result.finish_reason) == (expected.token_ids, "length")


# Cancellation, and the request after it


@pytest.mark.parametrize("how", ["event", "close", "abandon"])
def test_a_cancelled_request_leaves_nothing_behind(
    engine: eagle3.Engine, bundle: Bundle, how: str
) -> None:
    fresh = eagle3.load(bundle.root, threads=1)
    options: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.5, "seed": 4}
    expected = fresh.generate([8, 9, 10], max_new_tokens=50, **options).token_ids
    cancel = threading.Event()
    stream = engine.stream(PROMPT, max_new_tokens=90, cancel=cancel, logit_bias=NO_EOS)
    seen = [next(stream) for _ in range(5)]
    if how == "event":
        cancel.set()
        (last,) = stream
        assert last.finish_reason == "cancelled" and last.result is not None
        assert last.result.finish_reason == "cancelled"
        assert last.result.token_ids == [t for chunk in seen for t in chunk.token_ids]
        assert last.result.text == "".join(c.text for c in [*seen, last])
        assert last.result.stats.rounds == 4
    elif how == "close":
        stream.close()  # type: ignore[attr-defined]
    else:
        del stream
    assert engine.generate([8, 9, 10], max_new_tokens=50, **options).token_ids == expected


def test_cancelled_before_it_starts(engine: eagle3.Engine) -> None:
    cancel = threading.Event()
    cancel.set()
    result = engine.generate(PROMPT, cancel=cancel)
    assert (result.finish_reason, result.token_ids, result.text) == ("cancelled", [], "")


def test_the_second_request_starts_clean(engine: eagle3.Engine, bundle: Bundle) -> None:
    """No stored length, KV or penalties of the first: a longer, penalised one goes before."""
    fresh = eagle3.load(bundle.root, threads=1)
    options: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.7}
    for prompt in ([11], [60, 2, 33]):
        expected = [
            fresh.generate(prompt, max_new_tokens=60, **options, **rule).token_ids for rule in RULES
        ]
        engine.generate(list(range(2, 64)), max_new_tokens=60, **options)
        found = [
            engine.generate(prompt, max_new_tokens=60, **options, **rule).token_ids
            for rule in RULES
        ]
        assert found == expected


# Numbers that are none


BAD = 30  # its embedding is NaN
NEVER_BAD = {1: -100.0, BAD: -1000.0}


@pytest.fixture(scope="module", params=["bundle", "windowed_bundle"])
def poisoned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[eagle3.Engine, eagle3.Engine]]:
    """A target with a NaN embedding, which export would refuse, and the whole one.

    On both lowerings: one of them reads every slot of the cache, also those behind the text.
    """
    whole: Bundle = request.getfixturevalue(request.param)
    weights = bytearray(whole.path("target.onnx.data").read_bytes())
    row = np.full(tiny.HIDDEN, np.nan, np.float32).tobytes()
    weights[BAD * len(row) : (BAD + 1) * len(row)] = row
    folder = tmp_path_factory.mktemp("poisoned") / "bundle"
    edited = tiny.edited_bundle(whole, folder, {"target.onnx.data": bytes(weights)})
    yield eagle3.load(edited.root, threads=1), eagle3.load(whole.root, threads=1)


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.2}, {"temperature": 1.0}, {**RULES[1]}, {"logprobs": 2}],
)
def test_nan_logits_of_the_target_are_an_error_and_no_token(
    poisoned: tuple[eagle3.Engine, eagle3.Engine], drafter: str, options: dict[str, Any]
) -> None:
    """Named, in the prefill; the next request is served as by an engine that never saw it."""
    engine, whole = poisoned
    with pytest.raises(EngineError, match="target.* logits are NaN"):
        engine.generate([5] * 20 + [BAD, 6], drafter=drafter, **options)
    options = {"max_new_tokens": 30, "drafter": drafter, "logit_bias": NEVER_BAD}
    assert engine.generate([5, 6], **options).token_ids == (
        whole.generate([5, 6], **options).token_ids
    )


def test_nan_logits_in_mid_text_are_an_error(
    poisoned: tuple[eagle3.Engine, eagle3.Engine],
) -> None:
    engine, _ = poisoned
    for options in ({"drafter": "none"}, DEEP):
        stream = engine.stream([5, 6], logit_bias={BAD: 1000.0}, **options)
        assert next(stream).token_ids == [BAD]
        with pytest.raises(EngineError, match="target's logits are NaN"):
            next(stream)
        assert engine.generate([5, 6], max_new_tokens=3, logit_bias=NEVER_BAD).token_ids


class _Poison(Positions):
    """Puts the token that the target cannot run beside the right ones."""

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.text = text

    def propose(self, request: DraftRequest) -> Tree:
        tokens = [request.root, BAD, *self.text[self.seen + 1 : self.seen + 3]]
        return Tree(np.array(tokens, np.int64), np.array([-1, 0, 0, 2][: len(tokens)], np.int32))


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_token_that_gives_nan_changes_nothing(
    poisoned: tuple[eagle3.Engine, eagle3.Engine], rule: dict[str, Any]
) -> None:
    """Plain decoding never runs that token, and a masked NaN is still a NaN."""
    engine, whole = poisoned
    options = {**rule, "max_new_tokens": 30, "logit_bias": NEVER_BAD}
    expected = plain(whole, [5, 6], **options).token_ids
    with using(engine, _Poison([5, 6, *expected])):
        assert engine.generate([5, 6], **options, **DEEP).token_ids == expected


class _Uniform(Positions):
    """One token drawn from the uniform distribution, with the q it was drawn from."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def propose(self, request: DraftRequest) -> Tree:
        assert request.rng is not None
        token = int(request.rng.integers(self.vocab_size))
        q = np.full(self.vocab_size, 1 / self.vocab_size, np.float32)
        return Tree.chain(request.root, [token], {0: q})


def test_a_drawn_token_that_gives_nan_does_not_bias_what_is_drawn(
    poisoned: tuple[eagle3.Engine, eagle3.Engine],
) -> None:
    """Plain decoding may choose it, and fails in the next call; so must speculation, as often."""
    engine, _ = poisoned
    options = {"temperature": 1.0, "max_new_tokens": 3, "logit_bias": {BAD: 4.0}}

    def failures(**more: Any) -> int:
        count = 0
        for seed in range(500):
            try:
                engine.generate([5, 6], seed=seed, **options, **more)
            except EngineError:
                count += 1
        return count

    plainly = failures(drafter="none")
    with using(engine, _Uniform(engine.target.vocab_size)):
        drafted = failures(draft_top_k=1, draft_depth=1, num_draft_tokens=1)
    assert 50 < plainly < 450
    assert abs(plainly - drafted) < 4.5 * np.sqrt(2 * 500 * 0.25), (plainly, drafted)


# Whole characters


@pytest.fixture(scope="module")
def bytewise(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[eagle3.Engine]:
    """`bundle` with tokens that are parts of characters."""
    content = tiny.byte_tokenizer(64).to_str().encode()
    folder = tmp_path_factory.mktemp("bytewise") / "bundle"
    edited = tiny.edited_bundle(bundle, folder, {"tokenizer.json": content})
    yield eagle3.load(edited.root, threads=1)


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_never_shows_half_a_character(bytewise: eagle3.Engine, seed: int) -> None:
    options = {"temperature": 2.0, "seed": seed, "acceptance": "coupled", "logit_bias": NO_EOS}
    expected = plain(bytewise, **options, max_new_tokens=80)
    pieces = tiny.byte_pieces(64)
    whole = b"".join(pieces[token] for token in expected.token_ids)
    shown = whole.decode(errors="replace")
    # Half a character at the very end is dropped; it would be one replacement character.
    assert expected.text in (shown, shown[:-1])
    result, chunks = oracle(bytewise, expected.token_ids, **options, max_new_tokens=80)
    assert result.text == expected.text == "".join(chunk.text for chunk in chunks)
    assert result.token_ids == [token for chunk in chunks for token in chunk.token_ids]
    text = ""
    ids: list[int] = []
    for chunk in chunks:
        text, ids = text + chunk.text, ids + chunk.token_ids
        so_far = b"".join(pieces[token] for token in ids)
        assert so_far.decode(errors="replace").startswith(text)
        if chunk.result is None:
            assert whole.decode(errors="replace").startswith(text), "shown, then taken back"


def test_whole_characters_do_come_through(bytewise: eagle3.Engine) -> None:
    """The test above would pass on a text of nothing but replacement characters."""
    text = "".join(
        plain(bytewise, temperature=2.0, seed=seed, max_new_tokens=80).text for seed in range(12)
    )
    assert {"é", "€", "😀", "\ufffd"} <= set(text)


@pytest.mark.parametrize("name", ["plain", "draft"])
def test_chunks_add_up_to_the_result(engine: eagle3.Engine, name: str) -> None:
    options: dict[str, Any] = {"drafter": "none"} if name == "plain" else DEEP
    chunks = list(engine.stream(PROMPT, max_new_tokens=50, logprobs=1, **options))
    result = chunks[-1].result
    assert result is not None and all(chunk.result is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [each for chunk in chunks for each in chunk.logprobs or ()] == result.logprobs
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        result.finish_reason
    ]
    assert len(chunks) == result.stats.rounds + 1


# Bundles with less than the usual


def test_a_bundle_without_chat_template(bundle: Bundle, tmp_path: Path) -> None:
    tokenizer = replace(bundle.manifest.tokenizer, chat_template=None)
    edited = tiny.edited_bundle(
        bundle, tmp_path / "bundle", {"chat_template.jinja": None}, tokenizer=tokenizer
    )
    engine = eagle3.load(edited.root, threads=1)
    with pytest.raises(RequestError, match="no chat template"):
        engine.generate("t5 t6")
    raw = engine.generate("t5 t6", chat=False, max_new_tokens=5)
    assert raw.token_ids == engine.generate([5, 6], max_new_tokens=5).token_ids


def test_an_added_token_beyond_the_embedding_rows(bundle: Bundle, tmp_path: Path) -> None:
    tokenizer = tiny.tiny_tokenizer(64)
    tokenizer.add_tokens(["<extra>"])
    content = tokenizer.backend_tokenizer.to_str().encode()
    edited = tiny.edited_bundle(bundle, tmp_path / "bundle", {"tokenizer.json": content})
    engine = eagle3.load(edited.root, threads=1)
    with pytest.raises(RequestError, match=r"64 \('<extra>'\) at position 1.*0 to 63"):
        engine.generate("t5 <extra>", chat=False)
    assert engine.generate("t5", chat=False, max_new_tokens=3).token_ids
