"""Token trees: the frozen `Tree` that a round verifies, and the EAGLE-2 builder that grows one.

Where it sits: a drafter returns a `Tree` (docs/method.md, sections 1 and 3), the target verifies
its nodes in one call, and `accept.py` walks it. No engine is known here.

Letters: M nodes (root included), K top-k, F frontier nodes (F <= K), D depth, R draft rows so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Tree:
    """Draft tokens under a root; parents stand before their children.

    tokens: int64 [M], target vocabulary; tokens[0] is the root, the last committed token.
    parents: int32 [M], node index of the parent; parents[0] is -1.
    q: for a node whose children were *sampled*, the float32 [V] distribution they were drawn from
    without replacement, in node order. A node without one has deterministic candidates.
    """

    tokens: Int64s
    parents: Int32s
    q: Mapping[int, Float32s] | None = None

    @classmethod
    def root_only(cls, token: int) -> "Tree":
        """No draft token at all: verifying it is one step of plain decoding."""
        return cls(np.array([token], np.int64), np.array([-1], np.int32))

    @classmethod
    def chain(
        cls, root_token: int, draft_tokens: Sequence[int], q: Mapping[int, Float32s] | None = None
    ) -> "Tree":
        """K = 1: node i is the i-th draft token and the only child of node i - 1."""
        tokens = np.array([root_token, *draft_tokens], np.int64)
        return cls(tokens, np.arange(-1, tokens.size - 1, dtype=np.int32), q)

    @property
    def num_nodes(self) -> int:
        """M, the root included."""
        return self.tokens.size

    @property
    def num_draft_tokens(self) -> int:
        """M - 1."""
        return self.tokens.size - 1

    @cached_property
    def depths(self) -> Int32s:
        """int32 [M]; the root is 0. Position of a node = position of the root + its depth."""
        parents = self.parents.tolist()
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        return np.array(depths, np.int32)

    @cached_property
    def _children(self) -> list[tuple[int, ...]]:
        lists: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            lists[parent].append(node)
        return [tuple(nodes) for nodes in lists]

    @cached_property
    def token_list(self) -> list[int]:
        """`tokens` as python ints, for code that walks the tree."""
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def children(self, node: int) -> tuple[int, ...]:
        """Children of a node in the order drawn, or best first."""
        return self._children[node]

    def child_with_token(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        tokens = self.token_list
        return next((child for child in self._children[node] if tokens[child] == token), None)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`, both included; () for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> list[int]:
        """Token ids of `path(node)`: what penalties see besides the committed text."""
        return [self.token_list[step] for step in self.path(node)]

    def ancestor_mask(self) -> Bools:
        """bool [M, M]: mask[i, j] is True where j is i or an ancestor of i. A new array."""
        rows = np.arange(self.num_nodes)
        mask = np.zeros((self.num_nodes, self.num_nodes), np.bool_)
        parents = np.maximum(self.parents, 0)  # the root is its own parent: climbing stops there
        ancestors = rows
        for _ in range(int(self.depths.max()) + 1):
            mask[rows, ancestors] = True
            ancestors = parents[ancestors]
        return mask

    def laid_out(self, root: int, carried: Sequence[int]) -> "Tree":
        """This tree behind `carried`, a chain under `root`, in depth-first order.

        Nodes 1 .. len(carried) are the chain; the tree's own root is its last token (or `root`).
        First children follow their parents at once, so that the likeliest path is nodes 1, 2, 3 ..:
        its keys stand in the cache where plain decoding puts them. Children keep their order.
        """
        base = len(carried)
        tokens, parents, place = [root, *carried], list(range(-1, base)), {0: base}
        stack = list(reversed(self.children(0)))
        while stack:
            node = stack.pop()
            place[node] = len(tokens)
            tokens.append(self.token_list[node])
            parents.append(place[int(self.parents[node])])
            stack.extend(reversed(self.children(node)))
        q = None if self.q is None else {place[node]: each for node, each in self.q.items()}
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int32), q)

    def validate(self) -> None:
        """Assert the invariants above; for tests, since a broken one is our own bug."""
        assert self.tokens.dtype == np.int64 and self.parents.dtype == np.int32
        assert self.tokens.shape == self.parents.shape == (self.num_nodes,)
        assert self.num_nodes >= 1 and self.parents[0] == -1
        for node in range(1, self.num_nodes):
            assert 0 <= self.parents[node] < node, f"node {node} stands before its parent"
        for node in range(self.num_nodes):
            tokens = [self.token_list[child] for child in self.children(node)]
            assert len(set(tokens)) == len(tokens), f"node {node} has duplicate children {tokens}"
        assert all(0 <= node < self.num_nodes for node in self.q or ())


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes that the draft must run next, best first, and how they hang together.

    Each step's F rows follow the rows of the steps before it; R counts all of them, this step
    included. Row numbers start at 0 with the first frontier (the committed rows are not counted).
    """

    depth: int  # of these nodes; 1 = children of the root
    tokens: Int64s  # [F]
    parent_slots: Int64s  # [F] slot of the parent in the frontier before; all 0 (the root) at first
    row_mask: Bools  # [F, R] True where a draft row is the node itself or one of its ancestors


def usable_candidates(ids: Int64s, sums: Float32s) -> Bools:
    """bool [F, K]: finite, and the first of its token among the usable ones of its row."""
    usable: Bools = np.isfinite(sums)
    in_order = np.sort(ids, axis=1)
    if (in_order[:, 1:] == in_order[:, :-1]).any():
        for row, flags in zip(ids.tolist(), usable, strict=True):
            seen: set[int] = set()
            for column, token in enumerate(row):
                flags[column] &= token not in seen
                if flags[column]:
                    seen.add(token)
    return usable


def extended_mask(row_mask: Bools, parent_slots: Int64s) -> Bools:
    """[F', R + F'] mask of a new step: the parents' rows of [F, R], then each node itself."""
    num_new, num_rows = parent_slots.size, row_mask.shape[1]
    extended = np.zeros((num_new, num_rows + num_new), np.bool_)
    extended[:, :num_rows] = row_mask[parent_slots]
    new = np.arange(num_new)
    extended[new, num_rows + new] = True
    return extended
