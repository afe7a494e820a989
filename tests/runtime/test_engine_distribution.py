"""What the engines sample, against the enumerated distribution of all texts of three tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from scipy.stats import chisquare

import eagle3
from eagle3.runtime.acceptance import accept, rules
from eagle3.runtime.acceptance.accept import Accepted
from eagle3.runtime.acceptance.sampling import draft_probs, sample_inverse_cdf
from eagle3.runtime.drafters import draw as draw_module
from eagle3.runtime.drafters import eagle as eagle_module
from eagle3.runtime.drafters import model as model_module
from eagle3.runtime.drafters.draw import draw

PROMPT = [11, 5]  # here the head's candidates are likely: wrong arithmetic shows soonest
LENGTH = 3
EOS = 1
NUM_SAMPLES = 5000
TREE = {"draft_top_k": 3, "draft_depth": 2, "num_draft_tokens": 6}
SAMPLED_CHAIN = {"draft_top_k": 1, "draft_depth": 2, "num_draft_tokens": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tree": {**TREE, "temperature": 1.0, "top_k": 5},
    "tree_cold": {**TREE, "temperature": 0.7, "top_p": 0.8},
    "chain": {**SAMPLED_CHAIN, "temperature": 0.7, "repetition_penalty": 1.3, "min_p": 0.05},
    "coupled": {**TREE, "temperature": 1.0, "top_p": 0.8, "acceptance": "coupled"},
    "coupled_cold": {**TREE, "temperature": 0.7, "top_k": 5, "acceptance": "coupled"},
}
OF_A_MODEL: dict[str, dict[str, Any]] = {
    "chain": {**SAMPLED_CHAIN, "temperature": 0.7, "repetition_penalty": 1.3, "min_p": 0.05},
    "tree": {**TREE, "temperature": 1.0, "top_k": 5},
}


def warped(logits: np.ndarray, text: list[int], options: dict[str, Any]) -> np.ndarray:
    """p [V] float64 as method section 4 says it, written a second time and plainly."""
    penalty = options.get("repetition_penalty", 1.0)
    logits = logits.copy()
    for token in set(text):
        logits[token] *= penalty if logits[token] < 0 else 1 / penalty
    logits /= options["temperature"]
    order = np.argsort(-logits)
    p = np.exp(logits - logits.max())
    if "top_k" in options:
        p[order[options["top_k"] :]] = 0
    p /= p.sum()
    if "top_p" in options:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= options["top_p"]]] = 0
        p /= p.sum()
    p[p < options.get("min_p", 0.0) * p.max()] = 0
    return p / p.sum()


def enumerated(
    model: Any, options: dict[str, Any], prompt: list[int], length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens, or fewer that end with EOS."""
    found: dict[tuple[int, ...], float] = {}
    open_texts = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*prompt, *text] for text in open_texts])
        logits = model(input_ids=ids, use_cache=False).logits[:, -1].double().numpy()
        longer = {}
        for (text, mass), row in zip(open_texts.items(), logits, strict=True):
            for token, p in enumerate(warped(row, [*prompt, *text], options)):
                if p > 0:
                    (found if token == EOS else longer)[(*text, token)] = mass * p
        open_texts = longer
    return {**found, **open_texts}


def p_value(
    model: Any,
    engine: eagle3.Engine,
    options: dict[str, Any],
    num_samples: int,
    prompt: list[int] = PROMPT,
    length: int = LENGTH,
) -> float:
    """Of the chi-square test; texts expected fewer than 5 times are counted as one."""
    expected = enumerated(model, options, prompt, length)
    assert sum(expected.values()) == pytest.approx(1)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_samples):
        result = engine.generate(prompt, max_new_tokens=length, seed=seed, **options)
        counts[tuple(result.token_ids)] += 1
    assert counts.keys() <= expected.keys(), "a text that the target never writes"
    large = [text for text, p in expected.items() if p * num_samples >= 5]
    rest = 1 - sum(expected[text] for text in large)
    cells = [(counts[text], expected[text] * num_samples) for text in large]
    if rest > 1e-9:
        in_large = sum(counts[text] for text in large)
        cells.append((num_samples - in_large, rest * num_samples))
    observed, wanted = np.array(cells).T
    assert len(cells) > 20
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_texts_have_the_targets_distribution(
    small: Any, small_engine: eagle3.Engine, name: str
) -> None:
    assert p_value(small, small_engine, CONFIGURATIONS[name], NUM_SAMPLES) > 0.001


# Every token stands in it, so each root finds itself; of length 4, so that a match goes on.
REPEATED = [*range(2, 16), *range(15, 1, -1), 11, 5]
LONGER: dict[str, tuple[dict[str, Any], list[int]]] = {
    "static": ({"tree": "eagle1", "temperature": 1.0, "top_k": 4}, PROMPT),
    "lookup": (
        {"drafter": "lookup", **SAMPLED_CHAIN, "temperature": 1.0, "top_k": 4},
        REPEATED,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_drafts_that_are_not_sampled_keep_the_distribution(
    small: Any, small_engine: eagle3.Engine, name: str
) -> None:
    """Point masses two levels deep: a fixed shape, and a copy of the text."""
    options, prompt = LONGER[name]
    assert p_value(small, small_engine, options, NUM_SAMPLES // 2, prompt, 4) > 0.001
    some = [small_engine.generate(prompt, max_new_tokens=4, seed=s, **options) for s in range(60)]
    depths = {len(each.stats.proposed_by_position) for each in some}
    assert 2 in depths and any(max(each.stats.accepted_by_position) > 0 for each in some)


@pytest.fixture(scope="module")
def model_engine(
    small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[eagle3.Engine]:
    """`small` with another small LM as its draft."""
    folder = tmp_path_factory.mktemp("small_lm")
    lm = tiny.tiny_model("llama", vocab_size=16, num_layers=1, seed=4, scale=0.5)
    draft = tiny.save_target(folder / "lm", lm)
    yield eagle3.load(tiny.export_tiny(small_folder, draft, folder / "bundle").root, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_MODEL)
def test_texts_drafted_by_a_model_have_the_targets_distribution(
    small: Any, model_engine: eagle3.Engine, name: str
) -> None:
    assert p_value(small, model_engine, OF_A_MODEL[name], NUM_SAMPLES) > 0.001


@pytest.mark.slow
def test_a_q_of_another_temperature_fails(
    small: Any, model_engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are drawn at one temperature, and q says another."""

    def hot(logits: Any, temperature: float) -> Any:
        return draft_probs(logits, 3 * temperature)

    def drawn_cold(logits: Any, request: Any, *sizes: Any) -> Any:
        _, q = draw(logits, request, *sizes)
        cold = draft_probs(logits, request.temperature)
        return sample_inverse_cdf(cold, request.rng.random()), q

    monkeypatch.setattr(draw_module, "draft_probs", hot)
    monkeypatch.setattr(model_module, "draw", drawn_cold)
    assert p_value(small, model_engine, OF_A_MODEL["chain"], 2500) < 1e-6


def _softmax_q_for_candidates(tree: Any, target_p: Any, rng: Any) -> Accepted:
    """The classic error: top-k candidates judged as if they had been sampled."""
    uniform = np.full(16, 1 / 16, np.float32)
    wrong = type(tree)(tree.tokens, tree.parents, dict.fromkeys(range(tree.num_nodes), uniform))
    return accept.accept_rejection(wrong, target_p, rng)


def _no_residual(p: Any, *_: Any) -> Any:
    """After a rejection, p once more in place of norm(max(0, p - q))."""
    return p


def _not_renormalised(tree: Any, node: int, p: Any, rng: np.random.Generator) -> Any:
    """The second child is tried with p(x), not with what p(x) is once the first was refused."""
    rest = p.copy()
    for child in tree.children(node):
        token = tree.token_list[child]
        if rng.random() < p[token]:
            return accept._Step(child)
        rest[token] = 0
    return accept._Step(None, rest)


BREAKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "softmax_q": (
        "tree",
        lambda patch: patch.setattr(rules, "accept_rejection", _softmax_q_for_candidates),
    ),
    "not_renormalised": (
        "tree",
        lambda patch: patch.setattr(accept, "_try_candidates", _not_renormalised),
    ),
    "no_residual": ("chain", lambda patch: patch.setattr(accept, "_residual", _no_residual)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_that_test_can_fail(
    small: Any, small_engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, prompt = LONGER[name]
    BREAKS["softmax_q"][1](monkeypatch)
    assert p_value(small, small_engine, options, 1500, prompt, 4) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_the_test_can_fail(
    small: Any, small_engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    configuration, break_it = BREAKS[name]
    break_it(monkeypatch)
    assert p_value(small, small_engine, CONFIGURATIONS[configuration], 2500) < 1e-6


def test_the_draft_of_the_chain_is_sampled(
    small_engine: eagle3.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `chain` would test what `tree` does."""
    drawn: list[Any] = []
    monkeypatch.setattr(eagle_module, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    small_engine.generate(PROMPT, max_new_tokens=20, **CONFIGURATIONS["chain"])
    assert len({token for token, _ in drawn}) > 1
