"""EAGLE-1's static tree, grown one depth at a time.

The shape of the tree is fixed; the draft only fills its nodes with tokens.

Letters: M nodes (root included), K top-k, F frontier nodes, R draft rows so far.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from eagle3.plans.tree_paths import TreePaths
from eagle3.runtime.trees.tree import (
    Bools,
    Float32s,
    Frontier,
    Int32s,
    Int64s,
    Tree,
    extended_mask,
    usable_candidates,
)


@dataclass(frozen=True, eq=False)
class _Shape:
    """The paths of a tree as arrays over its nodes. Node 0 is the root, node i the i-th path."""

    parents: Int32s  # [M] node index of the parent; -1 for the root
    ranks: Int64s  # [M] rank among the parent's children
    is_parent: Bools  # [M] True for a node that has children
    levels: tuple[Int64s, ...]  # the nodes of each depth, starting at depth 1


@lru_cache(maxsize=64)
def _shape_of(paths: TreePaths) -> _Shape:
    node_of = {path: node for node, path in enumerate(((), *paths.paths))}
    parents = np.array([-1, *(node_of[path[:-1]] for path in paths.paths)], np.int32)
    ranks = np.array([0, *(path[-1] for path in paths.paths)], np.int64)
    is_parent = np.zeros(len(node_of), np.bool_)
    is_parent[parents[1:]] = True
    depths = np.array([len(path) for path in node_of])
    levels = tuple(np.flatnonzero(depths == depth) for depth in range(1, paths.depth + 1))
    return _Shape(parents, ranks, is_parent, levels)


class StaticTree:
    """`TreeBuilder` of a static tree: one node per entry of `paths`, in the order of `paths`.

    A node of rank r has the token of its parent's r-th usable candidate. If the draft returned
    fewer usable candidates, the node and its descendants are left out. The draft runs only on nodes
    that have children. Candidates are deterministic.
    """

    def __init__(self, root_token: int, paths: TreePaths) -> None:
        self._shape = _shape_of(paths)
        self._tokens = np.full(paths.num_nodes + 1, root_token, np.int64)
        self._kept = np.zeros(paths.num_nodes + 1, np.bool_)
        self._kept[0] = True
        self._nodes = np.zeros(1, np.int64)  # node indices of the frontier
        no_rows = np.zeros((1, 0), np.bool_)
        self._frontier = Frontier(0, self._tokens[:1], self._nodes, no_rows)

    @property
    def frontier(self) -> Frontier | None:
        """The nodes of the newest depth that have children, or None if there are none."""
        return self._frontier if self._nodes.size else None

    def add_root_candidates(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Add the root's candidates: ids [K] (target vocabulary) and log q, float32 [K]."""
        assert self._frontier.depth == 0, "the root already has its candidates"
        self._expand(top_ids[None], top_log_probs[None])

    def add(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Add one more depth; row f of ids and log q, both [F, K], belongs to frontier node f."""
        assert self.frontier is not None and self._frontier.depth > 0, "no frontier to expand"
        self._expand(top_ids, top_log_probs)

    def _expand(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Assign tokens to the frontier's children; the next frontier is those with children."""
        before, shape = self._frontier, self._shape
        assert top_ids.shape == top_log_probs.shape and len(top_ids) == self._nodes.size
        usable = usable_candidates(top_ids, top_log_probs)
        by_rank = np.argsort(~usable, axis=1, kind="stable")  # usable first, best first
        slot_of = np.full(self._tokens.size, -1)
        slot_of[self._nodes] = np.arange(self._nodes.size)
        nodes = shape.levels[before.depth]
        slots, ranks = slot_of[shape.parents[nodes]], shape.ranks[nodes]
        there = (slots >= 0) & (ranks < usable.sum(axis=1)[slots])
        nodes, slots, ranks = nodes[there], slots[there], ranks[there]
        self._tokens[nodes] = top_ids[slots, by_rank[slots, ranks]]
        self._kept[nodes] = True
        run = shape.is_parent[nodes]
        self._nodes, slots = nodes[run], slots[run]
        self._frontier = Frontier(
            depth=before.depth + 1,
            tokens=self._tokens[self._nodes],
            parent_slots=slots,
            row_mask=extended_mask(before.row_mask, slots),
        )

    def finish(self) -> Tree:
        """Return the nodes that have a token in path order, so parents precede their children."""
        nodes = np.flatnonzero(self._kept)
        node_of = np.full(self._tokens.size + 1, -1, np.int32)  # the last maps the root's -1
        node_of[nodes] = np.arange(nodes.size)
        return Tree(self._tokens[nodes], node_of[self._shape.parents[nodes]])
