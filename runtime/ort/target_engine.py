"""The target engine: prefill in chunks, verify a tree in one call, keep the accepted path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import Manifest, TensorSpec
from eagle3.runtime.ort.kv_cache import Buffer, KvCache
from eagle3.runtime.ort.session import OrtValues, load_session
from eagle3.runtime.ort.signature import Bound, cache_specs
from eagle3.runtime.stats import Clock
from eagle3.runtime.trees.tree import Tree

Int64s = NDArray[np.int64]
Floats = NDArray[Any]


@dataclass(frozen=True)
class TargetOutput:
    """The outputs of one target call. The arrays are views that the next call overwrites.

    next_token: int64 [M], the argmax of each requested row; -1 if its logits are NaN.
    logits: float32 [M,V], or None unless requested.
    features: [N,F] of all rows, in the plan's dtype; None in a bundle without a draft that uses
    features.
    """

    next_token: Int64s
    logits: NDArray[np.float32] | None
    features: Floats | None


class TargetEngine:
    """The target's session with its KV cache and buffers, batch 1.

    Letters: N rows of a call (at most `max_rows`), M rows with logits, V target vocabulary, F width
    of the features.
    """

    def __init__(self, bundle: Bundle, threads: int, clock: Clock) -> None:
        plan, info = bundle.manifest.plan, bundle.manifest.target
        # Load first: a manifest that does not match the graph must not determine buffer sizes.
        self._session = load_session(
            bundle, "target", bound_target(bundle.manifest), threads, clock
        )
        dtype = np.dtype(plan.dtype)
        self.vocab_size, self.feature_size = info.vocab_size, info.feature_size
        self.capacity = plan.max_seq_len
        self.prefill_chunk = plan.prefill_chunk
        self.max_rows = max(plan.prefill_chunk, plan.max_draft_tokens + 1)
        self._max_logit_rows = plan.max_draft_tokens + 1
        self._cache = KvCache(
            info.num_layers, info.num_kv_heads, plan.cache_capacity, info.head_dim, dtype
        )
        rows, picked = self.max_rows, self._max_logit_rows
        self._ids, self._positions = Buffer(rows, np.int64), Buffer(rows, np.int64)
        self._mask = Buffer(rows * rows, np.bool_)
        self._past, self._logit_rows = Buffer(1, np.int64), Buffer(picked, np.int64)
        self._next, self._logits = (
            Buffer(picked, np.int64),
            Buffer(picked * self.vocab_size, np.float32),
        )
        self._features = Buffer(max(rows * self.feature_size, 1), dtype)
        self._causal = np.tril(np.ones((rows, rows), np.bool_))
        self._bound_past, self._bound_present = self._cache.bindings()

    @property
    def max_verify_rows(self) -> int:
        """Maximum number of rows (nodes, including the root) of one `verify` call."""
        return self._max_logit_rows

    def prefill(self, ids: Int64s, past: int, want_logits: bool) -> TargetOutput:
        """Run ids int64 [N] at positions past .. past+N-1. Return the output of the last row."""
        num_rows = len(ids)
        self._ids.view(1, num_rows)[0] = ids
        self._positions.view(1, num_rows)[0] = np.arange(past, past + num_rows)
        self._mask.view(1, num_rows, num_rows)[0] = self._causal[:num_rows, :num_rows]
        self._logit_rows.view(1, 1)[0] = num_rows - 1
        return self._run(num_rows, 1, past, want_logits)

    def verify(self, tree: Tree, past: int, want_logits: bool) -> TargetOutput:
        """Run the M nodes of `tree` after `past` committed slots (docs/method.md, section 1)."""
        num_rows = tree.num_nodes
        self._ids.view(1, num_rows)[0] = tree.tokens
        np.add(tree.depths, past, out=self._positions.view(1, num_rows)[0], casting="unsafe")
        self._mask.view(1, num_rows, num_rows)[0] = tree.ancestor_mask()
        self._logit_rows.view(1, num_rows)[0] = np.arange(num_rows)
        return self._run(num_rows, num_rows, past, want_logits)

    def keep(self, past: int, path: tuple[int, ...]) -> None:
        """Keep the root and the accepted path of the last verified tree.

        They become contiguous, starting at slot `past`.
        """
        self._cache.keep(past, (0, *path))

    def clear(self, past: int = 0) -> None:
        """Zero every slot from `past` on. This is required once they may contain NaN."""
        self._cache.clear(past)

    def _run(self, num_rows: int, picked: int, past: int, want_logits: bool) -> TargetOutput:
        self._past.view(1)[0] = past
        self._session.run(
            (num_rows, picked, want_logits), lambda: self._values(num_rows, picked, want_logits)
        )
        return self._output(num_rows, picked, want_logits)

    def _values(self, num_rows: int, picked: int, want_logits: bool) -> OrtValues:
        inputs = {
            "input_ids": self._ids.value(1, num_rows),
            "position_ids": self._positions.value(1, num_rows),
            "tree_mask": self._mask.value(1, num_rows, num_rows),
            "past_len": self._past.value(1),
            "logit_rows": self._logit_rows.value(1, picked),
            **self._bound_past,
        }
        outputs = {"next_token": self._next.value(1, picked), **self._bound_present}
        if want_logits:
            outputs["logits"] = self._logits.value(1, picked, self.vocab_size)
        if self.feature_size:
            outputs["features"] = self._features.value(1, num_rows, self.feature_size)
        return inputs, outputs

    def _output(self, num_rows: int, picked: int, want_logits: bool) -> TargetOutput:
        return TargetOutput(
            next_token=self._next.view(1, picked)[0],
            logits=self._logits.view(1, picked, self.vocab_size)[0] if want_logits else None,
            features=(
                self._features.view(1, num_rows, self.feature_size)[0]
                if self.feature_size
                else None
            ),
        )


def bound_target(manifest: Manifest) -> Bound:
    """Return the tensors that a caller of the target's graph binds."""
    plan, info = manifest.plan, manifest.target
    cache = (info.num_kv_heads, plan.cache_capacity, info.head_dim)
    inputs = (
        TensorSpec("input_ids", "int64", ("B", "N")),
        TensorSpec("position_ids", "int64", ("B", "N")),
        TensorSpec("tree_mask", "bool", ("B", "N", "N")),
        TensorSpec("past_len", "int64", ("B",)),
        TensorSpec("logit_rows", "int64", ("B", "M")),
    )
    outputs = [
        TensorSpec("next_token", "int64", ("B", "M")),
        TensorSpec("logits", "float32", ("B", "M", info.vocab_size)),
    ]
    if info.feature_size:
        outputs.append(TensorSpec("features", plan.dtype, ("B", "N", info.feature_size)))
    return Bound(
        chain(inputs, cache_specs("past", info.num_layers, cache, plan.dtype)),
        chain(outputs, cache_specs("present", info.num_layers, cache, plan.dtype)),
    )
