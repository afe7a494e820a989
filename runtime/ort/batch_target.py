"""The target for many sequences: prefill one sequence, or decode one token of each in one call.

This module contains the graph with its cache and buffers; `batch_engine.py` assigns requests to
rows. `target_engine.py` does the same for a single sequence with a tree.

Letters: B sequences (rows) of a call, N tokens of each sequence, L layers, Hkv key-value heads, S
cache capacity, D head size, V target vocabulary.
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
    """The target with one block of KV caches [2, L, rows, Hkv, S, D].

    Owns the block, whose memory pages are touched lazily, and the buffers of every call. A call for
    rows 0 .. B-1, or for a single row, binds that part of the block without a copy. Raises
    BundleError if the bundle does not match its graph.
    """

    def __init__(self, bundle: Bundle, rows: int, threads: int, clock: Clock) -> None:
        plan, info = bundle.manifest.plan, bundle.manifest.target
        # Load first: a manifest that does not match the graph must not determine buffer sizes.
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
        self._num_used = 0  # slots from here on were never written in any row
        self._held: list[tuple[int, ...]] = [()] * rows  # the prompt whose slots each row still has
        tokens = max(rows, self._chunk)
        self._ids, self._positions = Buffer(tokens, np.int64), Buffer(tokens, np.int64)
        self._mask = Buffer(max(rows, self._chunk**2), np.bool_)
        self._past, self._logit_rows = Buffer(rows, np.int64), Buffer(rows, np.int64)
        self._next = Buffer(rows, np.int64)
        self._logits = Buffer(rows * self.vocab_size, np.float32)
        self._causal = np.tril(np.ones((self._chunk, self._chunk), np.bool_))

    def prefill(self, row: int, prompt: Sequence[int], want_logits: bool) -> TargetOutput:
        """Fill slots 0 .. len(prompt)-1 of `row` and return the output of the last token.

        The previous content of the row is overwritten. The longest prefix that the prompt shares
        with a prompt still cached in any row is copied instead of computed, because prompts of the
        same chat template start alike.

        Returns next_token int64 [1] and logits float32 [1,V] (None unless `want_logits`), as views
        that the next call overwrites. Raises EngineError if the target fails.
        """
        done = self._copy_shared(row, prompt)
        ids = np.asarray(prompt, np.int64)
        for start in range(done, len(ids), self._chunk):
            part = ids[None, start : start + self._chunk]
            output = self._run(row, part, np.array([start]), want_logits)
        self._held[row] = tuple(prompt)
        return output

    def decode(self, tokens: Sequence[int], past: Sequence[int], want_logits: bool) -> TargetOutput:
        """Run one token for each of the first B = len(tokens) rows.

        Row i has past[i] filled slots, and tokens[i] is written to the next slot.

        Returns next_token int64 [B] and logits float32 [B,V] (None unless `want_logits`), as views
        that the next call overwrites. Raises EngineError if the target fails.
        """
        return self._run(0, np.array(tokens)[:, None], np.array(past), want_logits)

    def move(self, source: int, target: int, num_slots: int) -> None:
        """Copy the first `num_slots` slots of row `source` to row `target`."""
        self._cache.copy(source, target, num_slots)
        self._held[target] = self._held[source]

    def clear(self) -> None:
        """Zero every row. This is required once the cache may contain NaN."""
        self._held = [()] * self.rows
        self._cache.clear(0, self._num_used)

    def _copy_shared(self, row: int, prompt: Sequence[int]) -> int:
        """Copy the longest cached prefix of `prompt` to `row` and return its number of slots.

        The slot of the last token is never included, so that it is always computed.
        """
        lengths = [_num_shared(prompt[:-1], held) for held in self._held]
        source = max(range(self.rows), key=lambda i: (lengths[i], i == row))
        self._held[row] = ()
        if source != row:
            self._cache.copy(source, row, lengths[source])
        return lengths[source]

    def _run(self, first: int, ids: Int64s, past: Int64s, want_logits: bool) -> TargetOutput:
        """Run ids [B,N] after past [B] filled slots of rows first .. first+B-1.

        Returns the outputs of the last token of each row.
        """
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
        """Return the OrtValues of a call.

        The output `features` is never bound, because only a draft reads it.
        """
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
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
