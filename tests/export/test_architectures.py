"""Every supported architecture, in both lowerings, against its unchanged transformers model.

The engines run through the runtime; the references are `generate` and separate calls per path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import eagle3
from eagle3.export.check import relative_error
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.target import TargetEngine
from eagle3.runtime.tree import Tree

NUM_NEW = 48
TOLERANCE = 1e-4
ARCHITECTURES = ("qwen2", "qwen3", "mistral", "gemma3_text", "phi3")
WINDOW = 16  # of mistral and gemma3_text
LOWERINGS = ("ort", "portable")

pytestmark = pytest.mark.slow


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """transformers' own greedy text, with its own cache."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """[T,V] of one call without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def prompts(vocab_size: int) -> list[list[int]]:
    """One token, and more than two sliding windows."""
    rng = np.random.default_rng(3)
    return [rng.integers(2, vocab_size, n).tolist() for n in (1, 2 * WINDOW + 5)]


def prefilled(engine: TargetEngine, tokens: list[int]) -> None:
    for past in range(0, len(tokens), engine.prefill_chunk):
        chunk = np.asarray(tokens[past : past + engine.prefill_chunk], np.int64)
        engine.prefill(chunk, past, want_logits=False)


@pytest.fixture(params=[f"{a}-{x}" for a in ARCHITECTURES for x in LOWERINGS])
def target(request: pytest.FixtureRequest, exported: Any) -> Any:
    return exported(*request.param.split("-"))


def test_the_self_check_compared_text_longer_than_the_window(target: Any) -> None:
    check = target.bundle.manifest.self_check
    assert check["tokens"] > 6 * WINDOW
    assert set(check["relative_errors"]) == {"logits", "prefill_logits", "tree_logits"}
    assert max(check["relative_errors"].values()) < TOLERANCE


def test_greedy_text_is_that_of_transformers(target: Any) -> None:
    engine = eagle3.load(target.bundle.root, threads=1)
    for prompt in prompts(engine.bundle.manifest.target.vocab_size):
        expected = greedy(target.model, prompt)
        assert len(set(expected)) > 8, "a text of few tokens would prove little"
        # -100 on the end token is transformers' min_new_tokens.
        got = engine.generate(
            prompt, max_new_tokens=NUM_NEW, drafter="none", logit_bias={1: -100.0}
        )
        assert got.token_ids == expected


def test_a_tree_deeper_than_the_window_sees_each_path_alone(target: Any) -> None:
    """Case 9: the committed text and the paths are longer than the window; branches part twice."""
    rng = np.random.default_rng(5)
    text = rng.integers(2, 64, 3 * WINDOW).tolist()
    deep = [*range(-1, WINDOW + 6)]  # a chain deeper than the window
    parents = [*deep, 0, len(deep), len(deep) + 1, WINDOW, WINDOW + 8]
    tree = Tree(rng.integers(2, 64, len(parents)), np.asarray(parents, np.int32))
    engine = target.engine()
    prefilled(engine, text)
    out = engine.verify(tree, len(text), want_logits=True)
    assert out.logits is not None
    leaves = [node for node in range(tree.num_nodes) if not tree.children(node)]
    assert len(leaves) >= 3
    for leaf in leaves:
        path = [0, *tree.path(leaf)]
        expected = logits_of(target.model, [*text, *tree.tokens[path]])[len(text) :]
        assert relative_error(out.logits[path], expected) < TOLERANCE
        assert np.array_equal(out.next_token[path], expected.argmax(-1))


def test_the_window_matters(exported: Any) -> None:
    """The models of the tests above do restrict attention: without the window they differ."""
    for architecture in ("mistral", "gemma3_text"):
        model = exported(architecture, "ort").model
        text = np.random.default_rng(5).integers(2, 64, 3 * WINDOW).tolist()
        windowed = logits_of(model, text)[-1]
        before = model.config.sliding_window
        model.config.sliding_window = 512
        try:
            assert relative_error(logits_of(model, text)[-1], windowed) > 100 * TOLERANCE
        finally:
            model.config.sliding_window = before


def test_with_a_head_and_a_tree_the_text_is_that_of_transformers(
    llama: Any, full_bundle: Bundle
) -> None:
    engine = eagle3.load(full_bundle.root, threads=1)
    for prompt in prompts(64):
        expected = greedy(llama, prompt)
        assert len(set(expected)) > 8
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "logit_bias": {1: -100.0}}
        with_tree = engine.generate(
            prompt, draft_top_k=3, draft_depth=4, num_draft_tokens=12, **options
        )
        assert with_tree.token_ids == expected
        assert with_tree.stats.plain_rounds <= 1  # where one token is left to generate
        assert engine.generate(prompt, drafter="none", **options).token_ids == expected
