"""Draft logits of heads in every dialect, against loops that read the same folder by themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from dialect_reference import ReferenceHead
from dialects import Written
from plain_head import TOLERANCE, causal_attention, check_draft_tree

import eagle3
from eagle3.export.checks.reference import relative_error
from eagle3.export.draft_graphs.head_modules import build_head, embedding_table
from eagle3.export.heads.head_config import Head, TargetSizes
from eagle3.export.heads.reader import read_head, reread
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.stats import Clock

NUM_LAYERS = 2
PROMPT = list(range(5, 19))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
OFFICIAL = Written("official", head_dim=16, attention_bias=True, mlp_bias=True, rope_scaling=LLAMA3)
SPECFORGE = Written(
    "specforge",
    hidden=24,
    heads=3,
    kv_heads=1,
    embedding="random",
    fc_norm=True,
    norm_output=True,
    qk_norm=True,
)
SPECULATORS = Written("speculators", norm_before_fc=True, embedding="copy", rope_theta=5000.0)
QWEN3 = Written(
    "speculators",
    layers=(0, 2),
    hidden=24,
    head_dim=8,
    heads=6,
    kv_heads=3,
    draft_vocab=None,
    norm_before_residual=False,
    fc_norm=True,
    norm_output=True,
    qk_norm=True,
    embedding="random",
    rope_scaling=YARN,
)
CASES = {
    "official": (OFFICIAL, "ort"),
    "specforge": (SPECFORGE, "ort"),
    "speculators": (SPECULATORS, "portable"),
    "speculators qwen3": (QWEN3, "ort"),
}


@pytest.fixture(scope="module")
def target() -> Any:
    model = tiny.tiny_model("llama", num_layers=NUM_LAYERS, scale=2.0)
    tiny.jitter_vectors(model)
    return model


@pytest.fixture(scope="module")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("target"), target)


def facts(model: Any) -> TargetSizes:
    return TargetSizes(tiny.HIDDEN, 64, NUM_LAYERS, model.get_input_embeddings().weight)


def reference(written: Written, folder: Path, model: Any) -> ReferenceHead:
    table = model.get_input_embeddings().weight
    return ReferenceHead(folder, table, own_embedding=written.hidden is not None)


def assumed(written: Written) -> dict[str, str]:
    """What a user must say of this head: SpecForge's norm_output has two meanings."""
    ambiguous = written.dialect == "specforge" and written.norm_output is not None
    return {"norm_output": str(written.norm_output).lower()} if ambiguous else {}


def random_features(written: Written, count: int) -> np.ndarray:
    width = len(written.layers) * tiny.HIDDEN
    scale = np.repeat([0.2, 3.0, 1.0][: len(written.layers)], tiny.HIDDEN)  # as layers differ
    drawn = np.random.default_rng(0).normal(size=(count, width)) * scale
    return drawn.astype(np.float32)


# Through the exported engine


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    target: Any,
    target_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Written, Path, Bundle]:
    written, lowering = CASES[request.param]
    folder = tmp_path_factory.mktemp("dialect")
    head = written.save(folder / "head", target)
    flags = tuple(f"{key}={value}" for key, value in assumed(written).items())
    plan = tiny.tiny_plan(lowering=lowering)
    bundle = tiny.export_tiny(target_folder, head, folder / "bundle", plan, assume=flags)
    return written, head, bundle


def test_every_node_of_a_draft_tree_has_the_logits_of_the_loops(
    target: Any, case: tuple[Written, Path, Bundle]
) -> None:
    written, folder, bundle = case
    plain = reference(written, folder, target)
    features = random_features(written, 14)
    check_draft_tree(DraftEngine(bundle, 1, Clock()), plain, plain.target_ids(), features)
    assert np.array_equal(bundle.target_ids("eagle3"), plain.target_ids())


def test_the_text_is_that_of_plain_decoding(case: tuple[Written, Path, Bundle]) -> None:
    engine = eagle3.load(case[2].root, threads=1)
    options: dict[str, Any] = {"max_new_tokens": 30, "logit_bias": {1: -100.0}}
    plain = engine.generate(PROMPT, drafter="none", **options)
    assert engine.generate(PROMPT, draft_top_k=3, **options).token_ids == plain.token_ids


def test_the_manifest_holds_the_fused_layers_and_every_source(
    case: tuple[Written, Path, Bundle],
) -> None:
    written, _, bundle = case
    draft = bundle.manifest.draft
    assert draft is not None and bundle.manifest.target.aux_layer_ids == written.layers
    sources = {c.source.partition(" (")[0] for c in draft.conventions.values()}
    assert sources <= {"config", "dialect default", "tensors", "flag"}
    said = {
        "hidden_size",
        "head_dim",
        "rope",
        "d2t",
        "embedding",
        "lm_head",
        "norm_before_residual",
    }
    said |= {"norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias", "mlp_bias"}
    assert said <= set(draft.conventions)


# Through the module that is traced, switch by switch

SWITCHES: list[tuple[Written, dict[str, str]]] = [
    (Written("official", norm_before_residual=True), {"norm_before_residual": "false"}),
    (Written("speculators"), {"norm_before_residual": "false"}),
    (Written("speculators", norm_before_residual=False), {"norm_before_residual": "true"}),
    (Written("official", norm_output=True), {"norm_output": "false"}),
    (Written("specforge", norm_output=False), {"norm_output": "true"}),
    (Written("speculators", norm_output=True), {"norm_output": "false"}),
    (Written("specforge", embedding="random"), {"embedding": "own"}),
    (Written("specforge"), {"rope_theta": "500"}),
    (Written("official", attention_bias=True), {"rms_norm_eps": "0.5"}),
]
OTHERS = [
    Written("official", layers=(1,), draft_vocab=None, rope_theta=None),
    Written("official", norm_before_fc=True),
    Written("specforge", fc_norm=True, layers=(0, 1)),
    Written("speculators", fc_norm=True, mlp_bias=True),
    Written("official", hidden=48, heads=6, kv_heads=6, embedding="random"),
    Written("specforge", qk_norm=True, head_dim=12, draft_vocab=8),
    Written("speculators", rope_scaling={"rope_type": "linear", "factor": 3.0}),
    Written("official", rope_scaling=YARN, rope_theta=300.0),
]


def module_logits(head: Head, model: Any, written: Written, path: list[int]) -> np.ndarray:
    """Logits after PROMPT's features and a path, without cache or tree."""
    module = build_head(head, torch.float32)
    table = embedding_table(head, model.get_input_embeddings().weight)
    g = module.fuse(torch.from_numpy(random_features(written, len(PROMPT)))[None])
    for length in range(len(path) + 1):
        tokens = torch.tensor([[*PROMPT, *path[:length]]])
        positions = torch.arange(tokens.shape[1])[None]
        out = module(table[tokens], g, positions, causal_attention)
        g = torch.cat([g, module.feed_back(out[:, -1:])], 1)
    logits: np.ndarray = module.logits(out)[0, -1].numpy()
    return logits


@pytest.mark.parametrize("written", [*(w for w, _ in SWITCHES), *OTHERS], ids=repr)
def test_four_steps_are_those_of_the_loops(target: Any, tmp_path: Path, written: Written) -> None:
    head = read_head(written.save(tmp_path, target), facts(target), None, assumed(written))
    plain = reference(written, tmp_path, target)
    features = torch.from_numpy(random_features(written, len(PROMPT)))
    for path in ([], [7], [7, 20], [7, 20, 30]):
        expected = plain.logits(features, PROMPT, path)
        found = module_logits(head, target, written, path)
        assert relative_error(found, expected) < TOLERANCE, path


@pytest.mark.parametrize(("written", "other"), SWITCHES, ids=repr)
def test_another_reading_of_the_same_file_has_other_logits(
    target: Any, tmp_path: Path, written: Written, other: dict[str, str]
) -> None:
    """So the test above can fail; and a reading is changed without reading the file again."""
    head = read_head(written.save(tmp_path, target), facts(target), None, assumed(written))
    changed = reread(head, assume=other)
    assert changed.weights["fc.weight"] is head.weights["fc.weight"]
    path = [7, 20, 30]
    first, second = (module_logits(h, target, written, path) for h in (head, changed))
    assert relative_error(first, second) > 100 * TOLERANCE


def test_an_own_embedding_on_the_users_word(target: Any, tmp_path: Path) -> None:
    written = Written("specforge", embedding="random")
    head = read_head(written.save(tmp_path, target), facts(target), None, {"embedding": "own"})
    plain = ReferenceHead(tmp_path, torch.zeros(0), own_embedding=True)
    features = torch.from_numpy(random_features(written, len(PROMPT)))
    expected = plain.logits(features, PROMPT, [7])
    assert relative_error(module_logits(head, target, written, [7]), expected) < TOLERANCE


def test_rope_reaches_beyond_the_heads_own_context(target: Any, tmp_path: Path) -> None:
    """Trap 7: max_position_embeddings of a head is no limit, nor the length of a table."""
    written = replace(OFFICIAL, config={"max_position_embeddings": 4})
    head = read_head(written.save(tmp_path, target), facts(target))
    plain = reference(written, tmp_path, target)
    features = torch.from_numpy(random_features(written, len(PROMPT)))
    expected = plain.logits(features, PROMPT, [])
    assert relative_error(module_logits(head, target, written, []), expected) < TOLERANCE
