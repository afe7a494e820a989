"""The whole runtime on tiny random models: whatever drafts, the text is the target's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from drafting import Fixed, Forking, Itself, Oracle, using

import eagle3
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle

TREES = [(1, 1, 1), (1, 5, 5), (3, 3, 6), (4, 4, 10), (8, 2, 30)]
NUM_TOKENS = 100
# Each is a way to choose tokens; greedy where it names no temperature.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 7},
    "cold": {"temperature": 0.01},
    "hot": {"temperature": 20.0},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
    "all_filters": {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.3},
    "rewarded": {"temperature": 1.0, "repetition_penalty": 0.8},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": -0.5},
    "banned": {"logit_bias": {3: -100.0, 17: -100.0, 1: -100.0}},
    "forced": {"temperature": 1.0, "logit_bias": {63: 100.0}, "presence_penalty": 2.0},
}


def sizes(tree: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("draft_top_k", "draft_depth", "num_draft_tokens"), tree, strict=True))


def prompts(count: int, vocab_size: int = 64) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, vocab_size, rng.integers(1, 28)).tolist() for _ in range(count)]


def plain(engine: eagle3.Engine, prompt: list[int], **options: Any) -> eagle3.Result:
    options = {"max_new_tokens": NUM_TOKENS, "acceptance": "coupled", **options}
    return engine.generate(prompt, drafter="none", **options)


def drafted(engine: eagle3.Engine, prompt: list[int], tree: Any, **options: Any) -> eagle3.Result:
    options = {"max_new_tokens": NUM_TOKENS, "acceptance": "coupled", **options}
    return engine.generate(prompt, **sizes(tree), **options)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_every_tree_gives_the_text_of_plain_decoding(engine: eagle3.Engine, rule: str) -> None:
    """Fails with any wrong mask, position, KV move, feature or token: the head is random."""
    num_accepted = 0.0
    for prompt in prompts(8):
        expected = plain(engine, prompt, **OPTIONS[rule]).token_ids
        for tree in TREES:
            result = drafted(engine, prompt, tree, **OPTIONS[rule])
            assert result.token_ids == expected, (prompt, tree)
            num_accepted += len(expected) - 1 - result.stats.rounds
    assert num_accepted > 100, "a draft that is never accepted tests nothing"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_sampling_option_acts_the_same_with_a_draft(engine: eagle3.Engine, name: str) -> None:
    """Deep accepted paths, so that penalties must see the tokens of the path."""
    for prompt in prompts(3):
        expected = plain(engine, prompt, **OPTIONS[name])
        text = prompt + expected.token_ids
        with using(engine, Forking(text, 64)):
            result = drafted(engine, prompt, (3, 5, 14), **OPTIONS[name])
        assert result.token_ids == expected.token_ids
        assert result.text == expected.text
        if len(expected.token_ids) > 20:
            assert result.stats.acceptance_length > 1.5


def test_options_are_not_ignored(engine: eagle3.Engine) -> None:
    """Otherwise their equality would say nothing."""
    texts = {
        name: tuple(tuple(plain(engine, p, **options).token_ids) for p in prompts(3))
        for name, options in OPTIONS.items()
    }
    assert len(set(texts.values())) == len(OPTIONS)
    assert not {3, 17, 1} & {token for text in texts["banned"] for token in text}


def test_a_draft_that_knows_the_text_is_accepted_whole(engine: eagle3.Engine) -> None:
    prompt = prompts(1)[0]
    for options in (OPTIONS["greedy"], OPTIONS["coupled"]):
        options = {**options, "logit_bias": {1: -100.0}}
        expected = plain(engine, prompt, **options, max_new_tokens=97).token_ids
        oracle = Oracle(prompt + expected)
        with using(engine, oracle):
            result = drafted(engine, prompt, (1, 5, 5), **options, max_new_tokens=97)
        assert result.token_ids == expected
        assert (result.stats.rounds, oracle.proposals) == (16, 16)  # 1 + 16 * (5 + 1) tokens
        assert result.stats.acceptance_length == 6.0
        assert result.stats.accepted_by_position == (1.0,) * 5


def test_a_draft_that_is_the_target_is_accepted_whole_when_sampled(
    engine: eagle3.Engine, bundle: Bundle
) -> None:
    """q = p: every ratio is 1. A q of another temperature or a wrong residual shows here."""
    draft = Itself(eagle3.load(bundle.root, threads=1))
    options = {"temperature": 0.8, "acceptance": "rejection", "max_new_tokens": 81}
    for seed in range(3):
        with using(engine, draft):
            result = drafted(engine, prompts(1)[0], (1, 4, 4), seed=seed, **options)
        if result.finish_reason == "length":
            assert (result.stats.rounds, result.stats.acceptance_length) == (16, 5.0)
        assert set(result.stats.accepted_by_position) == {1.0}


@pytest.mark.parametrize("tokens", [[0] * 5, [5, 64, 7], [-1, -1], [2**40], [7, 9, 11, 13, 15]])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_garbage_proposals_change_nothing(
    engine: eagle3.Engine, tokens: list[int], rule: str
) -> None:
    """Also ids that are no tokens, which a gather would read out of bounds, or from the end."""
    options: dict[str, Any] = {"max_new_tokens": 40}
    if rule == "rejection":
        options |= {"temperature": 1.0, "acceptance": "rejection"}
    else:
        options |= OPTIONS[rule]
    prompt = prompts(1)[0]
    with using(engine, Fixed(tokens)):
        result = drafted(engine, prompt, (1, 5, 5), **options)
    assert all(0 <= token < 64 for token in result.token_ids)
    if rule != "rejection":
        assert result.token_ids == plain(engine, prompt, **options).token_ids


@pytest.fixture(scope="session", params=["nan", "inf"])
def broken_head(
    bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[eagle3.Engine]:
    """`bundle` with a head whose every matrix is NaN, or infinite; export would refuse it."""
    folder = tmp_path_factory.mktemp("broken") / request.param
    count = bundle.path("eagle3.draft.onnx.data").stat().st_size // 4
    weights = np.full(count, float(request.param), np.float32).tobytes()
    edited = tiny.edited_bundle(bundle, folder, {"eagle3.draft.onnx.data": weights})
    yield eagle3.load(edited.root, threads=1)


@pytest.mark.parametrize("tree", [(3, 3, 6), (1, 4, 4)])
def test_a_head_of_nan_or_infinity_changes_nothing(
    broken_head: eagle3.Engine, engine: eagle3.Engine, tree: Any
) -> None:
    for rule in ("greedy", "coupled"):
        prompt = prompts(2)[1]
        result = drafted(broken_head, prompt, tree, **OPTIONS[rule])
        assert result.token_ids == plain(engine, prompt, **OPTIONS[rule]).token_ids
        assert result.stats.acceptance_length == 1.0
    sampled = drafted(broken_head, [5], tree, temperature=1.0, acceptance="rejection")
    again = plain(broken_head, [5], temperature=1.0, acceptance="rejection")
    assert sampled.token_ids == again.token_ids  # no draft token: the same draws


def test_logprobs_of_every_token_are_the_models_own(engine: eagle3.Engine, llama: Any) -> None:
    """Also of tokens deep in an accepted path; `top` holds the best, best first."""
    prompt = prompts(1)[0]
    for options in ({}, {"temperature": 1.2, "top_k": 7, "repetition_penalty": 1.2}):
        expected = plain(engine, prompt, **options)
        with using(engine, Forking(prompt + expected.token_ids, 64)):
            result = drafted(engine, prompt, (3, 6, 16), **options, logprobs=3)
        assert result.token_ids == expected.token_ids and result.logprobs is not None
        ids = torch.tensor([prompt + result.token_ids])
        reference = llama(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        rows = reference[len(prompt) - 1 : -1]
        assert [each.token_id for each in result.logprobs] == result.token_ids
        for each, row in zip(result.logprobs, rows, strict=True):
            assert each.logprob == pytest.approx(float(row[each.token_id]), abs=2e-4)
            best = row.topk(3)
            assert [p for _, p in each.top] == pytest.approx(best.values.tolist(), abs=2e-4)
            assert {i for i, _ in each.top} == set(best.indices.tolist())


def test_a_sliding_window_holds_in_wide_calls(
    windowed: Any, windowed_engine: eagle3.Engine
) -> None:
    """A path longer than the window, a prompt and a text beyond it and the head's own limit."""
    assert windowed.config.sliding_window == 16
    engine, prompt = windowed_engine, prompts(1, 32)[0] * 2
    bias = {"logit_bias": {1: -100.0}, "max_new_tokens": 128 - len(prompt)}
    expected = plain(engine, prompt, **bias).token_ids
    ids = torch.tensor([prompt + expected])
    logits = windowed(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits[:, 1] = -torch.inf
    assert logits.argmax(-1).tolist() == expected
    for drafter, tree in (
        (Oracle(prompt + expected), (1, 24, 24)),
        (Forking(prompt + expected, 32, hit=0.95), (2, 24, 32)),
        (engine._drafters["eagle3"], (4, 4, 10)),
    ):
        with using(engine, drafter):
            assert drafted(engine, prompt, tree, **bias).token_ids == expected


@pytest.mark.parametrize("tree", [(32, 1, 32), (30, 3, 31), (5, 2, 3), (2, 2, 32), (1, 1, 32)])
def test_full_and_tiny_draft_vocabularies(
    small_engine: eagle3.Engine, windowed_engine: eagle3.Engine, tree: Any
) -> None:
    """Vd = 8 and Vd = V; more children asked for than tokens, more nodes than candidates."""
    for engine, sizes in ((small_engine, (16, 8)), (windowed_engine, (32, 32))):
        manifest = engine.bundle.manifest
        assert manifest.draft is not None
        assert (manifest.target.vocab_size, manifest.draft.draft_vocab_size) == sizes
        for rule in ("greedy", "coupled"):
            for prompt in prompts(3, sizes[0]):
                expected = plain(engine, prompt, **OPTIONS[rule]).token_ids
                assert drafted(engine, prompt, tree, **OPTIONS[rule]).token_ids == expected
        sampled = drafted(engine, [4], tree, temperature=1.0, acceptance="rejection")
        assert all(0 <= token < sizes[0] for token in sampled.token_ids)


def test_the_bundles_own_tree_is_used(engine: eagle3.Engine) -> None:
    assert engine.plan.tree == TreePlan(3, 3, 6)
    result = engine.generate([5, 6], max_new_tokens=10)
    assert len(result.stats.accepted_by_position) == 3
