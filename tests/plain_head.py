"""Draft heads written plainly from the method's section 2; a draft engine compared with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3.export.checks.reference import relative_error
from eagle3.runtime.ort.draft_engine import DraftEngine

TOLERANCE = 1e-4


class PlainHead:
    """An EAGLE-3 head, one path at a time: no cache, no tree, no package code."""

    layer_name = "midlayer"

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

    def fuse(self, features: Tensor) -> Tensor:
        """features [T,F] -> g [T,d]."""
        return self.linear("fc", features)

    def layer_input(self, g: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding[tokens])
        return torch.cat([embedded, self.norm("midlayer.hidden_norm", g)], -1), g

    def feed_back(self, out: Tensor) -> Tensor:
        return self.norm("norm", out) if self.config.get("norm_output") else out

    def read(self, out: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("norm", out))

    def layer(self, g: Tensor, tokens: Tensor) -> Tensor:
        """g [T,d] of positions 0.., tokens [T] of positions 1.. -> out [T,d]."""
        x, residual = self.layer_input(g, tokens)
        attn, mlp = f"{self.layer_name}.self_attn", f"{self.layer_name}.mlp"
        q, k, v = (
            self.linear(f"{attn}.{n}_proj", x).view(len(x), -1, self.head_dim) for n in "qkv"
        )
        q, k = self.rotate(q), self.rotate(k)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        later = torch.ones(len(x), len(x)).triu(1).bool()
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        h = residual + self.linear(f"{attn}.o_proj", attended)
        y = self.norm(f"{self.layer_name}.post_attention_layernorm", h)
        gate = torch.nn.functional.silu(self.linear(f"{mlp}.gate_proj", y))
        return h + self.linear(f"{mlp}.down_proj", gate * self.linear(f"{mlp}.up_proj", y))

    def logits(self, features: Tensor, tokens: list[int], path: list[int]) -> np.ndarray:
        """Logits [Vd] after features [T,F], their next tokens [T] and a path of draft tokens."""
        g, ids = self.fuse(features), list(tokens)
        for token in path:
            out = self.layer(g, torch.tensor(ids))
            g, ids = torch.cat([g, self.feed_back(out[-1:])]), [*ids, token]
        out = self.layer(g, torch.tensor(ids))
        return self.read(out[-1:])[0].numpy()


class PlainEagle1Head(PlainHead):
    """An EAGLE-1/2 head: no norm in front, the target's lm_head behind."""

    layer_name = "layers.0"

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model.get_input_embeddings().weight)
        self.lm_head = model.get_output_embeddings().weight

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def layer_input(self, g: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear("fc", torch.cat([self.embedding[tokens], g], -1))
        return h, h

    def feed_back(self, out: Tensor) -> Tensor:
        return out

    def read(self, out: Tensor) -> Tensor:
        return out @ self.lm_head.T


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B,Hq,N,D], k, v [B,Hkv,N,D] -> [B,N,Hq,D], for the package's modules."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


# Level -> (path of each node, row of its parent in the level before).
_LEVELS: list[list[tuple[list[int], int]]] = [
    [([7], 0), ([8], 0), ([9], 0)],
    [([7, 20], 0), ([9, 20], 2), ([7, 21], 0)],
    [([7, 20, 30], 0), ([7, 21, 30], 2), ([9, 20, 30], 1), ([7, 20, 31], 0)],
]


def check_draft_tree(
    engine: DraftEngine, plain: PlainHead, target_ids: np.ndarray, features: np.ndarray
) -> None:
    """Three levels whose branches differ at the top and only deep down, behind two extensions.

    features [14,F] float32. Every node must have the logits, the candidates and their
    log-probabilities that `plain` gives its path.
    """
    tokens = np.random.default_rng(0).integers(2, 64, len(features)).tolist()
    engine.feature_slots(9)[:] = features[:9]
    engine.extend(np.array(tokens[:9]), top_k=2)
    engine.feature_slots(5)[:] = features[9:]
    out = engine.extend(np.array(tokens[9:]), top_k=3, want_logits=True)
    all_features = torch.from_numpy(features)

    def check(row: int, path: list[int]) -> None:
        expected = plain.logits(all_features, tokens, path)
        assert out.logits is not None
        assert relative_error(out.logits[row], expected) < TOLERANCE
        best = np.argsort(-expected)[: out.top_ids.shape[1]]
        assert np.array_equal(out.top_ids[row], target_ids[best])
        log_probs = torch.log_softmax(torch.from_numpy(expected), -1)[best]
        allowed = TOLERANCE * max(1.0, np.abs(expected).max())
        assert np.allclose(out.top_log_probs[row], log_probs, atol=allowed)

    check(0, [])
    hidden = out.hidden[-1:].copy()
    seen: list[list[int]] = []  # per row of the level before: its ancestors among all draft rows
    num_rows = 0
    for depth, level in enumerate(_LEVELS, start=1):
        parents = [parent for _, parent in level]
        rows = [[*(seen[parent] if seen else []), num_rows + i] for i, parent in enumerate(parents)]
        mask = np.zeros((len(level), num_rows + len(level)), np.bool_)
        for row, visible in enumerate(rows):
            mask[row, visible] = True
        step_ids = np.array([path[-1] for path, _ in level])
        out = engine.step(step_ids, hidden[parents], depth, mask, top_k=2, want_logits=True)
        for row, (path, _) in enumerate(level):
            check(row, path)
        hidden, seen, num_rows = out.hidden.copy(), rows, num_rows + len(level)
