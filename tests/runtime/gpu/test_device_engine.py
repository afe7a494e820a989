"""Which drafters a GPU runs, what they read, and `verify` there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from on_device import OnDevice, on_device

import eagle3
from eagle3.runtime import rules
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.errors import PlanError, RequestError
from eagle3.runtime.verify import verify

PROMPT = list(range(5, 45))
OPTIONS: list[dict[str, Any]] = [
    {"logit_bias": {1: -100.0}},
    {"temperature": 1.0, "acceptance": "coupled", "seed": 5},
]


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Heads of layers 0, 2, 3 and 1, 2, 3: of the target's four, the first reads what has a gap."""
    model = tiny.tiny_model("llama", num_layers=3, scale=2.0)
    folder = tmp_path_factory.mktemp("two")
    sources = []
    for name, layers in (("gap", (0, 2, 3)), ("other", (1, 2, 3))):
        tiny.save_head(folder / name, model, draft_vocab_size=40, aux_layer_ids=layers)
        sources.append(f"{name}={folder / name}")
    target = tiny.save_target(folder / "target", model)
    return tiny.export_tiny(target, sources, folder / "bundle", tiny.tiny_plan(lowering="portable"))


def test_a_head_reads_its_own_layers_of_the_features(two_heads: Bundle, tmp_path: Path) -> None:
    """Otherwise its trees, and so what of them is accepted, would be others than the CPU's."""
    assert two_heads.manifest.target.aux_layer_ids == (0, 1, 2, 3)
    own, cpu = on_device(two_heads, tmp_path), eagle3.load(two_heads.root, threads=1)
    assert own.engine.drafters == ["gap", "none"]
    for rule in OPTIONS:
        options: dict[str, Any] = {"max_new_tokens": 40, "drafter": "gap", **rule}
        found, expected = (engine.generate(PROMPT, **options) for engine in (own.engine, cpu))
        assert found.token_ids == expected.token_ids
    drafted = cpu.drafter("gap")
    halves = own.engine.device._halves  # type: ignore[union-attr]
    assert halves.draft is not None
    own.driver.synchronize()
    rows = len(PROMPT)
    cache = halves.draft.cache
    block = own.driver.memory.view(
        cache.blocks["k.0"].address, np.float32, cache.num_heads * cache.capacity * cache.words
    ).reshape(cache.num_heads, -1, cache.words)
    expected_rows = drafted._engine._cache.block[0, 0, 0, :, :rows]  # type: ignore[attr-defined]
    np.testing.assert_allclose(block[:, :rows], expected_rows, atol=1e-4, rtol=1e-4)


def test_drafters_that_no_gpu_runs_are_refused_by_name(two_heads: Bundle, tmp_path: Path) -> None:
    own = on_device(two_heads, tmp_path)
    for name in ("other", "lookup"):
        with pytest.raises(RequestError, match=f"'{name}' does not run on a GPU.*: gap, none; "):
            own.engine.generate(PROMPT, drafter=name)
    with pytest.raises(RequestError, match="'eagle' is not in this bundle"):
        own.engine.generate(PROMPT, drafter="eagle")


def test_verify_on_a_gpu(narrow: OnDevice) -> None:
    texts = ["t5 t6 t7", "t9 t10"]
    report = verify(narrow.engine, texts, 20)
    assert report.passed and report.device == "cuda" and report.rejection == ()
    trees = {(each.rule, each.tree.num_draft_tokens) for each in report.equality}
    assert trees == {(rule, nodes) for rule in ("greedy", "coupled") for nodes in (6, 3)}
    assert 0 < report.noise < 1e-4
    assert "rejection not tested on cuda" in report.lines()[-2]
    with pytest.raises(PlanError, match="the tree is static, but on the GPU"):
        verify(narrow.engine, texts, 4, tree="eagle1")


def test_verify_finds_what_a_gpu_does_wrong(
    narrow: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft-dependent draw: its margin is reckoned from the target's logits."""
    draw, generate, plain = rules.sample_inverse_cdf, narrow.engine.generate, [True]

    def spied(prompt: Any, **options: Any) -> eagle3.Result:
        plain[0] = options["drafter"] == "none"
        return generate(prompt, **options)

    monkeypatch.setattr(
        rules, "sample_inverse_cdf", lambda p, u: draw(p, u if plain[0] else 0.5 * u)
    )
    monkeypatch.setattr(narrow.engine, "generate", spied)
    report = verify(narrow.engine, ["t5 t6 t7"], 12)
    assert not report.passed
    failed = [each for each in report.equality if each.divergences]
    assert {each.rule for each in failed} == {"coupled"}
    assert all((each.margin or 0) > report.noise for each in failed[0].divergences)


def test_the_next_logits_are_those_of_the_cpu(device: OnDevice, cpu: eagle3.Engine) -> None:
    found, expected = (engine.next_logits(PROMPT) for engine in (device.engine, cpu))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
