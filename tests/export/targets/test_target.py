"""The target's graph called directly: free dimensions, ragged batches, trees, NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from eagle3.export.checks.reference import relative_error
from eagle3.runtime.bundle.folder import Bundle

TOLERANCE = 1e-4


class Calls:
    """target.onnx over caches of `batch` sequences, called with whatever shapes a test likes."""

    def __init__(self, bundle: Bundle, batch: int) -> None:
        self.bundle, self.batch = bundle, batch
        path = bundle.path(bundle.manifest.engines["target"].file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        info = bundle.manifest.target
        shape = (batch, info.num_kv_heads, bundle.manifest.plan.cache_capacity, info.head_dim)
        self.caches = {
            f"{kind}.{layer}": onnxruntime.OrtValue.ortvalue_from_numpy(
                np.zeros(shape, np.float32), "cpu"
            )
            for kind in "kv"
            for layer in range(info.num_layers)
        }

    def __call__(
        self,
        ids: np.ndarray,
        past: np.ndarray,
        rows: np.ndarray,
        mask: np.ndarray | None = None,
        positions: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """ids [B,N] behind past [B] slots; logits of rows [B,M]; a causal chain by default."""
        batch, num_rows = ids.shape
        if mask is None:
            mask = np.tril(np.ones((num_rows, num_rows), np.bool_))[None].repeat(batch, 0)
        if positions is None:
            positions = past[:, None] + np.arange(num_rows)
        binding = self.session.io_binding()
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "tree_mask": mask,
            "past_len": past,
            "logit_rows": rows,
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(f"past_{name}", cache)
            binding.bind_ortvalue_output(f"present_{name}", cache)
        names = ["logits", "next_token", "features"]
        for name in names:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        named = {value.name: i for i, value in enumerate(self.session.get_outputs())}
        outputs = binding.get_outputs()
        assert len(outputs) == len(names) + len(self.caches) and len(named) == len(outputs)
        by_name = dict(zip([*(f"present_{n}" for n in self.caches), *names], outputs, strict=True))
        return {name: by_name[name].numpy() for name in names}


def reference(model: Any, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """logits [T,V] and features [T,F] of one sequence, without cache or batch."""
    layers = (2, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 3)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    features = torch.cat([out.hidden_states[i] for i in layers], -1)
    return out.logits[0].numpy(), features[0].numpy()


def refuses_wide_batches(bundle: Bundle, batch: int, num_rows: int) -> bool:
    """ONNX Runtime's GroupQueryAttention takes several rows of several sequences only while the
    cache is empty, and says so. A version of it that can will fail here: then use it.
    """
    if bundle.manifest.plan.lowering != "ort" or batch == 1 or num_rows == 1:
        return False
    ids, past = np.full((batch, num_rows), 5), np.full(batch, 4)
    with pytest.raises(Exception, match="batch_size must be 1 when sequence_length > 1"):
        Calls(bundle, batch)(ids, past, np.zeros((batch, 1), np.int64))
    return True


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_batch_and_width_are_free_and_lengths_ragged(
    llama: Any, full_bundle: Bundle, batch: int, num_rows: int
) -> None:
    """Case 21: no dimension froze; every sequence of a batch has its own length."""
    if refuses_wide_batches(full_bundle, batch, num_rows):
        return
    rng = np.random.default_rng(batch * 10 + num_rows)
    lengths = np.array([4, 9, 1][:batch])
    texts = [rng.integers(2, 64, n + num_rows + 3).tolist() for n in lengths]
    calls = Calls(full_bundle, batch)
    # Prefill all to the longest: what a shorter one wrote too much is overwritten below.
    padded = np.zeros((batch, lengths.max()), np.int64)
    for b, n in enumerate(lengths):
        padded[b, :n] = texts[b][:n]
    calls(padded, np.zeros(batch, np.int64), np.zeros((batch, 1), np.int64))
    second = 3 if full_bundle.manifest.plan.lowering == "portable" or batch == 1 else 1
    for width, past in ((num_rows, lengths), (second, lengths + num_rows)):
        ids = np.array([t[p : p + width] for t, p in zip(texts, past, strict=True)])
        picked = [0] if width == 1 else [width - 1, 0]  # M != N, and not in order
        rows = np.array([picked] * batch)
        out = calls(ids, past.astype(np.int64), rows)
        assert out["logits"].shape == (batch, len(picked), 64)
        for b, p in enumerate(past):
            logits, features = reference(llama, texts[b][: p + width])
            expected = logits[p:][picked]
            assert relative_error(out["logits"][b], expected) < TOLERANCE
            assert np.array_equal(out["next_token"][b], expected.argmax(-1))
            assert relative_error(out["features"][b], features[p:]) < TOLERANCE


def test_a_batch_of_different_trees(llama: Any, full_bundle: Bundle) -> None:
    """Case 15, and by row of the batch: each node sees its own ancestors only."""
    if refuses_wide_batches(full_bundle, 2, 7):
        return
    rng = np.random.default_rng(0)
    parents = [[-1, 0, 0, 1, 2, 3, 4], [-1, 0, 1, 2, 2, 4, 0]]
    lengths, num_rows = np.array([6, 2], np.int64), 7
    texts = [rng.integers(2, 64, n).tolist() for n in lengths]
    calls = Calls(full_bundle, 2)
    padded = np.zeros((2, 6), np.int64)
    for b, text in enumerate(texts):
        padded[b, : len(text)] = text
    calls(padded, np.zeros(2, np.int64), np.zeros((2, 1), np.int64))
    paths: list[list[list[int]]] = [[], []]
    for b in range(2):
        for node, parent in enumerate(parents[b]):
            paths[b].append([*(paths[b][parent] if parent >= 0 else []), node])
    mask = np.zeros((2, num_rows, num_rows), np.bool_)
    positions = np.zeros((2, num_rows), np.int64)
    for b in range(2):
        for node, path in enumerate(paths[b]):
            mask[b, node, path] = True
            positions[b, node] = lengths[b] + len(path) - 1
    ids = rng.integers(2, 64, (2, num_rows))
    rows = np.arange(num_rows)[None].repeat(2, 0)
    out = calls(ids, lengths, rows, mask, positions)
    for b in range(2):
        for node, path in enumerate(paths[b]):
            expected = reference(llama, [*texts[b], *ids[b, path].tolist()])[0][-1]
            assert relative_error(out["logits"][b, node], expected) < TOLERANCE


def test_nan_in_the_target_is_no_token(llama: Any, bundle: Bundle, tmp_path: Path) -> None:
    """Case 13: -1 in the rows whose logits are NaN, for the runtime to refuse."""
    calls = Calls(bundle, 1)
    poisoned = np.full(next(iter(calls.caches.values())).shape(), np.nan, np.float32)
    for name in calls.caches:
        calls.caches[name] = onnxruntime.OrtValue.ortvalue_from_numpy(poisoned.copy(), "cpu")
    out = calls(np.array([[5]]), np.array([3]), np.array([[0]]))
    assert out["next_token"].tolist() == [[-1]]
