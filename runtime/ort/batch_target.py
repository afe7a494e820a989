"""The target over many sequences at once: prefill one of them, then a token of each in one call.

Where it sits: `batch.py` decides which request has which row; here is the graph, its cache and
its buffers. `target.py` is the same for a single sequence with a tree.

Letters: B sequences (rows) of a call, N tokens of each, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.kv_cache import Buffer, KvCache
from eagle3.runtime.ort.session import OrtValues, load_session
from eagle3.runtime.ort.target_engine import TargetOutput, bound_target
from eagle3.runtime.stats import Clock

Int64s = NDArray[np.int64]


class BatchTarget:
    """The target with one block of caches [2, L, rows, Hkv, S, D], whose pages are touched lazily.

    Owns the block and the buffers of every call. A call over rows 0 .. B-1, or over a single row,
    binds that part of the block; nothing is copied. Raises BundleError when the bundle does not
    fit its graph.
    """

    def __init__(self, bundle: Bundle, rows: int, threads: int, clock: Clock) -> None:
        plan, info = bundle.manifest.plan, bundle.manifest.target
        # First, so that a manifest which does not fit the graph sizes no buffer.
        self._session = load_session(
            bundle, "target", bound_target(bundle.manifest), threads, clock
        )
        self.rows, self.vocab_size, self.capacity = rows, info.vocab_size, plan.max_seq_len
        self._chunk = plan.prefill_chunk
        self._cache = KvCache(
            info.num_layers,
            info.num_kv_heads,
            plan.cache_capacity,
            info.head_dim,
            np.dtype(plan.dtype),
            batch_size=rows,
        )
        self._num_used = 0  # no slot from here on was ever written, in any row
        self._held: list[tuple[int, ...]] = [()] * rows  # prompts whose slots the rows still hold
        tokens = max(rows, self._chunk)
        self._ids, self._positions = Buffer(tokens, np.int64), Buffer(tokens, np.int64)
        self._mask = Buffer(max(rows, self._chunk**2), np.bool_)
        self._past, self._logit_rows = Buffer(rows, np.int64), Buffer(rows, np.int64)
        self._next = Buffer(rows, np.int64)
        self._logits = Buffer(rows * self.vocab_size, np.float32)
        self._causal = np.tril(np.ones((self._chunk, self._chunk), np.bool_))

    def prefill(self, row: int, prompt: Sequence[int], want_logits: bool) -> TargetOutput:
        """Fills slots 0 .. len(prompt)-1 of `row`, whatever it held; the last token's output.

        next_token int64 [1], logits float32 [1,V] or None; views that the next call overwrites.
        The longest start that the prompt shares with one held by any row is copied, not computed:
        prompts of one chat template begin alike. Raises EngineError.
        """
        done = self._copy_shared(row, prompt)
        ids = np.asarray(prompt, np.int64)
        for start in range(done, len(ids), self._chunk):
            part = ids[None, start : start + self._chunk]
            output = self._run(row, part, np.array([start]), want_logits)
        self._held[row] = tuple(prompt)
        return output

    def decode(self, tokens: Sequence[int], past: Sequence[int], want_logits: bool) -> TargetOutput:
        """Runs tokens[i] behind past[i] filled slots of row i, for the first B = len(tokens) rows.

        next_token int64 [B], logits float32 [B,V] or None; views that the next call overwrites.
        Raises EngineError.
        """
        return self._run(0, np.array(tokens)[:, None], np.array(past), want_logits)

    def move(self, source: int, target: int, num_slots: int) -> None:
        """Row `target` becomes a copy of the first `num_slots` slots of row `source`."""
        self._cache.copy(source, target, num_slots)
        self._held[target] = self._held[source]

    def clear(self) -> None:
        """Wipes every row: needed once numbers that are none may stand there."""
        self._held = [()] * self.rows
        self._cache.clear(0, self._num_used)

    def _copy_shared(self, row: int, prompt: Sequence[int]) -> int:
        """How many slots of `row` hold the start of `prompt` now; never that of its last token."""
        lengths = [_num_shared(prompt[:-1], held) for held in self._held]
        source = max(range(self.rows), key=lambda i: (lengths[i], i == row))
        self._held[row] = ()
        if source != row:
            self._cache.copy(source, row, lengths[source])
        return lengths[source]

    def _run(self, first: int, ids: Int64s, past: Int64s, want_logits: bool) -> TargetOutput:
        """ids [B,N] behind past [B] slots of rows first .. first+B-1; the last token's logits."""
        size, num_rows = ids.shape
        self._ids.view(size, num_rows)[:] = ids
        self._positions.view(size, num_rows)[:] = past[:, None] + np.arange(num_rows)
        self._mask.view(size, num_rows, num_rows)[:] = self._causal[:num_rows, :num_rows]
        self._past.view(size)[:] = past
        self._logit_rows.view(size, 1)[:] = num_rows - 1
        # A single token takes a second slot, which is never read.
        self._num_used = max(self._num_used, int(past.max()) + num_rows + 1)
        self._session.run(
            (first, size, num_rows, want_logits),
            lambda: self._values(first, size, num_rows, want_logits),
        )
        return TargetOutput(
            next_token=self._next.view(size, 1)[:, 0],
            logits=self._logits.view(size, 1, self.vocab_size)[:, 0] if want_logits else None,
            features=None,
        )

    def _values(self, first: int, size: int, num_rows: int, want_logits: bool) -> OrtValues:
        """`features` are never bound: they are a draft's food, and nobody reads them here."""
        past, present = self._cache.bindings(first, first + size)
        inputs = {
            "input_ids": self._ids.value(size, num_rows),
            "position_ids": self._positions.value(size, num_rows),
            "tree_mask": self._mask.value(size, num_rows, num_rows),
            "past_len": self._past.value(size),
            "logit_rows": self._logit_rows.value(size, 1),
            **past,
        }
        outputs = {"next_token": self._next.value(size, 1), **present}
        if want_logits:
            outputs["logits"] = self._logits.value(size, 1, self.vocab_size)
        return inputs, outputs


def _num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common start."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
