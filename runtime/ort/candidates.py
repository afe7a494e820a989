"""The base class of draft engines: text rows in a KV cache, tree rows after them, top-k outputs.

`draft_engine.py` adds the features and the fed-back output of a head. `model_engine.py` adds the
window positions of a small LM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle.manifest import DraftInfo, Manifest, TensorSpec
from eagle3.runtime.ort.kv_cache import Buffer, KvCache
from eagle3.runtime.ort.session import OrtValues, Session
from eagle3.runtime.ort.signature import Bound, cache_specs

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """The best next tokens of M rows. The arrays are views that the next call overwrites.

    top_ids: int64 [M,K], ids of the target vocabulary, best first.
    top_log_probs: float32 [M,K], in the same order.
    logits: float32 [M,Vd], or None unless requested.
    """

    top_ids: Int64s
    top_log_probs: Float32s
    logits: Float32s | None


class CandidateEngine(ABC):
    """A draft's session with its KV cache and buffers, batch 1.

    Slots 0 .. `num_rows` - 1 of the cache contain the rows of the text. Tree rows follow them and
    are overwritten when the text is extended.

    Letters: N rows of a call (at most `max_rows`), M rows with candidates, K candidates per row, W
    tree rows so far, Vd draft vocabulary.
    """

    def __init__(self, session: Session, manifest: Manifest, info: DraftInfo) -> None:
        plan = manifest.plan
        self._session = session
        self.draft_vocab_size = info.draft_vocab_size
        self.max_rows = max(plan.prefill_chunk, plan.max_draft_tokens + 1)
        self.capacity = plan.draft_capacity
        self._cache = KvCache(
            info.num_layers,
            info.num_kv_heads,
            plan.draft_capacity,
            info.head_dim,
            np.dtype(plan.dtype),
        )
        self.num_rows = self._num_used = 0
        rows, top = self.max_rows, plan.max_draft_tokens
        self._max_window = max(rows, plan.max_draft_rows)
        self._ids, self._positions = Buffer(rows, np.int64), Buffer(rows, np.int64)
        self._mask = Buffer(rows * self._max_window, np.bool_)
        self._past, self._top_k = Buffer(1, np.int64), Buffer(1, np.int64)
        self._logit_rows = Buffer(rows, np.int64)
        self._ids_out, self._log_probs = Buffer(top * top, np.int64), Buffer(top * top, np.float32)
        self._logits = Buffer(top * self.draft_vocab_size, np.float32)
        self._causal = np.tril(np.ones((rows, rows), np.bool_))
        self._bound_past, self._bound_present = self._cache.bindings()

    def reset(self) -> None:
        """Drop all rows and zero their slots, in which broken weights may have left NaN."""
        self._cache.clear(stop=self._num_used)
        self.num_rows = self._num_used = 0

    def _run_text(self, ids: Int64s, top_k: int, want_logits: bool) -> Candidates:
        """Run the next rows [N] of the text and keep them. Return the candidates of the
        last row.
        """
        count, first = len(ids), self.num_rows
        self._ids.view(1, count)[0] = ids
        self._positions.view(1, count)[0] = np.arange(first, first + count)
        self._mask.view(1, count, count)[0] = self._causal[:count, :count]
        self._logit_rows.view(1, 1)[0] = count - 1
        self.num_rows += count
        return self._run(count, count, 1, first, top_k, want_logits)

    def _run_tree(
        self, ids: Int64s, depth: int, row_mask: NDArray[np.bool_], top_k: int, want_logits: bool
    ) -> Candidates:
        """Run tree rows after the text and return the candidates of all of them.

        ids: int64 [N], tokens of nodes at `depth` (1 = children of the root).
        row_mask: bool [N,W], the tree rows so far, including these, that each row attends to.
        """
        count, window = row_mask.shape
        self._ids.view(1, count)[0] = ids
        self._positions.view(1, count)[0] = self.num_rows - 1 + depth
        self._mask.view(1, count, window)[0] = row_mask
        self._logit_rows.view(1, count)[0] = np.arange(count)
        past = self.num_rows + window - count
        return self._run(count, window, count, past, top_k, want_logits)

    def _run(
        self, count: int, window: int, picked: int, past: int, top_k: int, want_logits: bool
    ) -> Candidates:
        self._num_used = max(self._num_used, past + count)
        self._past.view(1)[0] = past
        self._top_k.view(1)[0] = top_k
        shape = (count, window, picked, top_k, want_logits)
        self._session.run(shape, lambda: self._values(*shape))
        return Candidates(
            top_ids=self._ids_out.view(1, picked, top_k)[0],
            top_log_probs=self._log_probs.view(1, picked, top_k)[0],
            logits=self._logits.view(1, picked, self.draft_vocab_size)[0] if want_logits else None,
        )

    def _values(
        self, count: int, window: int, picked: int, top_k: int, want_logits: bool
    ) -> OrtValues:
        own_inputs, own_outputs = self._own_values(count, window)
        inputs = {
            "input_ids": self._ids.value(1, count),
            "position_ids": self._positions.value(1, count),
            "tree_mask": self._mask.value(1, count, window),
            "past_len": self._past.value(1),
            "logit_rows": self._logit_rows.value(1, picked),
            "top_k": self._top_k.value(1),
            **own_inputs,
            **self._bound_past,
        }
        outputs = {
            "top_ids": self._ids_out.value(1, picked, top_k),
            "top_log_probs": self._log_probs.value(1, picked, top_k),
            **own_outputs,
            **self._bound_present,
        }
        if want_logits:
            outputs["logits"] = self._logits.value(1, picked, self.draft_vocab_size)
        return inputs, outputs

    @abstractmethod
    def _own_values(self, count: int, window: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the additional inputs and outputs of this kind of engine."""


def bound_candidates(
    manifest: Manifest,
    info: DraftInfo,
    own_inputs: Sequence[TensorSpec],
    own_outputs: Sequence[TensorSpec] = (),
) -> Bound:
    """Return the tensors that a `CandidateEngine` binds.

    own_inputs, own_outputs: the additional tensors of the kind of engine.
    """
    plan = manifest.plan
    cache = (info.num_kv_heads, plan.draft_capacity, info.head_dim)
    inputs = [
        TensorSpec("input_ids", "int64", ("B", "N")),
        TensorSpec("position_ids", "int64", ("B", "N")),
        TensorSpec("tree_mask", "bool", ("B", "N", "W")),
        TensorSpec("past_len", "int64", ("B",)),
        TensorSpec("logit_rows", "int64", ("B", "M")),
        TensorSpec("top_k", "int64", (1,)),
        *own_inputs,
        *cache_specs("past", info.num_layers, cache, plan.dtype),
    ]
    outputs = [
        TensorSpec("top_ids", "int64", ("B", "M", "K")),
        TensorSpec("top_log_probs", "float32", ("B", "M", "K")),
        TensorSpec("logits", "float32", ("B", "M", info.draft_vocab_size)),
        *own_outputs,
        *cache_specs("present", info.num_layers, cache, plan.dtype),
    ]
    return Bound(inputs, outputs)
