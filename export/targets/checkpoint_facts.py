"""The sizes of a checkpoint, for `eagle3 plan check`: from shapes and configuration, without
weights.

The target is created without storage (PyTorch's meta device), so that parameters are counted for
any architecture. A head's sizes are read from the headers of its files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eagle3.export.heads.checkpoint_files import head_folder, read_config
from eagle3.export.targets.target import locate, refuse_config, why_not_loaded
from eagle3.plans.facts import Attention, DraftFacts, Experts, TargetFacts
from eagle3.runtime.errors import CheckpointError, ExportError, UnsupportedModel

_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
# Configuration keys of models whose caches are not 2 * L * kv_heads * head_dim per token.
_OTHER_CACHES = ("kv_lora_rank", "num_kv_shared_layers", "global_head_dim", "mamba_d_state")
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def target_facts(source: str, *, trust_remote_code: bool = False) -> TargetFacts:
    """Read the configuration of `source`: a hub id, a folder, or a `.gguf` file.

    Raises ExportError if it cannot be read, and UnsupportedModel, naming the architecture, if its
    cache or its experts are not supported.
    """
    where = locate(source)
    try:
        config = AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
        refuse_config(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ExportError:
        raise
    except Exception as error:  # transformers and a checkpoint's code can raise anything
        raise ExportError(why_not_loaded(source, error)) from error
    return facts_of_model(model, Path(source).name or source)


def facts_of_model(model: PreTrainedModel, name: str) -> TargetFacts:
    """Return the facts of a model on any device. Raises UnsupportedModel."""
    architecture, config = type(model).__name__, model.config.get_text_config()
    sizes = {key: each.numel() for key, each in model.named_parameters()}  # a tied parameter once
    layers = {key: size for key, size in sizes.items() if _LAYER.search(key)}
    if not layers:
        raise UnsupportedModel(f"{architecture}: the names of its decoder layers are not supported")
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    vocab_size, hidden_size = table.weight.shape
    return TargetFacts(
        name=name,
        num_parameters=sum(sizes.values()),
        layer_parameters=sum(layers.values()),
        vocab_size=int(vocab_size),
        hidden_size=int(hidden_size),
        intermediate_size=_intermediate_size(config, architecture),
        tied=head is None or head.weight is table.weight,
        attention=_attention(config, architecture),
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        experts=_experts(config, layers, architecture),
    )


def draft_facts(source: str, target: TargetFacts) -> DraftFacts:
    """Read the shapes of an EAGLE head's tensors, in any dialect. Raises CheckpointError."""
    folder = head_folder(source)
    raw = read_config(folder)
    config = raw.get("transformer_layer_config") or raw  # nested in the speculators dialect
    shapes = tensor_shapes(folder)
    fc = _one(shapes, "fc.weight", source)
    hidden_size, fused = fc
    own_head = next((s for key, s in shapes.items() if key.endswith("lm_head.weight")), None)
    head = own_head or (target.vocab_size, target.hidden_size)
    is_eagle3 = own_head is not None
    width = fused if is_eagle3 else fused - hidden_size
    if width <= 0 or width % target.hidden_size:
        raise CheckpointError(
            f"draft {source}: fc.weight is {list(fc)}, which does not read features of the target's"
            f" hidden size {target.hidden_size}: is it a head for another target?"
        )
    aside = ("embed_tokens.weight", "lm_head.weight", "fc.weight")
    layer = {k: s for k, s in shapes.items() if len(s) == 2 and not k.endswith(aside)}
    fc_size = hidden_size * fused
    return DraftFacts(
        name=Path(source).name or source,
        fuse_parameters=fc_size if is_eagle3 else 0,
        step_parameters=sum(a * b for a, b in layer.values()) + (0 if is_eagle3 else fc_size),
        lm_head_parameters=head[0] * head[1],
        own_lm_head=is_eagle3,
        draft_vocab_size=head[0],
        hidden_size=hidden_size,
        intermediate_size=_one(shapes, "mlp.up_proj.weight", source)[0],
        feature_size=width,
        attention=_head_attention(shapes, config, source),
    )


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a head's folder, from the headers of its files."""
    kinds = ("*.safetensors", "pytorch_model*.bin", "*.bin")
    files = next((found for kind in kinds if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise CheckpointError(f"{folder}: no .safetensors and no .bin file with weights")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            shapes |= _shapes(file)
        except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        except Exception as error:  # pickle.UnpicklingError: code in place of weights
            raise CheckpointError(f"{file} contains more than tensors and is refused") from error
    return shapes


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix == ".bin":
        loaded = torch.load(file, map_location="meta", weights_only=True)
        return {key: tuple(value.shape) for key, value in loaded.items()}
    with safe_open(file, framework="pt") as opened:
        return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118


def _one(shapes: Mapping[str, tuple[int, ...]], ending: str, source: str) -> tuple[int, int]:
    found = [s for key, s in shapes.items() if key == ending or key.endswith(f".{ending}")]
    if not found or len(found[0]) != 2:
        raise CheckpointError(f"draft {source}: no tensor {ending}; is it an EAGLE head?")
    return found[0][0], found[0][1]


def _head_attention(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], source: str
) -> Attention:
    """Return the attention facts: heads from the config, widths from the tensors."""
    queries = _one(shapes, "self_attn.q_proj.weight", source)[0]
    keys = _one(shapes, "self_attn.k_proj.weight", source)[0]
    num_heads = config.get("num_attention_heads")
    if type(num_heads) is not int or num_heads < 1 or queries % num_heads:
        raise CheckpointError(
            f"draft {source}: num_attention_heads is {num_heads!r}, but q_proj has {queries} rows"
        )
    head_dim = queries // num_heads
    num_layers = sum(key.endswith("self_attn.k_proj.weight") for key in shapes)
    return Attention(num_layers, num_heads, keys // head_dim, head_dim)


def _attention(config: Any, architecture: str) -> Attention:
    other = [key for key in _OTHER_CACHES if getattr(config, key, None)]
    kinds = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    num_heads = getattr(config, "num_attention_heads", None)
    if other or kinds or not isinstance(num_heads, int):
        why = ", ".join([*other, *sorted(kinds)]) or "no num_attention_heads"
        raise UnsupportedModel(
            f"{architecture}: its cache is not one of keys and values of all layers ({why})"
        )
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return Attention(int(config.num_hidden_layers), num_heads, int(num_kv_heads), int(head_dim))


def _experts(config: Any, layers: Mapping[str, int], architecture: str) -> Experts | None:
    """Return the routed experts. Shared experts and the router run for every token, as dense
    layers.
    """
    parameters = sum(size for key, size in layers.items() if ".experts." in key)
    if not parameters:
        return None
    total, active = _first(config, _NUM_EXPERTS), _first(config, _EXPERTS_PER_TOKEN)
    if total is None or active is None:
        raise UnsupportedModel(
            f"{architecture}: it has experts, but its config does not contain the experts per token"
            f" ({' or '.join(_EXPERTS_PER_TOKEN)})"
        )
    return Experts(total, active, parameters)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _intermediate_size(config: Any, architecture: str) -> int:
    """Return the width of the MLP; for a mixture, of all experts that one token runs."""
    names = ("intermediate_size", "ffn_dim", "n_inner")
    dense = _first(config, names)
    active, width = _first(config, _EXPERTS_PER_TOKEN), _first(config, ("moe_intermediate_size",))
    routed = active * (width or dense or 0) if active is not None else 0
    if not (widest := max(dense or 0, routed)):
        raise UnsupportedModel(f"{architecture}: its config has no {' or '.join(names)}")
    return widest
