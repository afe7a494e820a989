"""Loads a target and traces it: Hugging Face id, local folder or GGUF file to ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eagle3.export.graphs.attention import Lowering
from eagle3.export.graphs.static_rope import refuse_outgrown_rope
from eagle3.export.graphs.tracer import trace
from eagle3.export.targets.target_graph import KvShape, TargetGraph, kv_shape
from eagle3.runtime.errors import ExportError, UnsupportedModel

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LM_HEAD_TOLERANCE = 1e-2  # relative; in bfloat16 the model can round once more

_FAULTS = ("missing", "unexpected", "mismatched")  # fields of the loading info of `from_pretrained`


@dataclass(frozen=True)
class Target:
    """A loaded target: the model in eval mode on the CPU, its tokenizer, and its source."""

    model: PreTrainedModel
    tokenizer: Any
    source: str
    kv: KvShape

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """V: rows of the embedding, which can exceed the tokenizer's vocabulary."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def architecture(self) -> str:
        return type(self.model).__name__


def load_target(
    source: str, dtype: str, *, trust_remote_code: bool = False, max_seq_len: int = 0
) -> Target:
    """Load `source` for export.

    source: a hub id, a folder with safetensors (also sharded), or a `.gguf` file (dequantized).
    max_seq_len: number of positions that it must support, in tokens. Raises ExportError if it
    cannot be loaded or supports fewer, and UnsupportedModel, naming the architecture, if it can be
    loaded but not exported. Whatever the configuration shows is checked before the weights are
    read.
    """
    where = locate(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
        refuse_config(config)
        refuse_outgrown_rope(_architecture(config), config.get_text_config(), max_seq_len)
        _refuse_length(config, max_seq_len)
        model, loading = AutoModelForCausalLM.from_pretrained(
            **where,
            config=config,  # so that a GGUF file's config is not read twice
            dtype=TORCH_DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except ExportError:
        raise
    # transformers, safetensors and a checkpoint's code can raise anything
    except Exception as error:
        raise ExportError(why_not_loaded(source, error)) from error
    _refuse_partial(source, loading)
    model = model.eval().requires_grad_(False)
    return Target(model, tokenizer, source, kv_shape(model))


def locate(source: str) -> dict[str, Any]:
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ExportError(f"target {source}: no such GGUF file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        raise ExportError(f"target {source}: the folder has no config.json; is it a model folder?")
    if not path.exists() and (
        path.is_absolute() or source.startswith(".") or source.count("/") > 1
    ):
        raise ExportError(f"target {source}: no such folder or file")
    return {"pretrained_model_name_or_path": source}


def why_not_loaded(source: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()
    text = f"target {source} cannot be loaded: {reason[0] if reason else type(error).__name__}"
    if "trust_remote_code" in str(error):
        text += "; if you trust the code in that repository, pass --trust-remote-code"
    elif not Path(source).exists():
        text += "; it is no local path, and as a hub id it could not be fetched"
    return text


def _refuse_partial(source: str, loading: dict[str, Any]) -> None:
    """Raise ExportError if weights are missing: transformers fills them with random numbers and
    only warns.
    """
    faults = {kind: sorted(map(str, loading.get(f"{kind}_keys") or ())) for kind in _FAULTS}
    listed = [f"{kind}: {', '.join(names[:4])}" for kind, names in faults.items() if names]
    if listed:
        raise ExportError(
            f"target {source}: its weights are not those of its config.json, {'; '.join(listed)}"
        )


def refuse_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        name = _architecture(config)
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported, only decoders")


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def _refuse_length(config: Any, max_seq_len: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_seq_len > limit:
        raise ExportError(
            f"max_seq_len {max_seq_len} exceeds the target's max_position_embeddings {limit}; "
            f"pass --max-seq-len {limit} or less"
        )


def lm_head_weight(target: Target) -> Tensor:
    """Return the target's lm_head [V,d], in the model's dtype, without gradient.

    Raises UnsupportedModel if logits are not exactly its product with the final hidden state (a
    bias, a scale, a cap): an EAGLE-1/2 head has no other lm_head (method section 2).
    """
    weight: Tensor = target.model.get_output_embeddings().weight.detach()
    ids = torch.arange(min(4, target.vocab_size))[None]
    with torch.no_grad():
        out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        plain = torch.nn.functional.linear(out.hidden_states[-1], weight).float()
    error = float((plain - out.logits).abs().max() / out.logits.abs().max())
    if not error <= _LM_HEAD_TOLERANCE:
        raise UnsupportedModel(
            f"{target.architecture}: its logits are not lm_head times its final hidden state, "
            f"with which an EAGLE-1/2 head would draft (relative difference {error:.1e}, allowed "
            f"{_LM_HEAD_TOLERANCE:.0e}); use an EAGLE-3 head"
        )
    return weight


def trace_target(
    target: Target, lowering: Lowering, aux_layer_ids: Sequence[int], capacity: int
) -> ir.Model:
    """Trace the target over caches of `capacity` slots. Inputs and outputs as in TargetGraph."""
    graph = TargetGraph(target.model, lowering, aux_layer_ids)
    outputs = ["logits", "next_token"] + (["features"] if aux_layer_ids else [])
    inputs = target_inputs(target, capacity)
    with graph.attached():
        return trace(graph, inputs, outputs, lowering, target.architecture)


def target_inputs(target: Target, capacity: int) -> dict[str, tuple[Any, str]]:
    """Return example inputs for a trace. No size is one that PyTorch treats specially."""
    batch, rows, picked = 2, 5, 3
    ids = torch.zeros(batch, rows, dtype=torch.int64)
    mask = torch.ones(batch, rows, rows, dtype=torch.bool).tril()
    return {
        "input_ids": (ids, "B N"),
        "position_ids": (torch.arange(rows).repeat(batch, 1), "B N"),
        "tree_mask": (mask, "B N N"),
        "past_len": (torch.zeros(batch, dtype=torch.int64), "B"),
        "logit_rows": (torch.zeros(batch, picked, dtype=torch.int64), "B M"),
        **caches(target.kv, capacity, target.model.dtype, batch),
    }


def caches(
    kv: KvShape, capacity: int, dtype: torch.dtype, batch: int
) -> dict[str, tuple[list[Tensor], str]]:
    """Return empty caches past_k and past_v of every layer, [B,Hkv,S,D] each."""
    shape = (batch, kv.num_kv_heads, capacity, kv.head_dim)
    dims = f"B {kv.num_kv_heads} {capacity} {kv.head_dim}"
    return {
        name: ([torch.zeros(shape, dtype=dtype) for _ in range(kv.num_layers)], dims)
        for name in ("past_k", "past_v")
    }
