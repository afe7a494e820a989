"""Where a head starts: its weights act as the target's last layer does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch

from eagle3.export.draft_graphs.head_modules import EagleHead
from eagle3.train.loop.initial_weights import start_from_target, target_fingerprint
from eagle3.train.loop.new_head import new_head, new_head_config
from eagle3.train.requests.recipe import Recipe


def started(model: Any, reports: list[str] | None = None, **recipe: Any) -> Any:
    config = new_head_config(model.config, Recipe(**recipe), model.config.vocab_size)
    head = new_head(config, model.get_output_embeddings().weight)
    every = np.arange(model.config.vocab_size)
    start_from_target(head, model, every, 0, ([] if reports is None else reports).append)
    return head


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("method", ["eagle3", "eagle1"])
def test_norms_act_as_the_targets_do(architecture: str, method: str) -> None:
    model = tiny.tiny_model(architecture)
    tiny.jitter_vectors(model)
    last, x = model.base_model.layers[-1], torch.randn(5, tiny.HIDDEN)
    gemma = architecture == "gemma3_text"
    before_mlp = last.pre_feedforward_layernorm if gemma else last.post_attention_layernorm
    head = started(model, method=method)
    layer = head.layers[0] if method == "eagle1" else head.midlayer
    pairs = [(layer.post_attention_layernorm, before_mlp)]
    if isinstance(head, EagleHead):
        pairs += [(head.midlayer.hidden_norm, last.input_layernorm)]
        pairs += [(head.norm, model.base_model.norm)]
    for own, source in pairs:
        torch.testing.assert_close(own(x), source(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_eagle1_head_starts_as_the_identity() -> None:
    model = tiny.tiny_model("llama")
    tiny.jitter_vectors(model)
    head = started(model, method="eagle1")
    x = torch.randn(1, 4, tiny.HIDDEN)
    feature, embedding = model.base_model.norm(x), torch.randn(1, 4, tiny.HIDDEN)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        values.append(v)
        return q.transpose(1, 2)

    values: list[torch.Tensor] = []
    out = head(embedding, feature, torch.arange(4)[None], attend)
    torch.testing.assert_close(out, feature)
    last = model.base_model.layers[-1]
    wanted = last.self_attn.v_proj(last.input_layernorm(x)).view(1, 4, -1, head.head_dim)
    torch.testing.assert_close(values[0], wanted.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_what_the_target_lacks_is_said() -> None:
    """phi3 has its projections in one."""
    reports: list[str] = []
    started(tiny.tiny_model("phi3"), reports)
    assert len(reports) == 1 and "self_attn.q_proj.weight" in reports[0]
    assert "norm" not in reports[0] and "o_proj" not in reports[0]
    started(tiny.tiny_model("llama"), reports)
    assert len(reports) == 1


def test_targets_are_told_apart_by_any_weight() -> None:
    model = tiny.tiny_model("llama")
    before = target_fingerprint(model)
    assert before == target_fingerprint(tiny.tiny_model("llama"))
    model.base_model.layers[3].mlp.up_proj.weight[0, 0] += 1e-3
    assert target_fingerprint(model) != before
