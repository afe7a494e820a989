"""Tiny random targets and heads for tests: made in code, saved as the checkpoints users have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eagle3.export.build import ExportRequest, export_bundle
from eagle3.plans.plan import Plan, TreePlan
from eagle3.runtime.bundle import Bundle

HIDDEN = 32
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"

# What makes each architecture tiny beyond the sizes that all share.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 16, "head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    },
    "phi3": {"pad_token_id": 0},
}


def tiny_model(
    architecture: str = "llama",
    *,
    vocab_size: int = 64,
    num_layers: int = 8,
    seed: int = 0,
    scale: float = 1.0,
    **overrides: Any,
) -> Any:
    """A random model in float32; `scale` widens its logits so that its text is not one token."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            **ARCHITECTURES.get(architecture, {}),
            **overrides,
        },
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3 if "embed" not in name else 1.0)
        model.get_output_embeddings().weight.mul_(scale)
    return model.requires_grad_(False)


def tiny_tokenizer(vocab_size: int, *, chat_template: str | None = TEMPLATE) -> Any:
    """Words `t0`, `t1`, ...; a text is words with spaces. Token 1 is the EOS `t1`."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    backend = Tokenizer(WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="t1", unk_token="t0", chat_template=chat_template
    )


def save_target(folder: Path, model: Any, tokenizer: Any | None = None, **save: Any) -> Path:
    """A folder as `save_pretrained` writes it."""
    model.save_pretrained(folder, **save)
    (tokenizer or tiny_tokenizer(model.config.vocab_size)).save_pretrained(folder)
    return folder


def head_config(
    model: Any, *, draft_vocab_size: int | None = None, **overrides: Any
) -> dict[str, Any]:
    """config.json of a head in the official layout."""
    config = model.config.get_text_config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size or config.vocab_size,
        **overrides,
    }


def save_head(
    folder: Path,
    model: Any,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 1,
    aux_layer_ids: tuple[int, ...] | None = None,
    **overrides: Any,
) -> Path:
    """A random head in the official layout. The draft vocabulary is spread over the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = head_config(model, draft_vocab_size=draft_vocab_size, **overrides)
    if aux_layer_ids is not None:
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layer_ids]}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(head_weights(model, raw, seed), folder / "model.safetensors")
    return folder


def head_weights(model: Any, raw: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tensors of the official layout for config.json `raw`."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config.get_text_config()
    d, whole, small = config.hidden_size, raw["vocab_size"], raw["draft_vocab_size"]
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or d // heads
    a, kv, wide = heads * head_dim, raw["num_key_value_heads"] * head_dim, raw["intermediate_size"]
    attn, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes = {
        "fc.weight": (d, 3 * d),
        f"{attn}.q_proj.weight": (a, 2 * d),
        f"{attn}.k_proj.weight": (kv, 2 * d),
        f"{attn}.v_proj.weight": (kv, 2 * d),
        f"{attn}.o_proj.weight": (d, a),
        f"{mlp}.gate_proj.weight": (wide, d),
        f"{mlp}.up_proj.weight": (wide, d),
        f"{mlp}.down_proj.weight": (d, wide),
        "lm_head.weight": (small, d),
    }
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }
    for norm in (
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
        "norm",
    ):
        weights[f"{norm}.weight"] = 1 + 0.1 * torch.randn(d, generator=generator)
    if small != whole:
        ids = torch.randperm(whole, generator=generator)[:small].sort().values
        weights["d2t"] = ids - torch.arange(small)
        weights["t2d"] = torch.zeros(whole, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def tiny_plan(**overrides: Any) -> Plan:
    """Small buffers; a tree of 6 nodes."""
    sizes = {"max_seq_len": 128, "prefill_chunk": 16, "max_draft_tokens": 32}
    return Plan(**{**sizes, "tree": TreePlan(3, 3, 6), **overrides})


def export_tiny(
    target: Path, head: Path | None, output: Path, plan: Plan | None = None, **request: Any
) -> Bundle:
    """Runs the whole export, self-check included."""
    bundle, _ = export_bundle(
        ExportRequest(
            target=str(target),
            draft=None if head is None else str(head),
            output=output,
            plan=plan or tiny_plan(),
            **request,
        )
    )
    return bundle
