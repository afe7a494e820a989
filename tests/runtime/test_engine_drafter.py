"""The tree that EAGLE-3 proposes, against the method written plainly over the head in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eagle3
from eagle3.export.checks.head_check import _DraftPath
from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.plans.tree_paths import STATIC_TREES, TreePaths
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.trees.tree import Tree

Path_ = tuple[int, ...]
AUX_LAYERS = (2, 4, 5)
PROMPT = list(range(5, 30))  # longer than a prefill chunk


@pytest.fixture(scope="module")
def head(llama: Any, head_folder: Path) -> Iterator[Any]:
    """The head of `bundle`, and the module that computes it."""
    facts = TargetSizes(hidden_size=32, vocab_size=64, num_layers=llama.config.num_hidden_layers)
    found = read_head(str(head_folder), facts, None)
    assert found.config.aux_layer_ids == AUX_LAYERS
    yield found, build_head(found, torch.float32)


def plain_draft(head: Any, llama: Any, text: list[int]) -> _DraftPath:
    """The head in PyTorch behind `text`: logits of any path, from the start."""
    with torch.no_grad():
        out = llama(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    features = torch.cat([out.hidden_states[i] for i in AUX_LAYERS], -1)[0].numpy()
    reference: Any = SimpleNamespace(
        features=features, tokens=np.array(text), target=SimpleNamespace(model=llama)
    )
    table = llama.get_input_embeddings().weight
    return _DraftPath(head[1], reference, features[: len(text) - 1], table)


def static_reference(head: Any, llama: Any, text: list[int], paths: TreePaths) -> list[Path_]:
    """Tokens of every path of ranks under the last token of `text` (EAGLE-1)."""
    draft, tokens = plain_draft(head, llama, text), {(): ()}
    for ranks in paths.paths:
        above = tokens[ranks[:-1]]
        best = torch.from_numpy(draft.logits(above)).topk(paths.top_k).indices
        tokens[ranks] = (*above, int(head[0].target_ids[best[ranks[-1]]]))
    return list(tokens.values())


def reference_paths(head: Any, llama: Any, text: list[int], tree: Any) -> dict[Path_, float]:
    """The kept paths under the last token of `text` -> log of the product of q (EAGLE-2)."""
    draft, found = plain_draft(head, llama, text), head[0]
    values: dict[Path_, float] = {}
    frontier: dict[Path_, float] = {(): 0.0}
    for _ in range(tree.draft_depth):
        level: dict[Path_, float] = {}
        for path, value in frontier.items():
            logits = torch.from_numpy(draft.logits(path))
            best = logits.log_softmax(-1).topk(tree.draft_top_k)
            for log_q, draft_id in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, int(found.target_ids[draft_id]))] = value + log_q
        values |= level
        frontier = dict(sorted(level.items(), key=lambda each: -each[1])[: tree.draft_top_k])
    return dict(sorted(values.items(), key=lambda each: -each[1])[: tree.num_draft_tokens])


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DraftRequest, Tree]]:
    """Every proposal from here on, as it is made."""
    proposed: list[tuple[DraftRequest, Tree]] = []
    propose = EagleDrafter.propose

    def record(self: EagleDrafter, request: DraftRequest) -> Tree:
        tree = propose(self, request)
        proposed.append((request, tree))
        return tree

    monkeypatch.setattr(EagleDrafter, "propose", record)
    return proposed


@pytest.mark.parametrize("sizes", [(1, 4, 4), (3, 3, 6), (3, 5, 30)])
def test_the_tree_is_the_one_of_the_method(
    engine: eagle3.Engine, llama: Any, head: Any, monkeypatch: pytest.MonkeyPatch, sizes: Any
) -> None:
    """Rows, positions, masks, feedback and vocabulary of every level, in rounds after rounds."""
    proposed = recorded(monkeypatch)
    options = dict(zip(("draft_top_k", "draft_depth", "num_draft_tokens"), sizes, strict=True))
    text, chunks = list(PROMPT), []
    for chunk in engine.stream(PROMPT, max_new_tokens=24, logit_bias={1: -100.0}, **options):
        chunks.append(chunk.token_ids)
    for (request, tree), committed in list(zip(proposed, chunks, strict=False))[:4]:
        text += committed
        assert request.root == text[-1]
        expected = reference_paths(head, llama, text, request.tree)
        paths = [tuple(tree.path_tokens(node)) for node in range(1, tree.num_nodes)]
        assert set(paths) == expected.keys()
        in_tree_order = [expected[path] for path in paths]
        assert in_tree_order == pytest.approx(sorted(in_tree_order, reverse=True), abs=1e-4)
    assert len(proposed) > 5


@pytest.mark.parametrize("num_draft_tokens", [25, 9])
def test_the_static_tree_is_the_one_of_the_method(
    engine: eagle3.Engine,
    llama: Any,
    head: Any,
    monkeypatch: pytest.MonkeyPatch,
    num_draft_tokens: int,
) -> None:
    """Every node carries the token of its rank, in the order of the paths, round after round."""
    proposed = recorded(monkeypatch)
    options = {"tree": "eagle1", "num_draft_tokens": num_draft_tokens, "logit_bias": {1: -100.0}}
    text, chunks = list(PROMPT), []
    for chunk in engine.stream(PROMPT, max_new_tokens=24, **options):
        chunks.append(chunk.token_ids)
    for (request, tree), committed in list(zip(proposed, chunks, strict=False))[:3]:
        text += committed
        expected = static_reference(head, llama, text, STATIC_TREES["eagle1"])
        paths = [tuple(tree.path_tokens(node)) for node in range(tree.num_nodes)]
        assert paths == expected[: num_draft_tokens + 1]
        assert request.tree.num_draft_tokens == num_draft_tokens
    assert len(proposed) > 3
