"""Speculation is switched off while it costs more than it gains, and changes no token by that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from drafting import Fixed, Oracle, using

import eagle3
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.rounds.pace import _REST, _SAMPLES, _STALE, _WINDOW, Pace, PlainCost
from eagle3.runtime.trees.tree import Tree

PLAIN_NS = 1_000_000
COUPLED = {"temperature": 1.0, "acceptance": "coupled", "seed": 5}
NEVER = 9  # a token that the bias below keeps out of every text
BIAS = {1: -100.0, NEVER: -1000.0}


def timed_plain() -> PlainCost:
    cost = PlainCost()
    for _ in range(_SAMPLES):
        cost.record(PLAIN_NS)
    return cost


def draft(pace: Pace, rounds: int, tokens: int, time_ns: int) -> None:
    for _ in range(rounds):
        assert pace.should_draft()
        pace.record_draft(tokens, time_ns)


def test_it_drafts_while_a_token_costs_less_than_plain() -> None:
    pace = Pace(True, True, timed_plain())
    draft(pace, 10 * _WINDOW, 2, int(1.9 * PLAIN_NS))
    assert not pace.fell_back


def test_a_small_loss_is_within_the_noise_and_a_larger_one_is_not() -> None:
    small, large = Pace(True, True, timed_plain()), Pace(True, True, timed_plain())
    draft(small, _WINDOW, 2, int(2 * 1.02 * PLAIN_NS))
    assert small.should_draft()
    draft(large, _WINDOW, 2, int(2 * 1.08 * PLAIN_NS))
    assert not large.should_draft()
    assert (small.fell_back, large.fell_back) == (False, True)


def test_it_measures_a_plain_round_before_it_judges() -> None:
    pace = Pace(True, True)
    draft(pace, _WINDOW, 1, 2 * PLAIN_NS)
    for _ in range(_SAMPLES):
        assert not pace.should_draft() and not pace.fell_back
        pace.record_plain(PLAIN_NS)
    assert not pace.should_draft() and pace.fell_back


def test_it_tries_again_after_a_rest() -> None:
    pace = Pace(True, True, timed_plain())
    draft(pace, _WINDOW, 1, 2 * PLAIN_NS)
    rests = 0
    while not pace.should_draft():
        pace.record_plain(PLAIN_NS)
        rests += 1
    assert _REST <= rests <= _REST + 1
    pace.record_draft(4, 2 * PLAIN_NS)
    draft(pace, 3 * _WINDOW, 4, 2 * PLAIN_NS)
    assert pace.fell_back, "that it fell back at all is what the statistics say"


def test_the_plain_cost_is_measured_again_when_it_is_old() -> None:
    """It grows with the context: one of a short text would judge a long one."""
    pace = Pace(True, True, timed_plain())
    drafted = 0
    while pace.should_draft():
        pace.record_draft(3, 2 * PLAIN_NS)
        drafted += 1
    assert _STALE <= drafted <= _STALE + _WINDOW and not pace.fell_back
    for _ in range(_SAMPLES):
        pace.record_plain(5 * PLAIN_NS)
    assert pace.plain.ns == 5 * PLAIN_NS, "what was measured before is forgotten"
    draft(pace, _WINDOW, 3, 12 * PLAIN_NS)


def test_by_acceptance_times_do_not_matter() -> None:
    slow, useless = Pace(True, False), Pace(True, False)
    draft(slow, 3 * _WINDOW, 2, 10**12)
    draft(useless, _WINDOW, 1, 1)
    assert slow.should_draft() and not useless.should_draft()


def test_disabled_it_always_drafts() -> None:
    pace = Pace(False, True, timed_plain())
    draft(pace, 10 * _WINDOW, 1, 10**12)
    assert not pace.fell_back


_record = PlainCost.record


class _Slow:
    """A drafter that takes its time."""

    name = "slow"
    proposes = True

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.reset, self.observe, self.rewind = drafter.reset, drafter.observe, drafter.rewind

    def propose(self, request: DraftRequest) -> Tree:
        time.sleep(0.004)
        return self.drafter.propose(request)  # type: ignore[no-any-return]


def run(engine: eagle3.Engine, prompt: Sequence[int], **options: Any) -> eagle3.Result:
    return engine.generate(prompt, **{"max_new_tokens": 127, "logit_bias": BIAS, **options})


@pytest.mark.parametrize("rule", [{}, COUPLED])
def test_a_draft_that_costs_too_much_is_dropped(
    engine: eagle3.Engine, rule: dict[str, Any]
) -> None:
    expected = run(engine, [4], **rule, drafter="none")
    useless = Fixed([NEVER] * 3)
    with using(engine, _Slow(useless)):
        result = run(engine, [4], **rule)
    assert result.token_ids == expected.token_ids
    assert result.stats.fell_back and result.stats.plain_rounds >= _REST
    assert useless.proposals > _WINDOW, "it got a second chance"
    assert result.stats.rounds == 126


@pytest.mark.parametrize("rule", [{}, COUPLED])
def test_a_draft_that_pays_is_kept(
    engine: eagle3.Engine, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the engine's next request, which knows what a plain round costs."""
    # Times of a busy machine must not decide a test: plain rounds count as a second each.
    monkeypatch.setattr(engine, "_plain_cost", PlainCost())
    monkeypatch.setattr(PlainCost, "record", lambda cost, _: _record(cost, 1_000_000_000))
    expected = run(engine, [4], **rule, drafter="none")
    with using(engine, Oracle([4, *expected.token_ids])):
        for _ in range(2):
            result = run(engine, [4], **rule)
            assert result.token_ids == expected.token_ids
            assert not result.stats.fell_back


def test_a_head_without_numbers_is_dropped(engine: eagle3.Engine) -> None:
    """It proposes nothing, yet it costs: such rounds are its own, not plain ones."""
    with using(engine, _Slow(Fixed([]))):
        result = run(engine, [4])
    assert result.stats.fell_back
    assert result.token_ids == run(engine, [4], drafter="none").token_ids


@pytest.mark.parametrize(
    "explicit",
    [{"drafter": "eagle3"}, {"draft_top_k": 2}, {"draft_depth": 3}, {"num_draft_tokens": 4}],
)
def test_who_names_a_draft_gets_it(engine: eagle3.Engine, explicit: dict[str, Any]) -> None:
    useless = Fixed([NEVER])
    with using(engine, useless):
        result = run(engine, [4], **explicit)
    assert not result.stats.fell_back
    assert useless.proposals == result.stats.rounds - 1  # one token left needs no draft


def test_rejection_falls_back_by_acceptance_alone(engine: eagle3.Engine) -> None:
    """Whether the machine is busy must not show in the text of a seed."""
    options: dict[str, Any] = {"temperature": 1.0, "acceptance": "rejection", "seed": 11}
    found = []
    for drafter in (Fixed([NEVER]), _Slow(Fixed([NEVER]))):
        with using(engine, drafter):
            found.append(run(engine, [4], **options))
    assert found[0].token_ids == found[1].token_ids
    assert found[0].stats.fell_back and found[1].stats.fell_back
    assert found[0].stats.plain_rounds == found[1].stats.plain_rounds
    with using(engine, _Slow(Oracle([4]))):  # nothing to propose: acceptance length 1
        assert run(engine, [4], **options).stats.fell_back


def test_the_same_seed_gives_the_same_text_twice(engine: eagle3.Engine) -> None:
    """With the bundle's own head, tree and fallback; before and after other requests."""
    for seed in range(4):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        first = run(engine, [4, 6], **options)
        run(engine, [8, 9], temperature=0.5)
        run(engine, [7], drafter="none")
        assert run(engine, [4, 6], **options).token_ids == first.token_ids
