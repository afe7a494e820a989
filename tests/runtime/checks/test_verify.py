"""Test that `verify` passes on a good bundle and fails if the acceptance is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import eagle3
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.acceptance import accept, rules
from eagle3.runtime.acceptance.accept import Accepted
from eagle3.runtime.checks.noise import measure_noise
from eagle3.runtime.checks.rejection_check import RejectionCheck, significant
from eagle3.runtime.checks.verify import VerifyReport, verify
from eagle3.runtime.errors import RequestError
from eagle3.runtime.text.prompt_files import PROMPTS, load_prompts
from eagle3.runtime.trees.tree import Tree

TEXTS = ("t3 t5 t7", "t9 t2 t40 t11 t12", "t33")


def verified(engine: eagle3.Engine, num_walks: int = 10, **options: Any) -> VerifyReport:
    return verify(engine, TEXTS, 24, num_walks=num_walks, **options)


def test_a_good_bundle_passes(engine: eagle3.Engine) -> None:
    told: list[str] = []
    report = verified(engine, num_walks=500, report=told.append)
    assert report.passed, report.lines()
    # Two rules, each with the plan's tree and the wide tree.
    assert {(each.rule, each.tree) for each in report.equality} == {
        (rule, tree)
        for rule in ("greedy", "coupled")
        for tree in (engine.plan.tree, TreePlan(4, 4, 10))
    }
    # A tree other than the plan's runs on every fourth prompt.
    counts = {(each.tree == engine.plan.tree, each.num_prompts) for each in report.equality}
    assert counts == {(True, 3), (False, 1)}
    assert all(each.num_tokens > 0 for each in report.equality)
    # The chi-square tests cover dynamic trees and a sampled chain, in three contexts.
    assert {each.tree.draft_top_k for each in report.rejection} == {1, 3, 4}
    assert {each.context for each in report.rejection} == {0, 1, 2}
    assert 0.0 <= report.noise < 1e-3
    assert sum("prompt 3 of 3" in line for line in told) == 2 + 2 * 2  # plain, two drafters
    assert report.lines()[-1] == "verify: passed"
    assert report.to_json()["passed"] is True


def test_a_greedy_walk_that_accepts_a_wrong_child_fails(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_first_child(tree: Tree, choose: Callable[[int], int]) -> Accepted:
        children = tree.children(0)
        return Accepted(children[:1], choose(children[0] if children else 0))

    monkeypatch.setattr(rules, "accept_by_token", accept_first_child)
    report = verified(engine)
    assert not report.passed
    found = [each for each in report.equality if each.rule == "greedy"][0].divergences[0]
    assert found.plain_token != found.draft_token
    assert found.margin is not None and found.margin > report.noise
    assert any("FAILURE" in line for line in report.lines())
    assert report.lines()[-1] == "verify: FAILED"


def test_coupled_draws_that_depend_on_the_draft_fail(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = rules.sample_inverse_cdf
    monkeypatch.setattr(
        rules, "sample_inverse_cdf", lambda p, u: draw(p, u if _is_plain[0] else 0.5 * u)
    )
    _is_plain = [True]
    generate = engine.generate

    def spied(prompt: Any, **options: Any) -> eagle3.Result:
        _is_plain[0] = options["drafter"] == "none"
        return generate(prompt, **options)

    monkeypatch.setattr(engine, "generate", spied)
    report = verified(engine)
    assert not report.passed
    failed = [each for each in report.equality if each.divergences]
    assert {each.rule for each in failed} == {"coupled"}
    assert all(each.margin is not None for each in failed[0].divergences)


def test_a_residual_that_is_not_subtracted_fails(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "_residual", lambda p, p_mass, q, q_mass: p)
    report = verify(engine, TEXTS[:1], 2, num_walks=2000)
    assert {each.tree.draft_top_k for each in significant(report.rejection)} == {1}
    assert not report.passed


def test_lower_precision_forgives_what_lies_within_the_noise(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_first_child(tree: Tree, choose: Callable[[int], int]) -> Accepted:
        children = tree.children(0)
        return Accepted(children[:1], choose(children[0] if children else 0))

    monkeypatch.setattr(rules, "accept_by_token", accept_first_child)
    monkeypatch.setattr(engine, "plan", replace(engine.plan, dtype="float16"))
    assert not verified(engine).passed  # margins far above the noise
    monkeypatch.setattr("eagle3.runtime.checks.verify.measure_noise", lambda *_: 100.0)
    assert verified(engine).passed


def test_bonferroni_counts_the_tests() -> None:
    check = RejectionCheck("eagle3", TreePlan(), 0, 1, 1000, 10, p_value=5e-6)
    assert significant([check]) == [check]
    assert significant([check, *[replace(check, p_value=0.5)] * 99]) == []


def test_noise_is_that_of_the_engine(
    engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_tree = engine.target.verify

    def noisy(tree: Tree, past: int, want_logits: bool) -> Any:
        output = verify_tree(tree, past, want_logits)
        logits = output.logits.copy()
        logits[:, logits[0].argmax()] += 0.25 * (tree.num_nodes > 1)
        return SimpleNamespace(logits=logits)

    assert measure_noise(engine, [3, 5, 7] * 20, 11) < 1e-3
    monkeypatch.setattr(engine.target, "verify", noisy)
    assert measure_noise(engine, [3, 5, 7] * 20, 11) > 0.01


def test_no_prompts_are_refused(engine: eagle3.Engine) -> None:
    with pytest.raises(RequestError, match="at least one"):
        verify(engine, ())


def test_the_built_in_prompts_are_forty_and_differ() -> None:
    assert len(set(PROMPTS)) == 40


def test_prompt_files(tmp_path: Path) -> None:
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\ntwo words\n")
    rows.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n')
    assert load_prompts(lines) == ("one", "two words")
    assert load_prompts(rows) == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.jsonl", '{"prompt": "a"}\nnope\n', "line 2: not JSON"),
        ("p.jsonl", '{"text": "a"}\n', "line 1: expected an object"),
        ("p.jsonl", '{"turns": []}\n', "line 1: expected an object"),
        ("p.txt", "\n", "contains no prompts"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=says):
        load_prompts(tmp_path / name)


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        load_prompts(tmp_path / "none.txt")


def test_every_drafter_is_covered(engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafter runs with its own tree instead of the plan's."""
    second = "other"
    trees = {"eagle3": TreePlan(3, 3, 6), second: TreePlan(1, 2, 2)}
    monkeypatch.setattr(eagle3.Engine, "drafters", ["eagle3", second, "none"])
    monkeypatch.setattr(eagle3.Engine, "default_tree", lambda _, name: trees.get(name, TreePlan()))
    monkeypatch.setitem(engine._drafters, second, engine.drafter("eagle3"))
    report = verified(engine)
    assert report.passed
    checked = {(each.drafter, each.tree) for each in report.equality if each.num_prompts == 3}
    assert checked == set(trees.items())
    assert {each.drafter for each in report.rejection} == set(trees)
