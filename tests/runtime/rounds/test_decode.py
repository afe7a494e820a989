"""The round loop and its caches: what is called, what is kept, what is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from drafting import Forking, Oracle, Positions, using

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.ort.kv_cache import KvCache
from eagle3.runtime.ort.session import Session
from eagle3.runtime.trees.tree import Tree

PROMPT = list(range(5, 25))
DEEP = {"draft_top_k": 3, "draft_depth": 6, "num_draft_tokens": 16}
NO_EOS = {"logit_bias": {1: -100.0}}


@pytest.fixture
def fresh(bundle: Bundle) -> Iterator[eagle3.Engine]:
    """An engine that served no request."""
    yield eagle3.load(bundle.root, threads=1)


def plain(engine: eagle3.Engine, prompt: Any = PROMPT, **options: Any) -> eagle3.Result:
    return engine.generate(prompt, drafter="none", **options)


def slots(cache: KvCache, count: int) -> Any:
    return cache.block[..., :count, :]


def test_kept_slots_are_those_of_a_fresh_prefill(
    engine: eagle3.Engine, fresh: eagle3.Engine
) -> None:
    """Rewind = recompute, after rounds that accepted parts of paths all over their trees."""
    expected = plain(engine, max_new_tokens=90, **NO_EOS).token_ids
    with using(engine, Forking(PROMPT + expected, 64)):
        result = engine.generate(PROMPT, max_new_tokens=90, **NO_EOS, **DEEP)
    assert result.token_ids == expected
    assert 1.5 < result.stats.acceptance_length < 6
    text = PROMPT + expected
    fresh.generate(text, max_new_tokens=1)
    found, reference = (slots(each.target._cache, len(text) - 1) for each in (engine, fresh))
    np.testing.assert_allclose(found, reference, atol=1e-5, rtol=1e-5)


def test_the_draft_keeps_rows_of_target_features_only(
    engine: eagle3.Engine, fresh: eagle3.Engine
) -> None:
    """Its own guesses are overwritten: its cache is that of a draft that never guessed."""
    result = engine.generate(PROMPT, max_new_tokens=80, **NO_EOS, **DEEP)
    assert result.stats.acceptance_length > 1.0
    fresh.generate(PROMPT + result.token_ids, max_new_tokens=3, drafter="eagle3")
    found, reference = (each._drafters["eagle3"]._engine for each in (engine, fresh))
    count = found.num_rows
    assert len(PROMPT) + 50 < count <= reference.num_rows
    np.testing.assert_allclose(
        slots(found._cache, count), slots(reference._cache, count), atol=1e-5, rtol=1e-5
    )


class _DeepFork(Positions):
    """Two branches that share their first tokens; the wrong one goes on with the right tokens.

    Wrong KV anywhere below the fork (a cousin's, a sibling's) changes the logits that follow.
    """

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.text = text

    def propose(self, request: DraftRequest) -> Tree:
        true = self.text[self.seen + 1 : self.seen + 7]
        if len(true) < 6:
            return Tree.root_only(request.root)
        wrong = (true[2] + 1) % 64
        # root 0 - 1 - 2 - wrong 3 - 4 - 5 - 6
        #                \ right 7 - 8 - 9 - 10
        tokens = [request.root, *true[:2], wrong, *true[3:6], *true[2:6]]
        parents = [-1, 0, 1, 2, 3, 4, 5, 2, 7, 8, 9]
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))


def test_branches_that_part_deep_down_do_not_see_each_other(
    engine: eagle3.Engine, fresh: eagle3.Engine
) -> None:
    expected = plain(engine, max_new_tokens=78, logprobs=1, **NO_EOS)
    with using(engine, _DeepFork(PROMPT + expected.token_ids)):
        result = engine.generate(PROMPT, max_new_tokens=78, logprobs=1, **NO_EOS, **DEEP)
    assert result.token_ids == expected.token_ids
    assert result.stats.accepted_by_position[5] == 1.0
    assert result.logprobs is not None and expected.logprobs is not None
    found, reference = ([p.logprob for p in each.logprobs] for each in (result, expected))
    assert found == pytest.approx(reference, abs=1e-4)
    fresh.generate(PROMPT + expected.token_ids, max_new_tokens=1)
    count = len(PROMPT) + 77
    np.testing.assert_allclose(
        slots(engine.target._cache, count), slots(fresh.target._cache, count), atol=1e-5
    )


def test_a_round_is_one_target_call_and_one_draft_call_a_level(fresh: eagle3.Engine) -> None:
    calls = fresh._clock.calls
    for depth in (1, 2, 5):
        calls.clear()
        result = fresh.generate(
            PROMPT, max_new_tokens=50, draft_top_k=3, draft_depth=depth, num_draft_tokens=9
        )
        prefills, rounds = 2, result.stats.rounds  # 20 tokens in chunks of 16
        assert calls["target"] == prefills + rounds
        cut = depth * (rounds - depth)  # the last rounds have fewer tokens to go
        assert cut <= calls["eagle3.draft"] <= depth * rounds
    calls.clear()
    assert plain(fresh, max_new_tokens=50).stats.rounds == 49
    assert calls == {"target": 2 + 49}


def test_a_long_prompt_never_has_more_logits_than_its_last_row(
    fresh: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Any] = []
    run = Session.run
    monkeypatch.setattr(
        Session, "run", lambda self, key, values: keys.append(key) or run(self, key, values)
    )
    plain(fresh, [7] * 70, max_new_tokens=1)
    assert keys == [(16, 1, False)] * 4 + [(6, 1, False)]


def test_past_and_present_are_one_buffer_that_is_never_moved(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[dict[str, Any], dict[str, Any]]] = []
    bind = Session._bind
    monkeypatch.setattr(
        Session,
        "_bind",
        lambda self, inputs, outputs: (
            bound.append((dict(inputs), dict(outputs))) or bind(self, inputs, outputs)
        ),
    )
    engine = eagle3.load(bundle.root, threads=1)
    engine.generate(PROMPT, max_new_tokens=30, drafter="eagle3")
    caches = (engine.target._cache, engine._drafters["eagle3"]._engine._cache)  # type: ignore[attr-defined]
    addresses = {block.ctypes.data for cache in caches for kind in cache.block for block in kind}
    found = set()
    for inputs, outputs in bound:
        for name, value in inputs.items():
            if name.startswith("past_") and name != "past_len":
                present = outputs[name.replace("past_", "present_")]
                assert value.data_ptr() == present.data_ptr()
                found.add(value.data_ptr())
    assert found == addresses
    num_bound = len(bound)
    again = engine.generate(PROMPT, max_new_tokens=30, drafter="eagle3")
    assert len(bound) == num_bound, "the same request binds nothing new"
    assert again.stats.rounds > 0
    assert np.abs(engine.target._cache.block[..., :48, :]).max() > 0, "written in place"


def test_bindings_are_bounded_by_the_plan(fresh: eagle3.Engine) -> None:
    """Every request that may come leaves no more behind than the shapes of the plan."""
    for seed in range(6):
        for tree in ((1, 3, 3), (3, 3, 6), (2, 4, 8)):
            sizes = dict(zip(("draft_top_k", "draft_depth", "num_draft_tokens"), tree, strict=True))
            fresh.generate(
                PROMPT[: 5 + seed], max_new_tokens=60, temperature=1.0, seed=seed, **sizes
            )
    sessions = (fresh.target._session, fresh._drafters["eagle3"]._engine._session)  # type: ignore[attr-defined]
    assert max(len(each._bindings) for each in sessions) < 80


def test_stats_agree_with_the_tokens(engine: eagle3.Engine) -> None:
    expected = plain(engine, max_new_tokens=61, **NO_EOS)
    with using(engine, Forking(PROMPT + expected.token_ids, 64)):
        result = engine.generate(PROMPT, max_new_tokens=61, **NO_EOS, **DEEP)
    for each in (expected, result):
        stats = each.stats
        assert stats.rounds * stats.acceptance_length == pytest.approx(len(each.token_ids) - 1)
        speed = 1000 * (len(each.token_ids) - 1) / stats.decode_ms
        assert stats.tokens_per_second == pytest.approx(speed)
        assert 0 < stats.engine_ms < stats.decode_ms and stats.prefill_ms > 0
    assert expected.stats.plain_rounds == expected.stats.rounds == 60
    assert expected.stats.accepted_by_position == ()
    by_position = result.stats.accepted_by_position
    assert list(by_position) == sorted(by_position, reverse=True)
    assert result.stats.to_json()["accepted_by_position"] == list(by_position)


def test_stats_count_a_text_that_ends_inside_a_path(engine: eagle3.Engine) -> None:
    """Tokens that were accepted behind the end were never shown: they are no speed."""
    text = plain(engine, max_new_tokens=40, **NO_EOS).token_ids
    stop = next(i for i in range(9, 40) if text[i] not in text[:i])
    with using(engine, Oracle(PROMPT + text)):
        result = engine.generate(
            PROMPT, max_new_tokens=40, stop=[f"t{text[stop]}"], **NO_EOS, **DEEP
        )
    stats = result.stats
    assert stats.rounds * stats.acceptance_length == pytest.approx(len(result.token_ids) - 1)
    assert stats.tokens_per_second == pytest.approx(
        1000 * (len(result.token_ids) - 1) / stats.decode_ms
    )


def test_the_consumers_time_is_not_counted(engine: eagle3.Engine) -> None:
    start, result = time.perf_counter(), None
    for chunk in engine.stream(PROMPT, max_new_tokens=12, **NO_EOS):
        time.sleep(0.02)
        result = chunk.result
    elapsed_ms = 1000 * (time.perf_counter() - start)
    assert result is not None
    rounds = result.stats.rounds
    assert elapsed_ms > 20 * rounds
    assert result.stats.decode_ms + result.stats.prefill_ms < elapsed_ms - 20 * rounds
