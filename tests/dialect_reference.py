"""EAGLE-3 heads of every dialect in plain loops, written from the description of the formats.

Shares no code with the package, and reads the checkpoint itself: one row, one head, one key at a
time. Letters: T rows, F width of the fused features, d hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor


class ReferenceHead:
    """What a draft row computes, in the dialect of the folder.

    embedding [V,D]: the target's. own_embedding: tokens are looked up in the checkpoint's own
    table. norm_output: overrides the config's, where the dialect leaves its meaning open.
    """

    def __init__(
        self,
        folder: Path,
        embedding: Tensor,
        *,
        own_embedding: bool = False,
        norm_output: bool | None = None,
    ) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        if "speculators_model_type" in raw:
            self.layer_config: dict[str, Any] = raw["transformer_layer_config"]
            self.layer, default = "layers.0", True
        else:
            self.layer_config, self.layer, default = raw, "midlayer", False
        self.norm_before_residual = raw.get("norm_before_residual", default)
        self.norm_before_fc = raw.get("norm_before_fc", False)
        self.fc_norm = raw.get("fc_norm", False)
        self.norm_output = raw.get("norm_output", False) if norm_output is None else norm_output
        self.embedding = self.w["embed_tokens.weight"] if own_embedding else embedding
        self.heads = self.layer_config["num_attention_heads"]
        self.kv_heads = self.layer_config["num_key_value_heads"]
        d = self.layer_config["hidden_size"]
        self.head_dim = self.layer_config.get("head_dim") or d // self.heads

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = sum(float(v) ** 2 for v in x) / len(x)
        return x / math.sqrt(mean_square + self.layer_config["rms_norm_eps"]) * self.w[name]

    def frequency(self, pair: int) -> float:
        """Radians by which a position turns one pair of a vector."""
        rope = self.layer_config.get("rope_scaling") or self.layer_config.get("rope_parameters")
        rope = rope or {}
        theta = rope.get("rope_theta") or self.layer_config.get("rope_theta") or 10000.0
        plain: float = theta ** (-2 * pair / self.head_dim)
        kind = rope.get("rope_type", "default")
        if kind == "linear":
            return plain / rope["factor"]
        if kind == "llama3":
            turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0), 1)
            return share * plain + (1 - share) * plain / rope["factor"]
        if kind == "yarn":
            low, high = (self._yarn_pair(rope, theta, turns) for turns in (32, 1))
            low, high = max(math.floor(low), 0), min(math.ceil(high), self.head_dim - 1)
            stretched = min(max((pair - low) / max(high - low, 0.001), 0), 1)
            return stretched * plain / rope["factor"] + (1 - stretched) * plain
        assert kind == "default"
        return plain

    def _yarn_pair(self, rope: dict[str, Any], theta: float, turns: float) -> float:
        """The pair that turns so many times over the original length."""
        length = rope["original_max_position_embeddings"]
        inside = math.log(length / (turns * 2 * math.pi))
        return self.head_dim * inside / (2 * math.log(theta))

    def magnitude(self) -> float:
        """What YaRN multiplies rotated vectors with."""
        rope = self.layer_config.get("rope_scaling") or self.layer_config.get("rope_parameters")
        if not rope or rope.get("rope_type") != "yarn":
            return 1.0
        return 0.1 * math.log(rope["factor"]) + 1.0

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """x [head_dim]: entry i and entry i + half are a pair."""
        half, out, size = self.head_dim // 2, x.clone(), self.magnitude()
        for i in range(half):
            angle = position * self.frequency(i)
            cos, sin = size * math.cos(angle), size * math.sin(angle)
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def fuse(self, features: Tensor) -> Tensor:
        """features [F] of one position -> g [d]."""
        if self.norm_before_fc:
            features = self.norm("input_norm.weight", features)
        if self.fc_norm:
            count = sum(name.startswith("fc_norm.") for name in self.w)
            parts = features.chunk(count)
            normed = [self.norm(f"fc_norm.{i}.weight", part) for i, part in enumerate(parts)]
            features = torch.cat(normed)
        return self.linear("fc", features)

    def project(self, kind: str, x: Tensor, count: int, position: int) -> list[Tensor]:
        """x [2d] -> the `count` heads of q, k or v, normed and rotated where they are."""
        attn = f"{self.layer}.self_attn"
        found = list(self.linear(f"{attn}.{kind}_proj", x).split(self.head_dim))
        assert len(found) == count
        norm = f"{attn}.{kind}_norm.weight"
        if norm in self.w:
            found = [self.norm(norm, head) for head in found]
        return found if kind == "v" else [self.rotate(head, position) for head in found]

    def last_row(self, g: list[Tensor], tokens: list[int]) -> Tensor:
        """g [d] of positions 0.., tokens of positions 1.. -> what the layer makes of the last."""
        normed = [self.norm(f"{self.layer}.hidden_norm.weight", row) for row in g]
        inputs = [
            torch.cat([self.norm(f"{self.layer}.input_layernorm.weight", self.embedding[t]), row])
            for t, row in zip(tokens, normed, strict=True)
        ]
        last = len(g) - 1
        queries = self.project("q", inputs[last], self.heads, last)
        keys = [self.project("k", x, self.kv_heads, i) for i, x in enumerate(inputs)]
        values = [self.project("v", x, self.kv_heads, i) for i, x in enumerate(inputs)]
        attended = []
        for head, query in enumerate(queries):
            shared = head // (self.heads // self.kv_heads)
            scores = [float(query @ key[shared]) / math.sqrt(self.head_dim) for key in keys]
            peak = max(scores)
            weights = [math.exp(score - peak) for score in scores]
            total = sum(weights)
            row = torch.zeros(self.head_dim)
            for weight, value in zip(weights, values, strict=True):
                row = row + weight / total * value[shared]
            attended.append(row)
        residual = normed[last] if self.norm_before_residual else g[last]
        h = residual + self.linear(f"{self.layer}.self_attn.o_proj", torch.cat(attended))
        y = self.norm(f"{self.layer}.post_attention_layernorm.weight", h)
        gate = self.linear(f"{self.layer}.mlp.gate_proj", y)
        silu = gate / (1 + torch.exp(-gate))
        up = self.linear(f"{self.layer}.mlp.up_proj", y)
        return h + self.linear(f"{self.layer}.mlp.down_proj", silu * up)

    def logits(self, features: Tensor, tokens: list[int], path: list[int]) -> np.ndarray:
        """Logits [Vd] after features [T,F], their next tokens [T] and a path of draft tokens."""
        g, ids = [self.fuse(row) for row in features], list(tokens)
        for token in path:
            out = self.last_row(g, ids)
            g.append(self.norm("norm.weight", out) if self.norm_output else out)
            ids.append(token)
        final = self.norm("norm.weight", self.last_row(g, ids))
        return self.linear("lm_head", final).numpy()

    def target_ids(self) -> np.ndarray:
        """The target's id of every draft id, d2t holding offsets."""
        size = len(self.w["lm_head.weight"])
        if "d2t" not in self.w:
            return np.arange(size)
        return np.array([i + int(offset) for i, offset in enumerate(self.w["d2t"])])
