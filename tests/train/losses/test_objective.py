"""Losses against plain loops: values, gradients, and which tokens they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.export.draft_graphs.head_modules import build_eagle1_head, build_head
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.train.batches.batch import Batch
from eagle3.train.losses.loss import cross_entropy
from eagle3.train.losses.objective import Eagle1Objective, Eagle3Objective, Rows

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)


@pytest.fixture()
def head(head_folder: Path) -> Any:
    return build_head(read_head(head_folder, FACTS), torch.float32).requires_grad_(True)


def random_batch(lengths: list[int], width: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    written = torch.rand(len(lengths), longest, generator=rng) < 0.6
    for row, length in enumerate(lengths):
        written[row, length:] = False
    shape = (len(lengths), longest)
    return Batch(
        ids=torch.randint(0, 64, shape, generator=rng),
        written=written,
        features=torch.randn(*shape, width, generator=rng),
        final=torch.randn(*shape, tiny.HIDDEN, generator=rng),
    )


def path_logits(head: Any, embedding: torch.Tensor, batch: Batch, b: int, t: int, step: int) -> Any:
    """Logits of step `step` from the prefix 0..t: one path, every row by itself, no cache."""
    ids = batch.ids[b]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys.append(k)
        values.append(v)
        every_k, every_v = torch.cat(keys, 2), torch.cat(values, 2)
        groups = q.shape[1] // k.shape[1]
        scores = q @ every_k.repeat_interleave(groups, 1).transpose(-1, -2) * head.head_dim**-0.5
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        return (weights @ every_v.repeat_interleave(groups, 1)).transpose(1, 2)

    g = head.fuse(batch.features[b : b + 1, : t + 1])
    out = head(embedding[ids[None, 1 : t + 2]], g, torch.arange(t + 1)[None], attend)[:, -1:]
    for s in range(1, step + 1):
        token = embedding[ids[None, t + 1 + s : t + 2 + s]]
        out = head(token, head.feed_back(out), torch.tensor([[t + s]]), attend)
    return head.logits(out)[0, 0]


def plain_losses(head: Any, llama: Any, batch: Batch, steps: int, rows: torch.Tensor) -> Any:
    """Summed cross-entropies of each step, one token at a time."""
    embedding = llama.get_input_embeddings().weight
    totals = []
    for step in range(steps):
        total = torch.zeros(())
        for b, length in enumerate(batch.written.shape[1] * torch.ones(len(batch.ids)).int()):
            for t in range(int(length)):
                token = t + 2 + step
                if token >= batch.ids.shape[1] or not batch.written[b, token]:
                    continue
                probs = torch.softmax(batch.final[b, token - 1] @ rows.T, -1)
                logits = path_logits(head, embedding, batch, b, t, step)
                total = total - (probs * F.log_softmax(logits, -1)).sum()
        totals.append(total)
    return torch.stack(totals)


def test_loss_and_gradients_equal_plain_loops(llama: Any, head: Any, head_folder: Path) -> None:
    ids = torch.from_numpy(read_head(head_folder, FACTS).target_ids)
    rows = llama.get_output_embeddings().weight[ids]
    objective = Eagle3Objective(head, llama.get_input_embeddings().weight, rows, torch.float32)
    batch, steps = random_batch([7, 5], 96), 3
    weights = torch.tensor([1.0, 0.8, 0.64])
    ours = objective(batch, steps)
    plain = plain_losses(head, llama, batch, steps, rows)
    torch.testing.assert_close(ours.loss, plain, rtol=1e-4, atol=1e-4)
    trained = [p for p in head.parameters() if p.requires_grad]
    first = torch.autograd.grad((ours.loss * weights).sum(), trained)
    second = torch.autograd.grad((plain * weights).sum(), trained)
    for (name, _), a, b in zip(head.named_parameters(), first, second, strict=True):
        assert float(b.abs().max()) > 0, name
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4 * float(b.abs().max()), msg=name)


def test_eagle1_adds_feature_and_token_loss(llama: Any, tmp_path: Path) -> None:
    folder = tiny.save_eagle1_head(tmp_path, llama)
    lm_head = llama.get_output_embeddings().weight.detach()
    head = build_eagle1_head(read_head(folder, FACTS), lm_head, torch.float32)
    embedding = llama.get_input_embeddings().weight
    batch = random_batch([6], tiny.HIDDEN)
    noise = 0.1 * torch.randn(batch.features.shape)
    total = torch.zeros(())
    noisy = Batch(batch.ids, batch.written, batch.features + noise, batch.final)
    for t in range(4):
        if not batch.written[0, t + 2]:
            continue
        logits = path_logits(head, embedding, noisy, 0, t, 0)
        out = torch.linalg.lstsq(lm_head.double(), logits[:, None].double()).solution[:, 0].float()
        wanted = batch.final[0, t + 1]
        probs = torch.softmax(lm_head @ wanted, -1)
        total += F.smooth_l1_loss(out, wanted) - 0.1 * (probs * F.log_softmax(logits, -1)).sum()
    sums = Eagle1Objective(head, embedding, torch.float32)(batch, noise)
    torch.testing.assert_close(sums.loss[0], total, rtol=1e-3, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 9), min_size=1, max_size=4),
    step=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_the_loss_counts_written_tokens_alone(lengths: list[int], step: int, seed: int) -> None:
    batch = random_batch(lengths, 4, seed)
    rows = Rows.of(batch.written)
    marks = torch.arange(batch.ids.numel()).view(*batch.ids.shape, 1)  # row (b, t) is marked b*T+t
    picked, keep = rows.at(step, marks)
    counted = {(int(m) // marks.shape[1], int(m) % marks.shape[1] + 2 + step) for m in picked}
    wanted = {
        (b, p)
        for b, length in enumerate(lengths)
        for p in range(2 + step, length)
        if batch.written[b, p]
    }
    assert counted == wanted
    assert int(keep.sum()) == len(wanted) == len(picked)


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 600])
def test_chunks_change_nothing(rows: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 8, generator=rng, requires_grad=True)
    weight = torch.randn(12, 8, generator=rng, requires_grad=True)
    probs = torch.softmax(torch.randn(rows, 12, generator=rng), -1)
    entropy = cross_entropy(hidden, weight, probs)
    logits = hidden @ weight.T
    plain = -(probs * F.log_softmax(logits, -1)).sum()
    torch.testing.assert_close(entropy.total, plain, rtol=1e-5, atol=1e-4)
    assert int(entropy.agreed) == int((logits.argmax(-1) == probs.argmax(-1)).sum())
    first = torch.autograd.grad(3 * entropy.total, (hidden, weight))
    second = torch.autograd.grad(3 * plain, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_prompt_tokens_and_padding_do_not_touch_the_loss(llama: Any, head: Any) -> None:
    """What stands behind a conversation's end changes neither its loss nor its gradients."""
    rows = llama.get_output_embeddings().weight[:40]
    objective = Eagle3Objective(head, llama.get_input_embeddings().weight, rows, torch.float32)
    batch = random_batch([6, 9], 96)
    other = Batch(*(x.clone() for x in vars(batch).values()))
    other.ids[0, 6:] = 5
    other.features[0, 6:] += 3
    other.final[0, 6:] -= 1
    np.testing.assert_array_equal(
        objective(batch, 4).loss.detach().numpy(), objective(other, 4).loss.detach().numpy()
    )
