"""Draft heads as PyTorch modules: the layers, and the two graphs that are traced.

`FuseGraph` turns the target's features into the head's input. `DraftGraph` runs rows that carry
either that or the head's own output (method section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eagle3.export.graphs.attention import CachedCall, Lowering, key_window
from eagle3.export.heads.head_config import OWN_EMBEDDING, Head, HeadConfig
from eagle3.runtime.errors import CheckpointError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v after RoPE -> [B,N,Hq,D]


def _llama_config(config: HeadConfig) -> LlamaConfig:
    if config.hidden_act not in ACT2FN:
        raise CheckpointError(f"the head's hidden_act '{config.hidden_act}' is unknown")
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act=config.hidden_act,
        rms_norm_eps=config.rms_norm_eps,
        mlp_bias=config.mlp_bias,
        rope_parameters=dict(config.rope),
        max_position_embeddings=config.max_position_embeddings,
        num_hidden_layers=1,
        vocab_size=config.draft_vocab_size,
    )


class _Attention(nn.Module):
    """Projections in the official layouts: q, k, v read `width` (EAGLE-3: 2d), o writes d."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        d, bias = config.hidden_size, config.attention_bias
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        normed = config.qk_norm
        self.q_norm = (
            LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        )
        self.k_norm = (
            LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        )
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, wide, bias=bias)
        self.k_proj = nn.Linear(width, narrow, bias=bias)
        self.v_proj = nn.Linear(width, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, d, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, rows, _ = x.shape
        q, k, v = (
            norm(proj(x).view(batch, rows, -1, self.head_dim)).transpose(1, 2)
            for norm, proj in (
                (self.q_norm, self.q_proj),
                (self.k_norm, self.k_proj),
                (nn.Identity(), self.v_proj),
            )
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return self.o_proj(attend(q, k, v).reshape(batch, rows, -1))  # type: ignore[no-any-return]


class _MidLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, 2 * d)
        self.mlp = LlamaMLP(_llama_config(config))
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(d, eps)
        self.input_layernorm = LlamaRMSNorm(d, eps)
        self.post_attention_layernorm = LlamaRMSNorm(d, eps)

    def forward(
        self, embedding: Tensor, g: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(g)
        x = torch.cat([self.input_layernorm(embedding), normed], -1)
        residual = normed if self.norm_before_residual else g
        h = residual + self.self_attn(x, cos, sin, attend)
        return h + self.mlp(self.post_attention_layernorm(h))  # type: ignore[no-any-return]


class EagleHead(nn.Module):
    """An EAGLE-3 head without the target's embedding. Names follow the official checkpoint.

    fuse: features [B,N,F] -> g [B,N,d]. forward: embedding [B,N,d] of token i+1, g [B,N,d] of
    position i, position_ids [B,N] = i -> out [B,N,d]. `logits(out)` [.., Vd] predict token i+2,
    and `feed_back(out)` [B,N,d] replaces g in the next draft step.
    """

    def __init__(self, config: HeadConfig, feature_size: int) -> None:
        super().__init__()
        d = config.hidden_size
        eps, width = config.rms_norm_eps, config.target_width
        self.input_norm = LlamaRMSNorm(feature_size, eps) if config.norm_before_fc else None
        count = feature_size // width if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(feature_size, d, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = LlamaRMSNorm(d, eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(_llama_config(config))
        self.head_dim, self.norm_output = config.head_dim, config.norm_output

    def fuse(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        return self.fc(features)  # type: ignore[no-any-return]

    def forward(self, embedding: Tensor, g: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        cos, sin = self.rotary(g, position_ids)
        return self.midlayer(embedding, g, cos, sin, attend)  # type: ignore[no-any-return]

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(self.norm(out)).float()  # type: ignore[no-any-return]

    def feed_back(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.norm_output else out


class _Eagle1Layer(nn.Module):
    """A decoder layer without its first norm."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config, config.hidden_size)
        self.mlp = LlamaMLP(_llama_config(config))
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        h = h + self.self_attn(h, cos, sin, attend)
        return h + self.mlp(self.post_attention_layernorm(h))  # type: ignore[no-any-return]


class Eagle1Head(nn.Module):
    """An EAGLE-1/2 head: it predicts the next feature, which the target's lm_head reads.

    The features are the target's final hidden states after its last norm. The interface is that of
    EagleHead. lm_head_weight [V,d] is the target's and stays frozen.
    """

    def __init__(self, config: HeadConfig, lm_head_weight: Tensor) -> None:
        super().__init__()
        d = config.hidden_size
        self.fc = nn.Linear(2 * d, d, bias=config.fc_bias)
        self.layers = nn.ModuleList([_Eagle1Layer(config)])
        self.lm_head = nn.Linear(d, len(lm_head_weight), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(lm_head_weight, requires_grad=False)
        self.rotary = LlamaRotaryEmbedding(_llama_config(config))
        self.head_dim = config.head_dim

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, embedding: Tensor, g: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        cos, sin = self.rotary(g, position_ids)
        return self.layers[0](self.fc(torch.cat([embedding, g], -1)), cos, sin, attend)  # type: ignore[no-any-return]

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(out).float()  # type: ignore[no-any-return]

    def feed_back(self, out: Tensor) -> Tensor:
        return out


def build_head(head: Head, dtype: torch.dtype) -> EagleHead:
    """Return the head with its checkpoint's weights, in eval mode."""
    module = EagleHead(head.config, head.weights["fc.weight"].shape[1])
    state: Mapping[str, Any] = {
        name: tensor
        for name, tensor in head.weights.items()
        if name not in ("d2t", "t2d", OWN_EMBEDDING)
    }
    module.load_state_dict(state, strict=True)
    return module.to(dtype).eval().requires_grad_(False)


def embedding_table(head: Head, target: Tensor) -> Tensor:
    """Return the embedding table of a head: the target's [V,D], or its own [V,d].

    target: the target's table, whose dtype an own table is converted to.
    """
    own = head.own_embedding
    return target if own is None else own.to(target.dtype)


def build_eagle1_head(head: Head, lm_head_weight: Tensor, dtype: torch.dtype) -> Eagle1Head:
    """Return an EAGLE-1/2 head with its checkpoint's weights, in eval mode.

    lm_head_weight [V,d] of `dtype`: the target's; it is not copied.
    """
    config, state = head.config, dict(head.weights)
    if config.qkv_bias and not config.attention_bias:  # o has no bias: use zeros
        config = replace(config, attention_bias=True)
        state["layers.0.self_attn.o_proj.bias"] = torch.zeros(config.hidden_size)
    module = Eagle1Head(config, lm_head_weight)
    state.pop(OWN_EMBEDDING, None)
    module.load_state_dict({**state, "lm_head.weight": lm_head_weight}, strict=True)
    return module.to(dtype).eval().requires_grad_(False)


class FuseGraph(nn.Module):
    """features [B,N,F], low to high -> hidden [B,N,d], the head's input made from the target's
    features.
    """

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)


class DraftGraph(nn.Module):
    """One call of the head over its static cache.

    Inputs: input_ids [B,N], position_ids [B,N] int64; hidden [B,N,d], fused features or the output
    that the head feeds back; tree_mask [B,N,W] bool over the last W slots; past_len [B];
    logit_rows [B,M]; top_k [1] int64; past_k, past_v [B,Hkv,S,D].
    Outputs: logits [B,M,Vd] float32; top_log_probs [B,M,K] float32, top_ids [B,M,K] int64 (ids of
    the target); hidden_out [B,N,d], the output to feed back. tied: the embedding [V,d] is the
    lm_head's weight, and stays one tensor in the graph.
    """

    def __init__(
        self,
        head: EagleHead | Eagle1Head,
        embedding: Tensor,
        target_ids: np.ndarray,
        lowering: Lowering,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        rows, width = embedding.shape
        self.embed = nn.Embedding(rows, width, _weight=embedding, _freeze=True)
        if tied:
            self.embed.weight = head.lm_head.weight
        self.register_buffer("target_ids", torch.from_numpy(target_ids.copy()))
        self.lowering = lowering
        self.full_vocab = bool(np.array_equal(target_ids, np.arange(len(target_ids))))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden: Tensor,
        tree_mask: Tensor,
        past_len: Tensor,
        logit_rows: Tensor,
        top_k: Tensor,
        past_k: list[Tensor],
        past_v: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_rows = input_ids.shape[1]
        call = CachedCall(past_len, past_len.max() + num_rows, past_k, past_v)
        slots = self.lowering.num_slots(call, num_rows)
        window = key_window(tree_mask, position_ids, past_len, slots, None)
        bias = window.bias(None, hidden.dtype)
        scale = self.head.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return call.attend(0, q, k, v, bias, scale)

        out = self.head(self.embed(input_ids), hidden, position_ids, attend)
        rows = logit_rows[:, :, None].expand(-1, -1, out.shape[-1])
        logits = self.head.logits(out.gather(1, rows))
        top, ids = top_k_of(torch.log_softmax(logits, -1), top_k)
        if not self.full_vocab:
            ids = self.target_ids[ids]  # type: ignore[index]
        return logits, top, ids, self.head.feed_back(out)


def top_k_of(log_probs: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """log_probs [B,M,Vd], top_k [1] -> values and draft ids [B,M,K], best first, where K is a
    symbol.
    """
    count: int = top_k[0].item()  # type: ignore[assignment]
    torch._check(count >= 1)  # type: ignore[no-untyped-call]
    torch._check(count <= log_probs.shape[-1])  # type: ignore[no-untyped-call]
    return torch.topk(log_probs, count, dim=-1)
