"""A new head for a target: its configuration, its module, and the folder it is saved as."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3 import __version__
from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead
from eagle3.export.heads.head_config import HeadConfig
from eagle3.runtime.errors import TrainingError
from eagle3.train.requests.recipe import Recipe

_SCALED_ROPE = ("linear", "yarn", "llama3")


def new_head_config(target: Any, recipe: Recipe, draft_vocab_size: int) -> HeadConfig:
    """A head with the sizes of the target's layers. target: a transformers text configuration."""
    heads = int(target.num_attention_heads)
    return HeadConfig(
        hidden_size=int(target.hidden_size),
        intermediate_size=int(target.intermediate_size),
        num_heads=heads,
        num_kv_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target, "head_dim", None) or target.hidden_size // heads),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        rope=_rope(target),
        max_position_embeddings=int(target.max_position_embeddings),
        draft_vocab_size=draft_vocab_size,
        vocab_size=int(target.vocab_size),
        aux_layer_ids=recipe.layers(int(target.num_hidden_layers)),
        conventions={},
        method=recipe.method,
        norm_output=recipe.norm_output,
        fc_bias=recipe.method == "eagle1",
    )


def _rope(target: Any) -> dict[str, Any]:
    """The target's RoPE where a head can have it: whole vectors, one table."""
    parameters: Mapping[str, Any] = getattr(target, "rope_parameters", None) or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):  # one kind of layer each
        parameters = parameters.get("full_attention", {})
    kept = {k: v for k, v in parameters.items() if v is not None and k != "partial_rotary_factor"}
    if kept.get("rope_type", "default") not in ("default", *_SCALED_ROPE):
        kept = {"rope_theta": kept.get("rope_theta")}
    return {"rope_type": "default", **kept, "rope_theta": kept.get("rope_theta") or 10000.0}


def new_head(config: HeadConfig, lm_head: Tensor) -> EagleHead | Eagle1Head:
    """An untrained head in float32. lm_head [V,d]: the target's, which an EAGLE-1 head shares."""
    if config.method == "eagle1":
        return Eagle1Head(config, lm_head.float())
    return EagleHead(config, len(config.aux_layer_ids) * config.hidden_size)


def save_head(
    folder: Path,
    config: HeadConfig,
    weights: Mapping[str, Tensor],
    target_ids: NDArray[np.int64],
    dtype: torch.dtype = torch.float16,
) -> None:
    """Writes config.json and model.safetensors in the official layout of the head's method.

    weights: by the module's names. Raises TrainingError when the folder cannot be written.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in weights.items()
        if not (config.method == "eagle1" and name.startswith("lm_head."))
    }
    if config.method == "eagle3" and config.draft_vocab_size != config.vocab_size:
        tensors |= vocabulary_tensors(target_ids, config.vocab_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config_json(config), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        part = folder / "model.safetensors.part"
        save_file(tensors, part)
        shutil.copymode(folder / "config.json", part)  # the library makes it private
        part.replace(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"the head cannot be written to {folder}: {error}") from error


def vocabulary_tensors(
    target_ids: Sequence[int] | NDArray[np.int64], size: int
) -> dict[str, Tensor]:
    """d2t [Vd] int64, offsets of draft ids, and t2d [V] bool."""
    ids = torch.as_tensor(np.asarray(target_ids, np.int64))
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def config_json(config: HeadConfig) -> dict[str, Any]:
    """The flat Llama configuration of the official layouts."""
    scaling = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    flat: dict[str, Any] = {
        "architectures": [
            "LlamaForCausalLMEagle3" if config.method == "eagle3" else "LlamaForCausalLMEagle"
        ],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "torch_dtype": "float16",
        "trained_by": f"eagle3 {__version__}",
    }
    if scaling.get("rope_type", "default") != "default":
        flat["rope_scaling"] = scaling
    if config.method == "eagle1":
        return {**flat, "bias": config.fc_bias}
    flat["draft_vocab_size"] = config.draft_vocab_size
    flat["eagle_config"] = {  # counts layer outputs, one less than the hidden_states index
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.aux_layer_ids]
    }
    return {**flat, "norm_output": True} if config.norm_output else flat
