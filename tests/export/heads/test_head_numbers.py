"""The head's engines against an implementation of its own, written from the method's section 2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from plain_head import TOLERANCE, PlainHead, causal_attention, check_draft_tree
from safetensors.torch import load_file, save_file

from eagle3.export.checks.reference import relative_error
from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.stats import Clock

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_node_of_a_draft_tree_has_its_paths_logits(
    llama: Any, head_folder: Path, full_bundle: Bundle
) -> None:
    plain = PlainHead(head_folder, llama.get_input_embeddings().weight)
    ids = read_head(head_folder, FACTS).target_ids
    features = np.random.default_rng(0).normal(size=(14, 96)).astype(np.float32)
    check_draft_tree(DraftEngine(full_bundle, 1, Clock()), plain, ids, features)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"head_dim": 16},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6},
        {"rope_scaling": LLAMA3, "rope_theta": 500.0},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_the_layer_follows_its_config(llama: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = tiny.save_head(tmp_path / "head", llama, draft_vocab_size=40, **config)
    if config.get("attention_bias"):
        weights = load_file(folder / "model.safetensors")
        for name in [n for n in weights if "_proj.weight" in n]:
            weights[name.replace("weight", "bias")] = torch.randn(len(weights[name]))
        save_file(weights, folder / "model.safetensors")
    module = build_head(read_head(folder, FACTS), torch.float32)
    embedding = llama.get_input_embeddings().weight
    plain = PlainHead(folder, embedding)
    tokens = torch.randint(0, 64, (1, 90))  # past LLAMA3's original length
    features = torch.randn(90, 96)

    positions = torch.arange(90)[None]
    out = module(embedding[tokens], module.fuse(features[None]), positions, causal_attention)
    expected = plain.logits(features, tokens[0].tolist(), [])
    assert relative_error(module.logits(out)[0, -1].numpy(), expected) < TOLERANCE


def test_scores_beyond_float16_do_not_reach_masked_rows(
    shallow: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    """Of a barely trained head they are 1e6; a mask of -65504 let through what it hid."""
    folder = tiny.save_head(
        tmp_path / "head", shallow, draft_vocab_size=40, aux_layer_ids=(0, 1, 2)
    )
    weights = load_file(folder / "model.safetensors")
    for name in "qk":
        weights[f"midlayer.self_attn.{name}_proj.weight"] *= 300
    save_file(weights, folder / "model.safetensors")
    bundle = tiny.export_tiny(shallow_folder, folder, tmp_path / "bundle")
    plain = PlainHead(folder, shallow.get_input_embeddings().weight)
    ids = read_head(folder, replace(FACTS, num_layers=2)).target_ids
    features = np.random.default_rng(0).normal(size=(14, 96)).astype(np.float32)
    check_draft_tree(DraftEngine(bundle, 1, Clock()), plain, ids, features)
