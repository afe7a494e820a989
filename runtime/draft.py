"""A draft head's engines over their cache: extend by committed rows, step by tree rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle import Bundle
from eagle3.runtime.manifest import (
    DRAFT_ENGINES,
    DraftInfo,
    Manifest,
    TargetInfo,
    TensorSpec,
    engine_name,
)
from eagle3.runtime.session import (
    Bound,
    Buffer,
    Clock,
    KvCache,
    Session,
    Values,
    cache_specs,
    load_session,
)

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class DraftOutput:
    """Candidates of the rows asked for; arrays are views that the next call overwrites.

    top_ids int64 [M,K] (the target's ids) and top_log_probs float32 [M,K], best first; logits
    float32 [M,Vd] when asked for; hidden [N,d] of all rows, what the next step is fed.
    """

    top_ids: Int64s
    top_log_probs: Float32s
    logits: Float32s | None
    hidden: NDArray[Any]


class DraftEngine:
    """Batch 1. Slots 0 .. `num_rows` - 1 of the cache were made from the target's features and
    stay; tree rows stand behind them and are overwritten by the next extension.

    name: which of the bundle's heads, by default the first. columns: of the target's features
    [N,F'], those [N,F] that this head fuses.
    """

    def __init__(self, bundle: Bundle, threads: int, clock: Clock, name: str | None = None) -> None:
        manifest = bundle.manifest
        name = next(iter(manifest.drafts)) if name is None else name
        plan, info = manifest.plan, manifest.drafts[name]
        # First, so that a manifest which does not fit the graphs sizes no buffer.
        self._fuse: Session | None = None
        if "draft_fuse" in DRAFT_ENGINES[info.method]:
            bound = _bound_fuse(manifest, info)
            self._fuse = load_session(
                bundle, engine_name(name, "draft_fuse"), bound, threads, clock
            )
        self._draft = load_session(
            bundle, engine_name(name, "draft"), _bound_draft(manifest, info), threads, clock
        )
        dtype = np.dtype(plan.dtype)
        self.draft_vocab_size, self.hidden_size = info.draft_vocab_size, info.hidden_size
        self.columns = _columns(manifest.target, info)
        self.feature_size = feature_size_of(manifest.target, info)
        self.max_rows = max(plan.prefill_chunk, plan.max_draft_tokens + 1)
        capacity = plan.draft_capacity
        self._cache = KvCache(1, info.num_kv_heads, capacity, info.head_dim, dtype)
        self.num_rows = self._num_used = 0
        rows, top = self.max_rows, plan.max_draft_tokens
        self._features = Buffer(rows * self.feature_size, dtype)
        self._hidden_in = Buffer(rows * self.hidden_size, dtype)
        self._hidden_out = Buffer(rows * self.hidden_size, dtype)
        self._ids, self._positions = Buffer(rows, np.int64), Buffer(rows, np.int64)
        self._mask = Buffer(rows * max(rows, plan.max_draft_rows), np.bool_)
        self._past, self._top_k = Buffer(1, np.int64), Buffer(1, np.int64)
        self._logit_rows = Buffer(rows, np.int64)
        self._ids_out, self._log_probs = Buffer(top * top, np.int64), Buffer(top * top, np.float32)
        self._logits = Buffer(top * self.draft_vocab_size, np.float32)
        self._causal = np.tril(np.ones((rows, rows), np.bool_))
        self._bound_past, self._bound_present = self._cache.bindings()

    def reset(self) -> None:
        """Forgets all rows, and NaN that a broken head or target may have left in them."""
        self._cache.clear(stop=self._num_used)
        self.num_rows = self._num_used = 0

    def feature_slots(self, num_rows: int) -> NDArray[Any]:
        """Where the caller writes the features [N,F] of the next `extend`."""
        slots: NDArray[Any] = self._features.view(1, num_rows, self.feature_size)[0]
        return slots

    def extend(self, next_ids: Int64s, top_k: int, want_logits: bool = False) -> DraftOutput:
        """Runs rows with the target's features (already in `feature_slots`) and keeps them.

        next_ids [N]: row i's features belong to position i, its token to position i + 1. The
        candidates are those of the last row.
        """
        count = len(next_ids)
        self._fill_hidden(count)
        self._ids.view(1, count)[0] = next_ids
        first = self.num_rows
        self._positions.view(1, count)[0] = np.arange(first, first + count)
        self._mask.view(1, count, count)[0] = self._causal[:count, :count]
        self._logit_rows.view(1, 1)[0] = count - 1
        self.num_rows += count
        return self._run(count, count, 1, first, top_k, want_logits)

    def _fill_hidden(self, count: int) -> None:
        """The first `count` feature slots become the draft's input [N,d]."""
        if self._fuse is None:  # then F = d
            self._hidden_in.view(1, count, self.hidden_size)[0] = self.feature_slots(count)
            return
        self._fuse.run(
            count,
            lambda: (
                {"features": self._features.value(1, count, self.feature_size)},
                {"hidden": self._hidden_in.value(1, count, self.hidden_size)},
            ),
        )

    def shared(self, num_rows: int) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
        """For a graph that takes turns with this engine: the features [1,N,F] in `feature_slots`,
        and the cache as its inputs past_* and outputs present_*.
        """
        features = self._features.value(1, num_rows, self.feature_size)
        return features, self._bound_past, self._bound_present

    def keep_rows(self, count: int) -> None:
        """Rows that such a graph has written behind the kept ones."""
        self.num_rows += count
        self._num_used = max(self._num_used, self.num_rows)

    def step(
        self,
        ids: Int64s,
        hidden: NDArray[Any],
        depth: int,
        row_mask: NDArray[np.bool_],
        top_k: int,
        want_logits: bool = False,
    ) -> DraftOutput:
        """Runs tree rows that carry what the head fed back.

        ids [N]: nodes at `depth` (1 = children of the root); hidden [N,d]: their parents' `hidden`;
        row_mask [N,W] bool: which of the tree rows so far, these included, each one sees.
        """
        count, window = row_mask.shape
        self._hidden_in.view(1, count, self.hidden_size)[0] = hidden
        self._ids.view(1, count)[0] = ids
        self._positions.view(1, count)[0] = self.num_rows - 1 + depth
        self._mask.view(1, count, window)[0] = row_mask
        self._logit_rows.view(1, count)[0] = np.arange(count)
        past = self.num_rows + window - count
        return self._run(count, window, count, past, top_k, want_logits)

    def _run(
        self, count: int, window: int, picked: int, past: int, top_k: int, want_logits: bool
    ) -> DraftOutput:
        self._num_used = max(self._num_used, past + count)
        self._past.view(1)[0] = past
        self._top_k.view(1)[0] = top_k
        shape = (count, window, picked, top_k, want_logits)
        self._draft.run(shape, lambda: self._values(*shape))
        logits = self._logits.view(1, picked, self.draft_vocab_size)[0] if want_logits else None
        return DraftOutput(
            top_ids=self._ids_out.view(1, picked, top_k)[0],
            top_log_probs=self._log_probs.view(1, picked, top_k)[0],
            logits=logits,
            hidden=self._hidden_out.view(1, count, self.hidden_size)[0],
        )

    def _values(
        self, count: int, window: int, picked: int, top_k: int, want_logits: bool
    ) -> Values:
        inputs = {
            "input_ids": self._ids.value(1, count),
            "position_ids": self._positions.value(1, count),
            "hidden": self._hidden_in.value(1, count, self.hidden_size),
            "tree_mask": self._mask.value(1, count, window),
            "past_len": self._past.value(1),
            "logit_rows": self._logit_rows.value(1, picked),
            "top_k": self._top_k.value(1),
            **self._bound_past,
        }
        outputs = {
            "top_ids": self._ids_out.value(1, picked, top_k),
            "top_log_probs": self._log_probs.value(1, picked, top_k),
            "hidden_out": self._hidden_out.value(1, count, self.hidden_size),
            **self._bound_present,
        }
        if want_logits:
            outputs["logits"] = self._logits.value(1, picked, self.draft_vocab_size)
        return inputs, outputs


def feature_size_of(target: TargetInfo, info: DraftInfo) -> int:
    """F: columns of the target's features that this head fuses."""
    return len(info.aux_layer_ids) * target.hidden_size


def _columns(target: TargetInfo, info: DraftInfo) -> slice | Int64s:
    """Which columns of the target's features are the head's own; a slice makes no copy."""
    if info.aux_layer_ids == target.aux_layer_ids:
        return slice(None)
    width = target.hidden_size
    blocks = [target.aux_layer_ids.index(layer) for layer in info.aux_layer_ids]
    return np.concatenate([np.arange(block * width, (block + 1) * width) for block in blocks])


def _bound_fuse(manifest: Manifest, info: DraftInfo) -> Bound:
    """What `extend` binds."""
    dtype = manifest.plan.dtype
    return Bound(
        [TensorSpec("features", dtype, ("B", "N", feature_size_of(manifest.target, info)))],
        [TensorSpec("hidden", dtype, ("B", "N", info.hidden_size))],
    )


def _bound_draft(manifest: Manifest, info: DraftInfo) -> Bound:
    """What `_values` binds."""
    plan, width = manifest.plan, info.hidden_size
    cache = (info.num_kv_heads, plan.draft_capacity, info.head_dim)
    inputs = (
        TensorSpec("input_ids", "int64", ("B", "N")),
        TensorSpec("position_ids", "int64", ("B", "N")),
        TensorSpec("hidden", plan.dtype, ("B", "N", width)),
        TensorSpec("tree_mask", "bool", ("B", "N", "W")),
        TensorSpec("past_len", "int64", ("B",)),
        TensorSpec("logit_rows", "int64", ("B", "M")),
        TensorSpec("top_k", "int64", (1,)),
    )
    outputs = (
        TensorSpec("top_ids", "int64", ("B", "M", "K")),
        TensorSpec("top_log_probs", "float32", ("B", "M", "K")),
        TensorSpec("hidden_out", plan.dtype, ("B", "N", width)),
        TensorSpec("logits", "float32", ("B", "M", info.draft_vocab_size)),
    )
    return Bound(
        chain(inputs, cache_specs("past", 1, cache, plan.dtype)),
        chain(outputs, cache_specs("present", 1, cache, plan.dtype)),
    )
