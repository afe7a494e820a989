"""Rounds on the stand-in: the same tokens as on the CPU, and what a round costs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from cuda_on_host import COMPILER, compile_for_host
from numpy.typing import NDArray
from on_device import OnDevice, on_device
from programs import Arrays
from stand_in import StandInDriver
from stand_in_tensorrt import Program

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import RequestError
from eagle3.runtime.gpu.driver import Counters

PROMPT = list(range(5, 45))  # chunks of 16, 16 and 8
NO_EOS = {"logit_bias": {1: -100.0}}
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "acceptance": "coupled", "seed": 5},
    {"temperature": 0.8, "acceptance": "rejection", "seed": 3},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "acceptance": "coupled", "top_k": 9, "presence_penalty": 0.5},
]


class Forking:
    """A growth that knows the text: random branches around it, most of them true.

    It checks what it is fed: the ids that follow the rows' positions in the text.
    """

    def __init__(self, own: Program, text: Sequence[int], hit: float = 0.9) -> None:
        self.inputs, self.outputs, self.aliases = own.inputs, own.outputs, own.aliases
        self._own, self._text, self._hit = own, list(text), hit
        self._rng = np.random.default_rng(0)
        self.num_calls = 0

    def run(self, arrays: Arrays) -> None:
        self._own.run(arrays)
        self.num_calls += 1
        count, past = int(arrays["num_rows"][0]), int(arrays["past_len"][0])
        root = past + count  # its position
        fed = arrays["next_ids"][0, :count].tolist()
        warm_up = not arrays["features"].any()
        assert warm_up or root >= len(self._text) or fed == self._text[past + 1 : root + 1]
        tokens, parents, depths = [fed[-1]], [-1], [0]
        size = arrays["tokens"].shape[1]
        for _ in range(60):
            if len(tokens) == size:
                break
            parent = int(self._rng.integers(max(0, len(tokens) - 3), len(tokens)))
            where = root + depths[parent] + 1
            true = where < len(self._text) and self._rng.random() < self._hit
            token = self._text[where] if true else int(self._rng.integers(2, 64))
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            if token not in siblings and depths[parent] < 3:
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        arrays["tokens"][0, : len(tokens)] = tokens
        arrays["parents"][0, : len(tokens)] = parents
        arrays["num_nodes"][0] = len(tokens)


@pytest.fixture(scope="module")
def text(cpu: eagle3.Engine) -> list[int]:
    """Greedy tokens behind PROMPT."""
    return cpu.generate(PROMPT, drafter="none", max_new_tokens=60, **NO_EOS).token_ids


@pytest.fixture(scope="module")
def wide(portable: Bundle, tmp_path_factory: pytest.TempPathFactory) -> OnDevice:
    """`portable`, whose every tree is padded to the widest call that the engines take."""
    return on_device(portable, tmp_path_factory.mktemp("wide"), widths=(33,))


@pytest.fixture
def forking(
    portable: Bundle, tmp_path: Path, text: list[int]
) -> Iterator[tuple[OnDevice, Forking]]:
    """`portable` on the stand-in, with a growth that knows the greedy text."""
    own = on_device(portable, tmp_path, grow=lambda own: Forking(own, PROMPT + text))
    yield own, own.growth


def shown(result: eagle3.Result, rule: dict[str, Any]) -> list[int]:
    """Under `rejection` what is drawn depends on the tree, and only the CPU's gets shallower where
    few tokens are left to go."""
    return result.token_ids[:-3] if rule.get("acceptance") == "rejection" else result.token_ids


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["eagle3", "none"])
def test_the_tokens_are_those_of_the_cpu(
    device: OnDevice, cpu: eagle3.Engine, rule: dict[str, Any], drafter: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "drafter": drafter, **rule}
    expected = cpu.generate(PROMPT, **options)
    found = device.engine.generate(PROMPT, **options)
    assert shown(found, rule) == shown(expected, rule)
    assert found.finish_reason == expected.finish_reason


@pytest.mark.parametrize("rule", [{}, RULES[1]])
def test_accepted_branches_are_kept(
    forking: tuple[OnDevice, Forking], cpu: eagle3.Engine, text: list[int], rule: dict[str, Any]
) -> None:
    own, grow = forking
    options = {"max_new_tokens": 60, **NO_EOS, **rule}
    if rule:
        text = cpu.generate(PROMPT, drafter="none", **options).token_ids
        grow._text = PROMPT + text
    found = own.engine.generate(PROMPT, drafter="eagle3", **options)
    assert found.token_ids == text
    assert found.stats.acceptance_length > 2


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("rule", [{}, RULES[1]])
def test_the_cuda_source_itself_gives_the_same_text(
    portable: Bundle, cpu: eagle3.Engine, tmp_path: Path, rule: dict[str, Any]
) -> None:
    """kernels.cu in the place of its numpy version, for whole requests."""
    options = {"max_new_tokens": 40, **NO_EOS, **rule}
    text = cpu.generate(PROMPT, drafter="none", **options).token_ids
    driver = StandInDriver(kernels=lambda _: compile_for_host(tmp_path))
    own = on_device(portable, tmp_path, driver, grow=lambda own: Forking(own, PROMPT + text))
    found = own.engine.generate(PROMPT, drafter="eagle3", **options)
    assert found.token_ids == text
    assert found.stats.acceptance_length > 2


def device_slots(own: OnDevice, name: str, count: int) -> NDArray[np.float32]:
    """The first slots of one cache of the target, float32 [Hkv, count, D]."""
    halves = own.engine.device._halves  # type: ignore[union-attr]
    cache = halves.own.cache
    size = cache.num_heads * cache.capacity * cache.words
    block = own.driver.memory.view(cache.blocks[name].address, np.float32, size)
    return block.reshape(cache.num_heads, cache.capacity, cache.words)[:, :count]


def test_the_cache_is_that_of_a_fresh_prefill(
    forking: tuple[OnDevice, Forking], device: OnDevice, text: list[int]
) -> None:
    """Rewind = recompute, in every layer, after branches all over their trees were accepted."""
    own, _ = forking
    own.engine.generate(PROMPT, drafter="eagle3", max_new_tokens=60)
    whole = PROMPT + text
    device.engine.generate(whole, drafter="none", max_new_tokens=1)
    for name in ("k.0", "v.3", "k.7"):
        found, expected = (device_slots(each, name, len(whole) - 1) for each in (own, device))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_the_draft_is_fed_the_features_of_the_text(
    forking: tuple[OnDevice, Forking], device: OnDevice, text: list[int]
) -> None:
    """Its cache after rounds, and plain rounds between them, is that of one prefill."""
    own, _ = forking
    own.engine.generate(PROMPT, drafter="eagle3", max_new_tokens=60)
    device.engine.generate(PROMPT + text, drafter="eagle3", max_new_tokens=1)
    for each in (own, device):
        each.driver.synchronize()
    caches = [each.engine.device._halves.draft for each in (own, device)]  # type: ignore[union-attr]
    counts = [int(own.driver.memory.view(caches[0].past_len, np.int64, 1)[0])]  # type: ignore[union-attr]
    assert counts[0] > len(PROMPT) + 40
    for name in ("k.0", "v.0"):
        rows = []
        for each, draft in zip((own, device), caches, strict=True):
            cache = draft.cache  # type: ignore[union-attr]
            size = cache.num_heads * cache.capacity * cache.words
            block = each.driver.memory.view(cache.blocks[name].address, np.float32, size)
            rows.append(block.reshape(cache.num_heads, -1, cache.words)[:, : counts[0]])
        np.testing.assert_allclose(rows[0], rows[1], atol=1e-4, rtol=1e-4)


def rounds_of(own: OnDevice, **options: Any) -> list[Counters]:
    """What each round of a request cost, its first left out."""
    costs, before = [], None
    for _ in own.engine.stream(PROMPT, drafter="eagle3", max_new_tokens=30, **options):
        now = own.driver.counters.copy()
        if before is not None:
            costs.append(now.since(before))
        before = now
    return costs[1:]


def test_a_greedy_round_is_two_replays_one_wait_and_a_few_bytes(device: OnDevice) -> None:
    costs = rounds_of(device)
    assert len(costs) > 20
    wide = costs[:-1]  # for the last token alone there is no draft
    for cost in wide:
        assert (cost.replays, cost.synchronizations) == (2, 1)
        assert cost.bytes_to_host == 8 * (5 + 4), "five numbers, and a path as long as the tree"
        assert (cost.kernel_launches, cost.engine_launches) == (0, 0), "only inside the graphs"
    assert sum(cost.bytes_to_device for cost in wide) == 0, "nothing changes from round to round"
    assert costs[-1].replays <= 2


def test_sampling_fetches_the_rows_it_visits(
    forking: tuple[OnDevice, Forking], cpu: eagle3.Engine
) -> None:
    own, grow = forking
    rule = {"temperature": 1.0, "acceptance": "coupled", "seed": 9}
    text = cpu.generate(PROMPT, drafter="none", max_new_tokens=30, **rule).token_ids
    grow._text = PROMPT + text
    tokens, before = [], own.driver.counters.copy()
    for chunk in own.engine.stream(PROMPT, drafter="eagle3", max_new_tokens=30, **rule):
        now = own.driver.counters.copy()
        tokens.append((len(chunk.token_ids), now.since(before)))
        before = now
    assert sum(count for count, _ in tokens) == len(text)
    for visited, cost in tokens[1:-1]:
        assert cost.synchronizations == 1 + visited
        small = cost.bytes_to_host - 4 * 64 * visited
        assert 0 < small <= 8 * (5 + 4 + 3 * 7)
        assert cost.replays <= 2


@pytest.mark.parametrize("widths", [(1,), (1, 3), (2, 5, 7), (5, 16), (33,)])
def test_every_set_of_widths_gives_the_same_text(
    portable: Bundle, tmp_path: Path, text: list[int], widths: tuple[int, ...]
) -> None:
    own = on_device(portable, tmp_path, widths=widths)
    program = own.target
    program.widths.clear()
    found = own.engine.generate(PROMPT, drafter="eagle3", max_new_tokens=60, **NO_EOS)
    assert found.token_ids == text
    assert set(program.widths[3:]) <= {1, *widths}, "behind the prompt's chunks"
    assert max(program.widths[3:]) == widths[-1]


@pytest.mark.parametrize(("nodes", "width"), [(1, 2), (2, 4), (3, 4), (6, 8)])
def test_a_request_may_ask_for_fewer_nodes(
    narrow: OnDevice, text: list[int], nodes: int, width: int
) -> None:
    assert narrow.engine.device is not None and narrow.engine.device.widths == [1, 2, 4, 8]
    narrow.target.widths.clear()
    options: dict[str, Any] = {"num_draft_tokens": nodes, "max_new_tokens": 60, **NO_EOS}
    assert narrow.engine.generate(PROMPT, **options).token_ids == text
    assert max(narrow.target.widths[3:]) == width
    coupled = {**options, "temperature": 1.0, "acceptance": "coupled"}
    plain = narrow.engine.generate(PROMPT, drafter="none", **{**coupled, "num_draft_tokens": None})
    assert narrow.engine.generate(PROMPT, **coupled).token_ids == plain.token_ids


@pytest.mark.parametrize("length", [95, 96, 97, 119, 120, 128])
def test_a_padded_call_fits_the_cache_at_the_context_limit(
    portable: Bundle, cpu: eagle3.Engine, wide: OnDevice, length: int
) -> None:
    """A call of 33 rows would write behind the cache; the stand-in refuses one that does."""
    prompt = np.random.default_rng(length).integers(2, 64, length).tolist()
    options: dict[str, Any] = {"max_new_tokens": 500, **NO_EOS}
    expected = cpu.generate(prompt, drafter="none", **options)
    wide.target.widths.clear()
    found = wide.engine.generate(prompt, **options)
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, "length")
    rounds = wide.target.widths[-(-length // 16) :]
    assert (33 in rounds) == (length <= 96), "129 slots hold 33 rows behind 96"
    assert wide.growth.most_slots <= portable.manifest.plan.max_seq_len + 4


def test_the_last_slot_is_used(wide: OnDevice) -> None:
    wide.engine.generate(list(range(2, 62)), max_new_tokens=500, **NO_EOS)
    assert wide.target.most_slots == wide.target.capacity == 129


def test_another_growth_than_the_compiled_one_is_refused(device: OnDevice) -> None:
    for options, message in (
        ({"draft_top_k": 2}, "draft_top_k is 2, but the draft was compiled for 3"),
        ({"draft_depth": 1}, "draft_depth is 1, but"),
        ({"num_draft_tokens": 7}, "num_draft_tokens is 7, but the draft was .* trees of 6"),
        ({"tree": "eagle1"}, "the tree is static, but on the GPU"),
        ({"tree": [[0], [1]]}, "the tree is static, but on the GPU"),
    ):
        with pytest.raises(RequestError, match=message):
            device.engine.generate(PROMPT, **options)


@pytest.mark.parametrize("length", [110, 121, 122, 123, 124, 125, 126, 127, 128])
def test_the_tree_shrinks_at_the_context_limit(
    device: OnDevice, cpu: eagle3.Engine, length: int
) -> None:
    prompt = np.random.default_rng(length).integers(2, 64, length).tolist()
    for rule in RULES[:2]:
        options: dict[str, Any] = {"max_new_tokens": 500, **NO_EOS, **rule}
        expected = cpu.generate(prompt, drafter="none", **options)
        for drafter in ("eagle3", "none"):
            found = device.engine.generate(prompt, drafter=drafter, **options)
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, "length")
    device.driver.memory.check_guards()


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 8])
def test_max_new_tokens_in_mid_path(
    forking: tuple[OnDevice, Forking], text: list[int], limit: int
) -> None:
    own, _ = forking
    found = own.engine.generate(PROMPT, drafter="eagle3", max_new_tokens=limit, **NO_EOS)
    assert (found.token_ids, found.finish_reason) == (text[:limit], "length")


def test_a_rested_draft_goes_on_where_the_text_is(
    forking: tuple[OnDevice, Forking], text: list[int]
) -> None:
    """Rounds without a draft feed it all the same: `Forking` checks every row that it gets."""
    own, grow = forking
    rounds = own.engine.stream(PROMPT, drafter="eagle3", max_new_tokens=60)
    next(rounds)
    from eagle3.runtime.rounds.pace import Pace

    calls = itertools.chain([True, False] * 3 + [False] * 6, itertools.repeat(True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "should_draft", lambda self: next(calls))
        tokens = [token for chunk in rounds for token in chunk.token_ids]
    assert text[1:] == tokens
    assert grow.num_calls > 5


def test_cancelled_in_the_prompt_and_in_a_round(device: OnDevice, cpu: eagle3.Engine) -> None:
    cancel = threading.Event()
    cancel.set()
    found = device.engine.generate(PROMPT, cancel=cancel)
    assert (found.finish_reason, found.token_ids) == ("cancelled", [])
    cancel = threading.Event()
    stream = device.engine.stream(PROMPT, cancel=cancel, max_new_tokens=50, **NO_EOS)
    seen = [next(stream) for _ in range(4)]
    cancel.set()
    (last,) = stream
    assert last.result is not None and last.finish_reason == "cancelled"
    assert last.result.token_ids == [token for chunk in seen for token in chunk.token_ids]
    abandoned = device.engine.stream(PROMPT, max_new_tokens=50)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    options: dict[str, Any] = {"max_new_tokens": 30, "drafter": "eagle3"}
    for rule in RULES:
        expected, found = (e.generate([8, 9, 10], **options, **rule) for e in (cpu, device.engine))
        assert shown(found, rule) == shown(expected, rule)


def test_a_stream_may_be_read_by_several_threads(device: OnDevice, text: list[int]) -> None:
    stream = device.engine.stream(PROMPT, max_new_tokens=20, **NO_EOS)
    tokens: list[int] = []
    for _ in range(8):
        with ThreadPoolExecutor(1) as other:
            tokens += other.submit(next, stream).result().token_ids
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == text[:20]


def test_log_probabilities(device: OnDevice, cpu: eagle3.Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "logprobs": 3, "drafter": "eagle3"}
    found, expected = (each.generate(PROMPT, **options) for each in (device.engine, cpu))
    assert found.logprobs is not None and expected.logprobs is not None
    assert [p.token_id for p in found.logprobs] == [p.token_id for p in expected.logprobs]
    np.testing.assert_allclose(
        [p.logprob for p in found.logprobs], [p.logprob for p in expected.logprobs], atol=1e-4
    )


def test_a_sliding_window(
    windowed_bundle: Bundle, windowed_engine: eagle3.Engine, tmp_path: Path
) -> None:
    """Another architecture, whose layers see 16 tokens; its head's vocabulary is whole."""
    own = on_device(windowed_bundle, tmp_path)
    prompt = list(range(3, 30))
    for rule in RULES[:2]:
        options: dict[str, Any] = {"max_new_tokens": 50, **NO_EOS, **rule}
        expected = windowed_engine.generate(prompt, drafter="none", **options)
        assert own.engine.generate(prompt, **options).token_ids == expected.token_ids


@pytest.mark.parametrize("without", ["a draft", "its growth"])
def test_a_bundle_without_a_draft_decodes_plainly(
    portable: Bundle, tmp_path: Path, text: list[int], without: str
) -> None:
    engines = dict(portable.manifest.engines)
    edits: dict[str, Any] = {"drafts": {}} if without == "a draft" else {}
    del engines["eagle3.draft_tree"]
    bundle = tiny.edited_bundle(portable, tmp_path / "edited", engines=engines, **edits)
    own = on_device(bundle, tmp_path)
    assert own.engine.drafters == ["none"]
    assert own.engine.generate(PROMPT, max_new_tokens=60, **NO_EOS).token_ids == text
    with pytest.raises(RequestError, match="available here: none|this bundle has: none"):
        own.engine.generate(PROMPT, drafter="eagle3")
