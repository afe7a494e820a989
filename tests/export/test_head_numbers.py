"""The head's engines against an implementation of its own, written from the method's section 2."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.export.check import relative_error
from eagle3.export.head_config import TargetFacts, read_head
from eagle3.export.head_graph import build_head
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.draft import DraftEngine
from eagle3.runtime.session import Clock

FACTS = TargetFacts(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class PlainHead:
    """Method section 2 in plain PyTorch, one path at a time: no cache, no tree, no package code."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.embedding = embedding
        self.heads = self.config["num_attention_heads"]
        self.head_dim = self.config.get("head_dim") or embedding.shape[1] // self.heads

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        bias = self.w.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x / scale * self.w[f"{name}.weight"]

    def frequencies(self) -> Tensor:
        half = torch.arange(self.head_dim // 2) * 2 / self.head_dim
        freq = self.config.get("rope_theta", 10000.0) ** -half
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return freq
        # Llama 3.1: long waves are stretched, short ones kept, those in between blended.
        wavelength = 2 * math.pi / freq
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - share) * freq / scaling["factor"] + share * freq

    def rotate(self, x: Tensor) -> Tensor:
        """x [T,H,D]: halves of a vector are the parts of complex numbers."""
        angle = torch.arange(len(x))[:, None] * self.frequencies()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(self, g: Tensor, tokens: Tensor) -> Tensor:
        """g [T,d] of positions 0.., tokens [T] of positions 1.. -> out [T,d]."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding[tokens])
        x = torch.cat([embedded, self.norm("midlayer.hidden_norm", g)], -1)
        q, k, v = (
            self.linear(f"midlayer.self_attn.{n}_proj", x).view(len(x), -1, self.head_dim)
            for n in "qkv"
        )
        q, k = self.rotate(q), self.rotate(k)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        later = torch.ones(len(x), len(x)).triu(1).bool()
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        h = g + self.linear("midlayer.self_attn.o_proj", attended)
        y = self.norm("midlayer.post_attention_layernorm", h)
        gate = torch.nn.functional.silu(self.linear("midlayer.mlp.gate_proj", y))
        return h + self.linear(
            "midlayer.mlp.down_proj", gate * self.linear("midlayer.mlp.up_proj", y)
        )

    def logits(self, features: Tensor, tokens: list[int], path: list[int]) -> np.ndarray:
        """Logits [Vd] after features [T,3d], their next tokens [T] and a path of draft tokens."""
        g, ids = self.linear("fc", features), list(tokens)
        for token in path:
            out = self.layer(g, torch.tensor(ids))
            g, ids = torch.cat([g, out[-1:]]), [*ids, token]  # its own output, before the norm
        out = self.layer(g, torch.tensor(ids))
        return self.linear("lm_head", self.norm("norm", out[-1:]))[0].numpy()


def test_every_node_of_a_draft_tree_has_its_paths_logits(
    llama: Any, head_folder: Path, full_bundle: Bundle
) -> None:
    """Three levels whose branches differ at the top and only deep down, behind two extensions."""
    plain = PlainHead(head_folder, llama.get_input_embeddings().weight)
    ids = read_head(head_folder, FACTS).target_ids
    rng = np.random.default_rng(0)
    features = rng.normal(size=(14, 96)).astype(np.float32)
    tokens = rng.integers(2, 64, 14).tolist()
    engine = DraftEngine(full_bundle, 1, Clock())
    engine.feature_slots(9)[:] = features[:9]
    engine.extend(np.array(tokens[:9]), top_k=2)
    engine.feature_slots(5)[:] = features[9:]
    out = engine.extend(np.array(tokens[9:]), top_k=3, want_logits=True)
    all_features = torch.from_numpy(features)

    def check(found: np.ndarray, top_ids: np.ndarray, top: np.ndarray, path: list[int]) -> None:
        expected = plain.logits(all_features, tokens, path)
        assert relative_error(found, expected) < TOLERANCE
        best = np.argsort(-expected)[: len(top_ids)]
        assert np.array_equal(top_ids, ids[best])
        assert np.allclose(top, torch.log_softmax(torch.from_numpy(expected), -1)[best], atol=1e-4)

    assert out.logits is not None
    check(out.logits[0], out.top_ids[0], out.top_log_probs[0], [])
    # Level -> (path of each node, row of its parent in the level before).
    levels: list[list[tuple[list[int], int]]] = [
        [([7], 0), ([8], 0), ([9], 0)],
        [([7, 20], 0), ([9, 20], 2), ([7, 21], 0)],
        [([7, 20, 30], 0), ([7, 21, 30], 2), ([9, 20, 30], 1), ([7, 20, 31], 0)],
    ]
    hidden = out.hidden[-1:].copy()
    seen: list[list[int]] = []  # per row of the level before: its ancestors among all draft rows
    num_rows = 0
    for depth, level in enumerate(levels, start=1):
        parents = [parent for _, parent in level]
        rows = [[*(seen[parent] if seen else []), num_rows + i] for i, parent in enumerate(parents)]
        mask = np.zeros((len(level), num_rows + len(level)), np.bool_)
        for row, visible in enumerate(rows):
            mask[row, visible] = True
        step_ids = np.array([path[-1] for path, _ in level])
        out = engine.step(step_ids, hidden[parents], depth, mask, top_k=2, want_logits=True)
        assert out.logits is not None
        for row, (path, _) in enumerate(level):
            check(out.logits[row], out.top_ids[row], out.top_log_probs[row], path)
        hidden, seen, num_rows = out.hidden.copy(), rows, num_rows + len(level)


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

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)

    positions = torch.arange(90)[None]
    out = module(embedding[tokens], module.fc(features)[None], positions, attend)
    expected = plain.logits(features, tokens[0].tolist(), [])
    assert relative_error(module.logits(out)[0, -1].numpy(), expected) < TOLERANCE
