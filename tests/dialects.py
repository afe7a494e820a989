"""Tiny random draft heads written in every dialect, with every switch (formats of the field).

Letters: d hidden size of the head, D of the target, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Written:
    """What a head is to be like; `config` is laid over its config.json.

    dialect: "official", "specforge" or "speculators". layers: hidden_states indices. hidden: d,
    where it is not D. draft_vocab: Vd; None is V, without a mapping. embedding: "copy" of the
    target's, "random", or None. A switch that is None is left out of the config.
    """

    dialect: str
    layers: tuple[int, ...] = (0, 1, 2)
    hidden: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    draft_vocab: int | None = 40
    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding: str | None = None
    rope_theta: float | None = 10000.0
    rope_scaling: dict[str, Any] | None = None
    seed: int = 3
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        return "layers.0" if self.dialect == "speculators" else "midlayer"

    def save(self, folder: Path, model: Any) -> Path:
        """Writes the folder of a head for `model`."""
        folder.mkdir(parents=True, exist_ok=True)
        raw = {**self.raw(model), **self.config}
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(self.tensors(model), folder / "model.safetensors")
        return folder

    def raw(self, model: Any) -> dict[str, Any]:
        """config.json."""
        target = model.config
        d = self.hidden or target.hidden_size
        layer: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": d,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "vocab_size": target.vocab_size,
            "tie_word_embeddings": False,
        }
        if self.head_dim is not None:
            layer["head_dim"] = self.head_dim
        head: dict[str, Any] = {"draft_vocab_size": self.draft_vocab or target.vocab_size}
        if self.hidden is not None:
            head["target_hidden_size"] = target.hidden_size
        for key in ("norm_before_residual", "norm_output"):
            if getattr(self, key) is not None:
                head[key] = getattr(self, key)
        if self.dialect == "speculators":
            return {**head, **self._speculators(layer)}
        if self.rope_theta is not None:
            layer["rope_theta"] = self.rope_theta
        kind = {"official": "LlamaForCausalLM", "specforge": "LlamaForCausalLMEagle3"}
        head |= {key: True for key in ("norm_before_fc", "fc_norm") if getattr(self, key)}
        head["rope_scaling"] = self.rope_scaling
        ids = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.layers]}
        return {**layer, **head, "architectures": [kind[self.dialect]], "eagle_config": ids}

    def _speculators(self, layer: dict[str, Any]) -> dict[str, Any]:
        layer |= {"model_type": "qwen3" if self.qk_norm else "llama", "layer_types": None}
        layer["rope_parameters"] = {"rope_type": "default", **(self.rope_scaling or {})}
        if self.rope_theta is not None:
            layer["rope_parameters"]["rope_theta"] = self.rope_theta
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.5.0",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x/y"}},
            "transformer_layer_config": layer,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
        }

    def tensors(self, model: Any) -> dict[str, Tensor]:
        """Random weights; norms and biases are no ones and zeros, which would hide them."""
        generator = torch.Generator().manual_seed(self.seed)
        width, vocab = model.config.hidden_size, model.config.vocab_size
        d = self.hidden or width
        head_dim = self.head_dim or d // self.heads
        a, kv = self.heads * head_dim, self.kv_heads * head_dim
        attn, mlp = f"{self.layer}.self_attn", f"{self.layer}.mlp"
        count, size = len(self.layers), self.draft_vocab or vocab
        matrices = {
            "fc": (d, count * width),
            f"{attn}.q_proj": (a, 2 * d),
            f"{attn}.k_proj": (kv, 2 * d),
            f"{attn}.v_proj": (kv, 2 * d),
            f"{attn}.o_proj": (d, a),
            f"{mlp}.gate_proj": (48, d),
            f"{mlp}.up_proj": (48, d),
            f"{mlp}.down_proj": (d, 48),
            "lm_head": (size, d),
        }
        biased = [n for n in matrices if self.attention_bias and n.startswith(attn)]
        biased += [n for n in matrices if self.mlp_bias and n.startswith(mlp)]
        norms = {f"{self.layer}.{n}": d for n in ("hidden_norm", "input_layernorm")}
        norms |= {f"{self.layer}.post_attention_layernorm": d, "norm": d}
        norms |= {"input_norm": count * width} if self.norm_before_fc else {}
        norms |= {f"fc_norm.{i}": width for i in range(count)} if self.fc_norm else {}
        norms |= {f"{attn}.{x}_norm": head_dim for x in "qk"} if self.qk_norm else {}

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        weights = {f"{n}.weight": 0.3 * draw(*shape) for n, shape in matrices.items()}
        weights |= {f"{n}.bias": 0.3 * draw(matrices[n][0]) for n in biased}
        weights |= {f"{n}.weight": 1 + 0.3 * draw(size) for n, size in norms.items()}
        if self.draft_vocab is not None:
            ids = torch.randperm(vocab, generator=generator)[:size].sort().values
            weights["d2t"] = ids - torch.arange(size)
            weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        if self.embedding is not None:
            own = model.get_input_embeddings().weight.detach().clone()
            weights["embed_tokens.weight"] = own if self.embedding == "copy" else draw(vocab, d)
        return weights
