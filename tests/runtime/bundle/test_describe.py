"""`inspect`: sizes are those on disk, caches those the runtime allocates, all of it in words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import eagle3
from eagle3.plans.tree_paths import STATIC_TREES, TreePaths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.describe import (
    as_text,
    cache_bytes,
    describe,
    description_lines,
    engine_bytes,
    export_lines,
    size_bytes,
    tree_text,
)
from eagle3.runtime.bundle.folder import Bundle


def test_sizes_are_those_on_disk(bundle: Bundle) -> None:
    files = [path for path in bundle.root.rglob("*") if path.name != "manifest.json"]
    assert size_bytes(bundle) == sum(path.stat().st_size for path in files)
    engines = engine_bytes(bundle)
    assert set(engines) == set(bundle.manifest.engines)
    assert engines["target"] == sum(
        path.stat().st_size for path in bundle.root.glob("target.onnx*")
    )


def test_caches_are_those_the_engine_allocates(bundle: Bundle, engine: eagle3.Engine) -> None:
    caches = cache_bytes(bundle)
    assert caches["target"] == engine.target._cache.block.nbytes
    drafter: Any = engine._drafters["eagle3"]
    assert caches["eagle3.draft"] == drafter._engine._cache.block.nbytes


def test_the_words_name_what_matters(bundle: Bundle) -> None:
    text = "\n".join(description_lines(bundle))
    for part in (
        str(bundle.root),
        "LlamaForCausalLM",
        "EAGLE-3 head",
        "draft vocabulary 40",
        "norm_before_residual = False (from: ",
        "dynamic: top 3 per node, 3 levels, best 6",
        "with a chat template",
        "target against PyTorch: relative errors logits",
        "first draft token accepted",
        "context 128 tokens",
    ):
        assert part in text


def test_a_bundle_without_draft_says_so(bundle: Bundle) -> None:
    plain = replace(bundle, manifest=replace(bundle.manifest, drafts={}))
    assert any("none: plain decoding, or" in line for line in description_lines(plain))
    assert set(cache_bytes(plain)) == {"target"}


def test_a_skipped_check_says_so(bundle: Bundle) -> None:
    manifest = replace(bundle.manifest, self_check={"skipped": "no kernel"}, drafts={})
    text = "\n".join(export_lines(replace(bundle, manifest=manifest)))
    assert "target was not compared with PyTorch: no kernel" in text


def test_json_is_json(bundle: Bundle) -> None:
    data = json.loads(json.dumps(describe(bundle)))
    assert data["size_bytes"] == size_bytes(bundle)
    assert data["drafts"]["eagle3"]["conventions"]["norm_before_residual"]["source"]


def test_a_chain_is_called_one() -> None:
    assert tree_text(TreePlan(1, 5, 3)) == "chain of 3 draft tokens per round"


def test_a_static_tree_is_called_by_its_name() -> None:
    whole = TreePlan.of_paths(STATIC_TREES["eagle1"])
    assert tree_text(whole) == (
        "static, eagle1: up to 4 children per node, 5 levels, 25 tokens verified"
    )
    own = TreePlan.of_paths(TreePaths(((0,), (1,), (0, 0))), num_draft_tokens=2)
    assert "custom paths: up to 2 children per node, 1 levels, 2 tokens" in tree_text(own)


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 bytes"), (2_500, "2.5 kB"), (94_371_840, "94.4 MB")]
)
def test_units(size: int, text: str) -> None:
    assert as_text(size) == text
