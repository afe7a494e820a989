"""The unrolled training forward is drafting: the reason for training-time test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.export.draft_graphs.head_modules import build_eagle1_head, build_head
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.stats import Clock
from eagle3.train.losses.unroll import UnrolledAttention, shifted, unrolled

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
STEPS = 5
LENGTH = 14


def training_logits(
    module: Any, embedding: torch.Tensor, ids: torch.Tensor, features: torch.Tensor
) -> list[torch.Tensor]:
    """Logits [T,Vd] of every step of the training forward."""
    outs = unrolled(module, embedding[ids][None], features[None], STEPS)
    return [module.logits(out)[0] for out in outs]


def drafted_logits(engine: DraftEngine, ids: Any, features: Any, row: int) -> list[np.ndarray]:
    """Logits of the runtime's engine after 0, 1, ... steps from the prefix that ends in `row`."""
    engine.reset()
    engine.feature_slots(row + 1)[:] = features[: row + 1]
    out = engine.extend(ids[1 : row + 2], 1, True)
    steps = [out.logits[0].copy()]
    for depth in range(1, STEPS):
        if row + 1 + depth >= len(ids):
            break
        token, seen = ids[row + 1 + depth : row + 2 + depth], np.ones((1, depth), np.bool_)
        out = engine.step(token, out.hidden[-1:].copy(), depth, seen, 1, True)
        steps.append(out.logits[0].copy())
    return steps


# name -> the layers that it fuses; EAGLE-1's reads the last.
HEADS = {"eagle3": (0, 1, 2), "norm_output": (0, 1, 2), "one_layer": (2,), "eagle1": (2,)}


@pytest.fixture(scope="module")
def folder(shallow: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random heads by name."""
    folder = tmp_path_factory.mktemp("heads")
    for name, layers in HEADS.items():
        extra = {"norm_output": True} if name == "norm_output" else {}
        options: dict[str, Any] = {"draft_vocab_size": 40, "aux_layer_ids": layers, **extra}
        if name == "eagle1":
            tiny.save_eagle1_head(folder / name, shallow)
        else:
            tiny.save_head(folder / name, shallow, **options)
    return folder


@pytest.fixture(scope="module")
def heads(folder: Path, shallow_folder: Path) -> Bundle:
    """The heads as engines."""
    given = [f"{name}={folder / name}" for name in HEADS]
    return tiny.export_tiny(shallow_folder, given, folder / "bundle")


def trainers_module(name: str, folder: Path, model: Any) -> Any:
    """A head as it is trained."""
    head = read_head(folder / name, replace(FACTS, num_layers=2))
    if name == "eagle1":
        return build_eagle1_head(head, model.get_output_embeddings().weight, torch.float32)
    return build_head(head, torch.float32)


@pytest.mark.parametrize("name", HEADS)
def test_every_row_of_every_step_is_what_the_engine_drafts(
    shallow: Any, folder: Path, heads: Bundle, name: str
) -> None:
    module, width = trainers_module(name, folder, shallow), len(HEADS[name]) * tiny.HIDDEN
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 64, LENGTH)
    features = rng.normal(size=(LENGTH, width)).astype(np.float32)
    embedding = shallow.get_input_embeddings().weight
    trained = training_logits(module, embedding, torch.tensor(ids), torch.tensor(features))
    engine = DraftEngine(heads, 1, Clock(), name)
    compared = 0
    for row in range(LENGTH - 1):
        for step, logits in enumerate(drafted_logits(engine, ids, features, row)):
            np.testing.assert_allclose(trained[step][row].numpy(), logits, atol=1e-4, rtol=1e-6)
            compared += 1
    assert compared == sum(min(STEPS, LENGTH - 1 - row) for row in range(LENGTH - 1))


def test_a_wrong_position_or_mask_is_seen(llama: Any, head_folder: Path) -> None:
    """The comparison above is not blind: the steps' positions and their own rows both matter."""
    module = build_head(read_head(head_folder, FACTS), torch.float32)
    ids = torch.arange(LENGTH)
    features = torch.randn(LENGTH, 96, generator=torch.Generator().manual_seed(0))
    embedding = llama.get_input_embeddings().weight
    right = training_logits(module, embedding, ids, features)

    class OnlyPrefix(UnrolledAttention):
        def _later(self, q: torch.Tensor) -> torch.Tensor:
            return self._first(q)

    attend, g = OnlyPrefix(module.head_dim), module.fuse(features[None])
    embeddings = embedding[ids][None]
    for step in range(2):
        out = module(shifted(embeddings, 1 + step), g, torch.arange(LENGTH)[None] + step, attend)
        g = out
    assert float((module.logits(out)[0] - right[1]).abs().max()) > 0.01


def plain_attention(
    q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor], head: int, row: int
) -> torch.Tensor:
    """One head of one row of the last step, over a list of the keys it may see; loops only."""
    groups = q[0].shape[1] // k[0].shape[1]
    step, kv = len(q) - 1, head // groups
    seen = [(0, j) for j in range(row + 1)] + [(s, row) for s in range(1, step + 1)]
    keys = torch.stack([k[s][0, kv, j] for s, j in seen])
    values = torch.stack([v[s][0, kv, j] for s, j in seen])
    weights = torch.softmax(keys @ q[step][0, head, row] * q[0].shape[-1] ** -0.5, 0)
    return weights @ values


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 6),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_attention_and_its_gradient_equal_plain_loops(
    length: int, kv_heads: int, groups: int, steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaves(heads: int) -> list[torch.Tensor]:
        return [
            torch.randn(
                1, heads, length, 4, generator=generator, dtype=torch.float64
            ).requires_grad_()
            for _ in range(steps)
        ]

    q, k, v = leaves(kv_heads * groups), leaves(kv_heads), leaves(kv_heads)
    attend = UnrolledAttention(4)
    for step in range(steps):
        out = attend(q[step], k[step], v[step])
    plain = torch.stack(
        [
            torch.stack([plain_attention(q, k, v, head, row) for head in range(out.shape[2])])
            for row in range(length)
        ]
    )[None]
    torch.testing.assert_close(out, plain, atol=1e-6, rtol=1e-6)  # softmax is in float32
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    leaf = [*q[-1:], *k, *v]
    for ours, theirs in zip(
        torch.autograd.grad((out * weight).sum(), leaf),
        torch.autograd.grad((plain * weight).sum(), leaf),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_shifted_moves_rows_forward_and_fills_with_zeros() -> None:
    x = torch.arange(1, 5)[None, :, None]
    assert shifted(x, 1).flatten().tolist() == [2, 3, 4, 0]
    assert shifted(x, 9).flatten().tolist() == [0, 0, 0, 0]
