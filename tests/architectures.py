"""The table of supported architectures, tiny: what makes each special, and how to switch that off.

`docs/targets.md` is the same table for readers; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tiny
import torch

WINDOW = 16  # of every model here that has sliding windows
CONTEXT = 128  # of every plan here, and where length-dependent RoPE would change
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def _without(part: str, value: float) -> Callable[[Any], None]:
    """Fills every parameter whose name ends in `part`."""

    def edit(model: Any) -> None:
        found = [p for name, p in model.named_parameters() if name.endswith(part)]
        assert found
        for parameter in found:
            parameter.data.fill_(value)

    return edit


Off = Mapping[str, Any] | Callable[[Any], None]


@dataclass(frozen=True)
class Row:
    """One supported architecture.

    config: of transformers' `model_type`, beyond the sizes that all share. off: what is special,
    each switched off by other config values or by an edit of the model; every one must show.
    scale, seed: of `tiny.tiny_model`, such that its greedy text has many tokens and no near-ties.
    """

    architecture: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    off: tuple[Off, ...] = ()
    num_layers: int = 2
    scale: float = 2.0
    seed: int = 0


_SMOOTH = {"factor": 8.0, "original_max_position_embeddings": 64}
_LONG = {
    "short_factor": [1.5, 2.0, 3.0, 4.0],
    "long_factor": [5.0, 6.0, 7.0, 8.0],
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": CONTEXT,
}
_NO_WINDOW = {"sliding_window": 512}

ROWS: dict[str, Row] = {
    "llama": Row("LlamaForCausalLM", "llama", seed=1),
    "llama_llama3": Row(
        "LlamaForCausalLM",
        "llama",
        _rope("llama3", **_SMOOTH, low_freq_factor=1.0, high_freq_factor=4.0),
        (_rope("default"),),
    ),
    "llama_yarn": Row("LlamaForCausalLM", "llama", _rope("yarn", **_SMOOTH), (_rope("default"),)),
    "llama_linear": Row(
        "LlamaForCausalLM", "llama", _rope("linear", factor=2.0), (_rope("default"),), seed=1
    ),
    "llama_dynamic": Row(
        "LlamaForCausalLM",
        "llama",
        {**_rope("dynamic", factor=2.0), "max_position_embeddings": CONTEXT},
        seed=1,
    ),
    "qwen2": Row("Qwen2ForCausalLM", "qwen2", off=(_without("q_proj.bias", 0.0),)),
    "qwen3": Row("Qwen3ForCausalLM", "qwen3", _HEAD, (_without("q_norm.weight", 1.0),)),
    "qwen3_moe": Row(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_HEAD, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
        ({"num_experts_per_tok": 1},),
    ),
    "mistral": Row(
        "MistralForCausalLM", "mistral", {**_HEAD, "sliding_window": WINDOW}, (_NO_WINDOW,)
    ),
    "mixtral": Row(
        "MixtralForCausalLM",
        "mixtral",
        {**_EXPERTS, "num_local_experts": 4},
        ({"num_experts_per_tok": 1},),
        seed=2,
    ),
    "gemma2": Row(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            **_HEAD,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
        (_NO_WINDOW, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}),
        seed=1,
    ),
    # Windows alternate: two sliding layers, then a full one. Embeddings that are tied, and large
    # beside what the layers add, would only repeat their input.
    "gemma3": Row(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_HEAD,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
        },
        (_NO_WINDOW,),
        num_layers=3,
        scale=0.02,
    ),
    "phi3": Row(
        "Phi3ForCausalLM",
        "phi3",
        {"pad_token_id": 0, **_rope("default", partial_rotary_factor=0.5)},
        (_rope("default", partial_rotary_factor=1.0),),
        seed=1,
    ),
    "phi3_longrope": Row(
        "Phi3ForCausalLM",
        "phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": CONTEXT,
            **_rope("longrope", **_LONG),
        },
        (_rope("default", partial_rotary_factor=1.0),),
    ),
    "smollm3": Row(
        "SmolLM3ForCausalLM",
        "smollm3",
        {"pad_token_id": 0, "no_rope_layers": [1, 0]},
        ({"no_rope_layers": [1, 1]},),
    ),
    "olmo2": Row("Olmo2ForCausalLM", "olmo2", off=(_without("q_norm.weight", 1.0),), seed=3),
    "granite": Row(
        "GraniteForCausalLM",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
        tuple(
            {name: 1.0}
            for name in (
                "embedding_multiplier",
                "logits_scaling",
                "residual_multiplier",
                "attention_multiplier",
            )
        ),
        seed=1,
    ),
    "gpt_oss": Row(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_HEAD,
            **_EXPERTS,
            **_rope("yarn", **_SMOOTH, truncate=False),
            "num_local_experts": 4,
            "sliding_window": WINDOW,
        },
        (_NO_WINDOW, _without("sinks", -1e4), _without("down_proj_bias", 0.0)),
    ),
    "glm4": Row(
        "Glm4ForCausalLM",
        "glm4",
        {**_HEAD, "pad_token_id": 0, **_rope("default", partial_rotary_factor=0.5)},
        (_rope("default", partial_rotary_factor=1.0),),
        seed=1,
    ),
    "cohere2": Row(
        "Cohere2ForCausalLM",
        "cohere2",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        (_NO_WINDOW, {"logit_scale": 1.0}, {"layer_types": ["sliding_attention"] * 2}),
        seed=1,
    ),
    "starcoder2": Row(
        "Starcoder2ForCausalLM", "starcoder2", {"sliding_window": WINDOW}, (_NO_WINDOW,), seed=1
    ),
    "gpt_neox": Row(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _rope("default", partial_rotary_factor=0.5),
        (_rope("default", partial_rotary_factor=1.0), {"use_parallel_residual": False}),
        seed=5,
    ),
}


def make_model(row: Row, **config: Any) -> Any:
    """The row's model in float32; other config values keep its weights."""
    options = {"num_layers": row.num_layers, "scale": row.scale, "seed": row.seed}
    model = tiny.tiny_model(row.model_type, **options, **{**row.config, **config})
    generator = torch.Generator().manual_seed(row.seed)
    for parameter in model.parameters():
        if parameter.dim() == 3:
            parameter.data.normal_(0, 0.3, generator=generator)
    tiny.jitter_vectors(model)
    return model


def switched_off(row: Row, off: Off) -> Any:
    """The row's model without one thing that is special about it."""
    if callable(off):
        model = make_model(row)
        off(model)
        return model
    return make_model(row, **off)
