"""EAGLE-2's dynamic tree: expand the most likely nodes, then rerank all candidates.

Letters: K top-k, F frontier nodes (F <= K), D maximum depth.
"""

from dataclasses import dataclass

import numpy as np

from eagle3.runtime.trees.tree import (
    Float32s,
    Frontier,
    Int64s,
    Tree,
    extended_mask,
    usable_candidates,
)


@dataclass(frozen=True, eq=False)
class ScoredFrontier(Frontier):
    """The K candidates with the highest values at their depth."""

    candidates: Int64s  # [F] indices into all candidates
    values: Float32s  # [F] log of the product of q along the path


class DynamicTree:
    """`TreeBuilder` of EAGLE-2's dynamic tree: expand, then rerank (EAGLE-2, section 4).

    After the root's candidates, at most D - 1 more depths are added. Columns beyond the first K are
    ignored. The candidates must be deterministic: reranking sampled candidates would bias them.
    """

    def __init__(self, root_token: int, top_k: int, depth: int, num_draft_tokens: int) -> None:
        assert top_k >= 1 and depth >= 1 and num_draft_tokens >= 0
        self._top_k, self._max_depth, self._budget = top_k, depth, num_draft_tokens
        capacity = 1 + top_k + (depth - 1) * top_k * top_k
        self._tokens = np.empty(capacity, np.int64)
        self._parents = np.empty(capacity, np.int32)
        self._values = np.empty(capacity, np.float32)
        self._size = 1  # candidate 0 is the root; its value is log 1, so it is kept as node 0
        self._tokens[0], self._parents[0], self._values[0] = root_token, -1, 0.0
        root = np.zeros(1, np.int64)
        no_rows = np.zeros((1, 0), np.bool_)
        self._frontier = ScoredFrontier(0, self._tokens[:1], root, no_rows, root, self._values[:1])

    @property
    def frontier(self) -> ScoredFrontier | None:
        """The nodes to run next, or None at depth D or if there is nothing left to expand."""
        frontier = self._frontier
        if frontier.depth == self._max_depth or frontier.tokens.size == 0:
            return None
        return frontier

    def add_root_candidates(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Add the root's candidates: ids [K] (target vocabulary) and log q, float32 [K]."""
        assert self._frontier.depth == 0, "the root already has its candidates"
        self._expand(top_ids[None], top_log_probs[None])

    def add(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Add one more depth; row f of ids and log q, both [F, K], belongs to frontier node f."""
        assert self.frontier is not None and self._frontier.depth > 0, "no frontier to expand"
        self._expand(top_ids, top_log_probs)

    def _expand(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Record all new candidates and make the K with the highest values the next frontier."""
        before = self._frontier
        assert top_ids.shape == top_log_probs.shape and len(top_ids) == before.tokens.size
        top_ids, top_log_probs = top_ids[:, : self._top_k], top_log_probs[:, : self._top_k]
        above = before.values[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            sums = above + top_log_probs.astype(np.float32, copy=False)
        usable = usable_candidates(top_ids, sums)
        slots, _ = np.nonzero(usable)
        # log q <= 0 only up to rounding, and a child must never rank above its parent.
        values = np.minimum(sums, above)[usable]
        first, self._size = self._size, self._size + slots.size
        new = slice(first, self._size)
        self._tokens[new] = top_ids[usable]
        self._parents[new] = before.candidates[slots]
        self._values[new] = values
        best = np.argsort(-values, kind="stable")[: self._top_k]
        self._frontier = ScoredFrontier(
            depth=before.depth + 1,
            tokens=self._tokens[new][best],
            parent_slots=slots[best],
            row_mask=extended_mask(before.row_mask, slots[best]),
            candidates=best + first,
            values=values[best],
        )

    def finish(self) -> Tree:
        """Return a Tree of the `num_draft_tokens` candidates with the highest values, best first.

        Ties go to the shallower candidate, then to the lower index. A child's value is at most
        its parent's, so a parent always precedes its children and every prefix of the nodes is
        also a tree.
        """
        order = np.argsort(-self._values[: self._size], kind="stable")[: self._budget + 1]
        node_of = np.full(self._size + 1, -1, np.int32)  # the last entry maps the root's parent, -1
        node_of[order] = np.arange(order.size)
        return Tree(self._tokens[order], node_of[self._parents[order]])
