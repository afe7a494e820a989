"""Vanilla speculative decoding on tiny models: whatever drafts, the text is the target's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import eagle3
from eagle3.export.add_draft import AddRequest, add_draft
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.drafters.model import ModelDrafter
from eagle3.runtime.trees.tree import Tree


def sizes(tree: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("draft_top_k", "draft_depth", "num_draft_tokens"), tree, strict=True))


NO_EOS = {"logit_bias": {1: -100.0}}
GREEDY: dict[str, Any] = {**NO_EOS, "max_new_tokens": 100}
COUPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "acceptance": "coupled", "seed": 7}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "acceptance": "rejection"}
TREES: list[dict[str, Any]] = [
    *(sizes(each) for each in [(1, 1, 1), (1, 5, 5), (3, 3, 6), (4, 4, 10), (8, 2, 30)]),
    {"tree": "eagle1"},
    {"tree": [[0], [0, 0], [1]], "num_draft_tokens": 2},
]
DRAFTS = ("cousin", "stranger", "itself")  # as they stand in the bundle
CHAIN = TreePlan(1, 4, 4)


def prompts(count: int, vocab_size: int = 64) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, vocab_size, rng.integers(1, 28)).tolist() for _ in range(count)]


@dataclass(frozen=True)
class Models:
    """A target, what drafts for it by name, and the folder of each."""

    target: Path
    lms: dict[str, Any]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Drafts: a model near the target, the target itself, and a stranger of another architecture
    whose vocabulary has fewer rows and that attends to 16 tokens."""
    folder = tmp_path_factory.mktemp("models")
    target, cousin = (tiny.tiny_model("llama", num_layers=2, scale=2.0) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    for parameter in cousin.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(0.03 * noise)
    stranger = tiny.tiny_model("mistral", vocab_size=60, num_layers=2, seed=9, scale=2.0)
    lms = {"cousin": cousin, "stranger": stranger, "itself": target}
    words = tiny.tiny_tokenizer(64)
    folders = {name: tiny.save_target(folder / name, lm, words) for name, lm in lms.items()}
    return Models(folders["itself"], lms, folders)


@pytest.fixture(scope="module")
def bundle_of_models(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two are exported with the target, which is then added as its own draft, in int8."""
    output = tmp_path_factory.mktemp("bundles") / "models"
    drafts = [f"{name}={models.folders[name]}" for name in DRAFTS[:2]]
    tiny.export_tiny(models.target, drafts, output)
    request = AddRequest(
        str(models.target), DraftSource(str(models.target), "itself"), output, CHAIN, "int8"
    )
    return add_draft(request)[0]


@pytest.fixture(scope="module")
def model_engine(bundle_of_models: Bundle) -> Iterator[eagle3.Engine]:
    yield eagle3.load(bundle_of_models.root, threads=1)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rule", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_every_tree_gives_the_text_of_plain_decoding(
    model_engine: eagle3.Engine, rule: dict[str, Any], name: str
) -> None:
    """Any of these drafters, in requests that follow each other on one engine."""
    num_accepted = 0.0
    for prompt in prompts(4):
        expected = model_engine.generate(prompt, drafter="none", **rule).token_ids
        for tree in TREES:
            result = model_engine.generate(prompt, drafter=name, **tree, **rule)
            assert result.token_ids == expected, (prompt, tree)
            num_accepted += len(expected) - 1 - result.stats.rounds
    assert num_accepted > (20 if name == "stranger" else 300)


def test_requests_choose_their_drafter(model_engine: eagle3.Engine) -> None:
    """Switching back and forth leaves nothing behind."""
    assert model_engine.drafters[:3] == list(DRAFTS) and "none" in model_engine.drafters
    prompt = prompts(1)[0]
    first = {name: model_engine.generate(prompt, drafter=name, **GREEDY) for name in DRAFTS}
    calls = model_engine._clock.calls["cousin.draft"]
    assert model_engine.generate(prompt, **GREEDY).token_ids == first["cousin"].token_ids
    assert model_engine._clock.calls["cousin.draft"] > calls, "the first is the default"
    for name in reversed(DRAFTS):
        again = model_engine.generate(prompt, drafter=name, **GREEDY)
        assert again.token_ids == first[name].token_ids
        assert again.stats.accepted_by_position == first[name].stats.accepted_by_position
    assert len({result.stats.accepted_by_position for result in first.values()}) == 3


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Tree]]:
    """(text up to the root, tree) of every proposal from now on."""
    found: list[tuple[list[int], Tree]] = []
    propose = ModelDrafter.propose

    def spied(self: ModelDrafter, request: DraftRequest) -> Tree:
        tree = propose(self, request)
        found.append((self._text[: self._observed + 1].tolist(), tree))
        return tree

    monkeypatch.setattr(ModelDrafter, "propose", spied)
    return found


@pytest.mark.parametrize("name", ["cousin", "stranger"])
@pytest.mark.parametrize("tree", [sizes((1, 4, 4)), sizes((3, 4, 12)), {"tree": "eagle1"}])
def test_trees_are_the_models_own(
    model_engine: eagle3.Engine,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tree: dict[str, Any],
) -> None:
    """Every kept node is one of its parent's likeliest, by PyTorch, in rounds after rounds: so are
    rows, positions, masks and windows, of tokens it drafted itself and of others."""
    found = recorded(monkeypatch)
    prompt = [token for token in prompts(1)[0] if token < 60]
    result = model_engine.generate(prompt, drafter=name, **tree, **GREEDY)
    text = prompt + result.token_ids
    assert len(found) > 15
    for seen, proposed in found[:20]:
        assert seen == [min(token, 63 if name == "cousin" else 59) for token in text[: len(seen)]]
        for node in range(proposed.num_nodes):
            children = [proposed.token_list[child] for child in proposed.children(node)]
            if not children:
                continue
            ids = torch.tensor([seen + proposed.path_tokens(node)])
            logits = models.lms[name](input_ids=ids, use_cache=False).logits[0, -1]
            assert children == logits.topk(len(children)).indices.tolist()


def test_a_static_tree_has_the_nodes_of_its_paths(
    model_engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and as sizes cut it."""
    found = recorded(monkeypatch)
    paths = [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 0, 0)]
    for sizes_asked, num_nodes in (({}, 6), ({"num_draft_tokens": 4}, 4), ({"draft_depth": 1}, 2)):
        found.clear()
        options = {"max_new_tokens": 12, "drafter": "stranger", **NO_EOS, **sizes_asked}
        model_engine.generate([5, 6, 7], tree=paths, **options)
        _, tree = found[0]
        kept = [path for path in paths if len(path) <= sizes_asked.get("draft_depth", 3)]
        parents = [(((), *kept).index(path[:-1])) for path in kept[:num_nodes]]
        assert tree.parents.tolist() == [-1, *parents]


def test_the_target_as_its_own_draft_is_accepted_whole(models: Models, tmp_path: Path) -> None:
    """Greedy and sampled (q = p: every ratio is 1), which a q of another temperature fails."""
    plan = tiny.tiny_plan(lowering="portable")  # the others are `ort`
    bundle = tiny.export_tiny(models.target, models.target, tmp_path / "self", plan)
    own = sum(
        f.size for name, f in bundle.manifest.files.items() if name == "model.draft.onnx.data"
    )
    assert own < 4 * tiny.HIDDEN**2, "all its matrices are the target's"
    engine, prompt = eagle3.load(bundle.root, threads=1), prompts(1)[0]
    options = {"max_new_tokens": 81, **sizes((1, 4, 4))}
    result = engine.generate(prompt, **{**GREEDY, **options})
    assert result.stats.acceptance_length == 5.0
    for seed in range(4):  # without the bias, which q does not have
        sampled = {"temperature": 0.8, "acceptance": "rejection", "seed": seed, **options}
        result = engine.generate(prompt, **sampled)
        assert set(result.stats.accepted_by_position) == {1.0}
    calls = engine._clock.calls["model.draft"]
    engine.generate(prompt, **{**GREEDY, **options})
    # Each of 16 rounds runs its root, together with the last accepted token, and 3 more.
    assert engine._clock.calls["model.draft"] - calls == 16 * 4


def test_own_trees_and_names_stand_in_the_manifest(bundle_of_models: Bundle) -> None:
    drafts = bundle_of_models.manifest.drafts
    assert list(drafts) == list(DRAFTS) and {each.method for each in drafts.values()} == {"model"}
    assert [each.weights for each in drafts.values()] == ["same", "same", "int8"]
    assert [each.tree for each in drafts.values()] == [TreePlan(3, 3, 6)] * 2 + [CHAIN]
    assert [each.draft_vocab_size for each in drafts.values()] == [64, 60, 64]
    assert drafts["itself"].checks["first_position_acceptance"] > 0.9
    assert drafts["stranger"].checks["first_position_acceptance"] < 0.3


def test_a_draft_uses_its_own_tree(model_engine: eagle3.Engine) -> None:
    for name, depth in (("cousin", 3), ("itself", 4)):
        result = model_engine.generate([5, 6], drafter=name, **GREEDY)
        assert len(result.stats.accepted_by_position) == depth


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_model_of_nan_or_infinity_changes_nothing(
    bundle_of_models: Bundle, model_engine: eagle3.Engine, tmp_path: Path, value: str
) -> None:
    """Export would refuse it."""
    name = "cousin.draft.onnx.data"
    count = bundle_of_models.path(name).stat().st_size // 4
    weights = np.full(count, float(value), np.float32).tobytes()
    broken = tiny.edited_bundle(bundle_of_models, tmp_path / "broken", {name: weights})
    engine = eagle3.load(broken.root, threads=1)
    for rule in (GREEDY, COUPLED, SAMPLED):
        expected = model_engine.generate([5, 6, 7], drafter="none", **rule)
        for tree in ((1, 4, 4), (3, 3, 6)):
            result = engine.generate([5, 6, 7], drafter="cousin", **sizes(tree), **rule)
            assert result.token_ids == expected.token_ids
            assert result.stats.acceptance_length == 1.0


@pytest.mark.parametrize("rule", [GREEDY, COUPLED, SAMPLED], ids=["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("name", DRAFTS)
def test_up_to_the_end_of_the_context(
    model_engine: eagle3.Engine, rule: dict[str, Any], name: str
) -> None:
    """128 tokens; a prompt may be longer than a call of the draft."""
    for length in (1, 70, 126):
        prompt = np.random.default_rng(length).integers(2, 64, length).tolist()
        options = {**rule, "max_new_tokens": 500}
        for tree in ((1, 5, 5), (4, 4, 10)):
            result = model_engine.generate(prompt, drafter=name, **sizes(tree), **options)
            assert (result.finish_reason, len(result.token_ids)) == ("length", 128 - length)
            if rule is not SAMPLED:
                plain = model_engine.generate(prompt, drafter="none", **options)
                assert result.token_ids == plain.token_ids


def test_a_cancelled_request_leaves_nothing_behind(model_engine: eagle3.Engine) -> None:
    expected = model_engine.generate([9, 8, 7], drafter="cousin", **GREEDY)
    stream = model_engine.stream([5, 6], drafter="cousin", **GREEDY)
    next(stream)
    next(stream)
    stream.close()
    again = model_engine.generate([9, 8, 7], drafter="cousin", **GREEDY)
    assert again.token_ids == expected.token_ids
    assert again.stats.accepted_by_position == expected.stats.accepted_by_position
