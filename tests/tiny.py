"""Tiny random targets and heads for tests: made in code, saved as the checkpoints users have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle, describe_files, write_manifest
from eagle3.runtime.text.detokenizer import _BYTE_ALPHABET

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
        "tie_word_embeddings": True,
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
    """config.json of a head in the official EAGLE-3 layout."""
    config = model.config.get_text_config()
    return {
        "architectures": ["LlamaForCausalLM"],
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
    """A random head in the official EAGLE-3 layout.

    aux_layer_ids: hidden_states indices, as many as fc fuses; the paper's three, unnamed, by
    default. The draft vocabulary is spread over the target's.
    """
    raw = head_config(model, draft_vocab_size=draft_vocab_size, **overrides)
    if aux_layer_ids is not None:
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layer_ids]}
    return _write_head(folder, raw, head_weights(model, raw, seed))


def _write_head(folder: Path, raw: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return folder


def head_weights(model: Any, raw: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tensors of the official EAGLE-3 layout for config.json `raw`."""
    generator = torch.Generator().manual_seed(seed)
    d, whole, small = raw["hidden_size"], raw["vocab_size"], raw["draft_vocab_size"]
    stored = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [1, 2, 3])
    shapes = {
        "fc.weight": (d, len(stored) * d),
        **_layer_shapes("midlayer", raw, 2 * d),
        "lm_head.weight": (small, d),
    }
    weights = _random(shapes, generator)
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


def _layer_shapes(layer: str, raw: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a head's layer whose q, k, v read `width`."""
    d, heads, wide = raw["hidden_size"], raw["num_attention_heads"], raw["intermediate_size"]
    head_dim = raw.get("head_dim") or d // heads
    a, kv = heads * head_dim, raw["num_key_value_heads"] * head_dim
    return {
        f"{layer}.self_attn.q_proj.weight": (a, width),
        f"{layer}.self_attn.k_proj.weight": (kv, width),
        f"{layer}.self_attn.v_proj.weight": (kv, width),
        f"{layer}.self_attn.o_proj.weight": (d, a),
        f"{layer}.mlp.gate_proj.weight": (wide, d),
        f"{layer}.mlp.up_proj.weight": (wide, d),
        f"{layer}.mlp.down_proj.weight": (d, wide),
    }


def _random(
    shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator, scale: float = 0.3
) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def save_eagle1_head(folder: Path, model: Any, *, seed: int = 1, **overrides: Any) -> Path:
    """A random head in the official EAGLE-1/2 layout, with a random embedding of its own.

    overrides: of config.json; `bias`, `qkv_bias` and `attention_bias` say which biases there are.
    """
    raw = head_config(model, **overrides)
    raw = {k: v for k, v in raw.items() if k not in ("architectures", "draft_vocab_size")}
    return _write_head(folder, raw, eagle1_weights(raw, seed))


def eagle1_weights(raw: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tensors of the official EAGLE-1/2 layout for config.json `raw`."""
    generator = torch.Generator().manual_seed(seed)
    d, whole, layer = raw["hidden_size"], raw["vocab_size"], "layers.0"
    shapes = {
        "embed_tokens.weight": (whole, d),
        "fc.weight": (d, 2 * d),
        **_layer_shapes(layer, raw, d),
    }
    with_bias = ["fc"] if raw.get("bias", True) else []
    if raw.get("qkv_bias") or raw.get("attention_bias"):
        with_bias += [f"{layer}.self_attn.{x}_proj" for x in "qkv"]
    if raw.get("attention_bias"):
        with_bias.append(f"{layer}.self_attn.o_proj")
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in with_bias}
    norm = 1 + 0.1 * torch.randn(d, generator=generator)
    # No norm stands before its attention: larger weights would make what is fed back grow.
    weights = _random(shapes, generator, scale=0.15)
    return {**weights, f"{layer}.post_attention_layernorm.weight": norm}


def tiny_plan(**overrides: Any) -> Plan:
    """Small buffers; a tree of 6 nodes."""
    sizes = {"max_seq_len": 128, "prefill_chunk": 16, "max_draft_tokens": 32}
    return Plan(**{**sizes, "tree": TreePlan(3, 3, 6), **overrides})


def export_tiny(
    target: Path,
    draft: Path | Sequence[str] | None,
    output: Path,
    plan: Plan | None = None,
    **request: Any,
) -> Bundle:
    """Runs the whole export, self-check included. draft: one, or several as `--draft` has them."""
    sources = [] if draft is None else [str(draft)] if isinstance(draft, Path) else draft
    bundle, _ = export_bundle(
        ExportRequest(
            target=str(target),
            drafts=tuple(map(DraftSource.parse, sources)),
            output=output,
            plan=plan or tiny_plan(),
            **request,
        )
    )
    return bundle


def edited_bundle(
    bundle: Bundle, folder: Path, files: Mapping[str, bytes | None] | None = None, **manifest: Any
) -> Bundle:
    """A copy with other contents of some files (None: without it) and other manifest fields."""
    shutil.copytree(bundle.root, folder)
    for name, content in (files or {}).items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    fields = {"files": describe_files(folder), **manifest}
    write_manifest(folder, replace(bundle.manifest, **fields))
    return Bundle.open(folder)


# Parts of characters of two, three and four bytes, so that a text cuts them in every way.
BYTE_PIECES = [b"a", b" ", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80"]
BYTE_PIECES += [b"\x80"]  # never right


def byte_pieces(vocab_size: int) -> list[bytes]:
    """The bytes of every token of `byte_tokenizer`, all different."""
    pairs = [first + second for first in BYTE_PIECES for second in BYTE_PIECES]
    return list(dict.fromkeys([*BYTE_PIECES, *pairs]))[:vocab_size]


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE without merges whose tokens are mostly parts of characters."""
    letters = {byte: char for char, byte in _BYTE_ALPHABET.items()}
    pieces = byte_pieces(vocab_size)
    vocab = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def jitter_vectors(model: Any, seed: int = 7) -> None:
    """Random norms and biases: as they are made, ones and zeros, a graph without them passes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.2 * noise)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder: relative path -> content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
