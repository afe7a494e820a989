"""Which drafters a GPU runs, what they read, and `verify` there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray
from on_device import OnDevice, on_device

import eagle3
from eagle3.runtime.acceptance import rules
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.checks.verify import verify
from eagle3.runtime.errors import PlanError, RequestError

PROMPT = list(range(5, 45))
OPTIONS: list[dict[str, Any]] = [
    {"logit_bias": {1: -100.0}},
    {"temperature": 1.0, "acceptance": "coupled", "seed": 5},
]


@pytest.fixture(scope="module")
def two_heads(portable: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """`portable` whose head is there twice; the first reads the target's layers in another order,
    so that its columns are no slice of the target's."""
    info, engines = portable.manifest.drafts["eagle3"], portable.manifest.engines
    shuffled = replace(info, aux_layer_ids=info.aux_layer_ids[1:] + info.aux_layer_ids[:1])
    ids = portable.path("eagle3.target_ids.npy").read_bytes()
    return tiny.edited_bundle(
        portable,
        tmp_path_factory.mktemp("two") / "bundle",
        {f"{name}.target_ids.npy": ids for name in ("shuffled", "other")},
        drafts={"shuffled": shuffled, "other": info},
        engines={
            name.replace("eagle3", head): engine
            for head in ("shuffled", "other")
            for name, engine in engines.items()
        },
    )


def keys(own: OnDevice) -> NDArray[np.float32]:
    """What the draft's cache holds of PROMPT, float32 [Hkv, P, D]."""
    assert own.engine.device is not None and own.engine.device._halves.draft is not None
    cache = own.engine.device._halves.draft.cache
    size = cache.num_heads * cache.capacity * cache.words
    block = own.driver.memory.view(cache.blocks["k.0"].address, np.float32, size)
    return block.reshape(cache.num_heads, cache.capacity, cache.words)[:, : len(PROMPT)]


def test_a_head_reads_its_own_layers_of_the_features(
    two_heads: Bundle, device: OnDevice, tmp_path: Path
) -> None:
    """Its cache is the one that the CPU's comes to, and not that of the other order."""
    own, cpu = on_device(two_heads, tmp_path), eagle3.load(two_heads.root, threads=1)
    assert own.engine.drafters == ["shuffled", "none"]
    for rule in OPTIONS:
        options: dict[str, Any] = {"max_new_tokens": 40, "drafter": "shuffled", **rule}
        found, expected = (engine.generate(PROMPT, **options) for engine in (own.engine, cpu))
        assert found.token_ids == expected.token_ids
    drafted = cpu.drafter("shuffled")
    own.driver.synchronize()
    expected_rows = drafted._engine._cache.block[0, 0, 0, :, : len(PROMPT)]  # type: ignore[attr-defined]
    np.testing.assert_allclose(keys(own), expected_rows, atol=1e-4, rtol=1e-4)
    device.engine.generate(PROMPT, drafter="eagle3", max_new_tokens=1)
    device.driver.synchronize()
    assert np.abs(keys(device) - expected_rows).max() > 0.1


def test_drafters_that_no_gpu_runs_are_refused_by_name(two_heads: Bundle, tmp_path: Path) -> None:
    own = on_device(two_heads, tmp_path)
    for name in ("other", "lookup"):
        with pytest.raises(
            RequestError, match=f"'{name}' is not supported on a GPU.*: shuffled, none; "
        ):
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
    assert "rejection was not tested on cuda" in report.lines()[-2]
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
