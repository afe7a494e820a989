"""EAGLE heads: extend the draft's cache by committed rows, then grow a tree from its own output.

EAGLE-1/2 and EAGLE-3 heads draft in the same way; `DraftEngine` and its graphs hide the
differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.acceptance.sampling import Float32s
from eagle3.runtime.drafters.base import DraftRequest, Int64s
from eagle3.runtime.drafters.draw import draw
from eagle3.runtime.ort.draft_engine import DraftEngine, DraftOutput
from eagle3.runtime.ort.growth_engine import GrowthEngine
from eagle3.runtime.trees.builder import tree_builder
from eagle3.runtime.trees.tree import Tree


class EagleDrafter:
    """Proposes a tree of deterministic candidates, or a sampled chain (method sections 2 and 3).

    A row pairs the features of position i with the token of position i + 1, so the newest row
    waits until its token is known. Rows are pending until the next `propose`, or until they would
    overflow the engine's buffers.

    name: the drafter's name in the bundle. target_ids: int64 [Vd], the target's id of every draft
    id. vocab_size: V of the target. growth: an engine over the cache of `engine` that grows the
    trees it supports in one call.
    """

    proposes = True

    def __init__(
        self,
        name: str,
        engine: DraftEngine,
        target_ids: Int64s,
        vocab_size: int,
        growth: GrowthEngine | None = None,
    ) -> None:
        self.name = name
        self._growth = growth
        self._engine, self._target_ids, self._vocab_size = engine, target_ids, vocab_size
        self._pending = 0
        self._next_ids = np.zeros(engine.max_rows, np.int64)

    def reset(self) -> None:
        """Discard all rows, both run and pending."""
        self._engine.reset()
        self._pending = 0

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Append rows. tokens[0] is the token of the newest pending row."""
        assert features is not None, "an EAGLE head needs the target's features"
        count = len(tokens)
        if self._pending:
            self._next_ids[self._pending - 1] = tokens[0]
        if self._pending + count > self._engine.max_rows:
            self._extend(top_k=1, want_logits=False)
        end = self._pending + count
        self._engine.feature_slots(end)[self._pending :] = features[:, self._engine.columns]
        self._next_ids[self._pending : end - 1] = tokens[1:]
        self._pending = end

    def rewind(self, num_tokens: int) -> None:
        """Drop rows, pending ones first. The newest remaining row keeps its token, which was
        committed.
        """
        dropped = min(num_tokens, self._pending)
        self._pending -= dropped
        self._engine.num_rows -= num_tokens - dropped

    def propose(self, request: DraftRequest) -> Tree:
        """Grow the tree of this round under request.root."""
        assert self._pending, "nothing was observed since the last proposal"
        self._next_ids[self._pending - 1] = request.root
        sampled = request.temperature is not None and request.tree.draft_top_k == 1
        if sampled:
            return self._sampled_chain(request)
        if self._growth is not None and self._growth.grows(request.tree):
            count, self._pending = self._pending, 0
            return self._growth.grow(self._next_ids[:count], request.tree.num_draft_tokens)
        return self._tree(request)

    def _extend(self, top_k: int, want_logits: bool) -> DraftOutput:
        """Run the pending rows and return the output of the newest one."""
        count, self._pending = self._pending, 0
        return self._engine.extend(self._next_ids[:count], top_k, want_logits)

    def _tree(self, request: DraftRequest) -> Tree:
        """Grow a static tree (EAGLE-1), or expand and rerank (EAGLE-2), with one engine call per
        level.
        """
        top_k = min(request.tree.top_k_in_use, self._engine.draft_vocab_size)
        tree = tree_builder(request.root, request.tree, top_k)
        out = self._extend(top_k, want_logits=False)
        tree.add_root_candidates(out.top_ids[0], out.top_log_probs[0])
        hidden = out.hidden[-1:]
        while (frontier := tree.frontier) is not None:
            out = self._engine.step(
                frontier.tokens,
                hidden[frontier.parent_slots],
                frontier.depth,
                frontier.row_mask,
                top_k,
            )
            tree.add(out.top_ids, out.top_log_probs)
            hidden = out.hidden
        return tree.finish()

    def _sampled_chain(self, request: DraftRequest) -> Tree:
        """Return a chain of tokens sampled from q, which the tree carries for acceptance."""
        tokens: list[int] = []
        q: dict[int, Float32s] = {}
        out = self._extend(1, want_logits=True)
        for depth in range(1, request.tree.depth_in_use + 1):
            assert out.logits is not None
            drawn = draw(out.logits[0], request, self._vocab_size, self._target_ids)
            if drawn is None:
                break
            token, q[depth - 1] = drawn
            tokens.append(token)
            if depth < request.tree.depth_in_use:
                seen = np.ones((1, depth), np.bool_)
                ids = np.array([token], np.int64)
                out = self._engine.step(ids, out.hidden[-1:].copy(), depth, seen, 1, True)
        return Tree.chain(request.root, tokens, q)
