"""The draft tree of a round, and helpers that the tree builders share.

A drafter returns a `Tree` (docs/method.md, sections 1 and 3), the target verifies its nodes in one
call, and `accept.py` walks it. This module does not depend on any engine.

Letters: M nodes (root included), K top-k, F frontier nodes, R draft rows so far, V target
vocabulary.
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
    """Draft tokens under a root. A parent always precedes its children.

    tokens: int64 [M], target vocabulary; tokens[0] is the root, the last committed token.
    parents: int32 [M], node index of the parent; parents[0] is -1.
    q: maps a node whose children were *sampled* to the float32 [V] distribution from which they
    were drawn, without replacement and in node order. The children of a node that is not in `q` are
    deterministic candidates.
    """

    tokens: Int64s
    parents: Int32s
    q: Mapping[int, Float32s] | None = None

    @classmethod
    def root_only(cls, token: int) -> "Tree":
        """Return a tree without draft tokens. Verifying it is one step of plain decoding."""
        return cls(np.array([token], np.int64), np.array([-1], np.int32))

    @classmethod
    def chain(
        cls, root_token: int, draft_tokens: Sequence[int], q: Mapping[int, Float32s] | None = None
    ) -> "Tree":
        """Return a chain (K = 1) under `root_token`.

        Node i is the i-th draft token and the only child of node i - 1.
        """
        tokens = np.array([root_token, *draft_tokens], np.int64)
        return cls(tokens, np.arange(-1, tokens.size - 1, dtype=np.int32), q)

    @property
    def num_nodes(self) -> int:
        """M: number of nodes, including the root."""
        return self.tokens.size

    @property
    def num_draft_tokens(self) -> int:
        """M - 1: number of nodes without the root."""
        return self.tokens.size - 1

    @cached_property
    def depths(self) -> Int32s:
        """Depth of every node, int32 [M]; the root has depth 0.

        The position of a node is the position of the root plus its depth.
        """
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
        """`tokens` as Python ints, for code that walks the tree."""
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of `node`, in the order drawn if sampled, otherwise best first."""
        return self._children[node]

    def child_with_token(self, node: int, token: int) -> int | None:
        """Return the child of `node` whose token is `token`, or None."""
        tokens = self.token_list
        return next((child for child in self._children[node] if tokens[child] == token), None)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`, both included; () for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> list[int]:
        """Return the token ids of `path(node)`; penalties count them with the committed text."""
        return [self.token_list[step] for step in self.path(node)]

    def ancestor_mask(self) -> Bools:
        """Return the attention mask of the tree as a new array, bool [M, M].

        mask[i, j] is True if j is i or an ancestor of i.
        """
        rows = np.arange(self.num_nodes)
        mask = np.zeros((self.num_nodes, self.num_nodes), np.bool_)
        parents = np.maximum(self.parents, 0)  # the root is its own parent: ends the climb
        ancestors = rows
        for _ in range(int(self.depths.max()) + 1):
            mask[rows, ancestors] = True
            ancestors = parents[ancestors]
        return mask

    def laid_out(self, root: int, carried: Sequence[int]) -> "Tree":
        """Return a tree that starts with the chain `carried` and continues with this tree.

        `root` is the new root and nodes 1 .. len(carried) are the chain. The last token of the
        chain (or `root` if `carried` is empty) takes the place of this tree's root. The nodes are
        in depth-first order: a first child directly follows its parent, so the likeliest path
        has nodes 1, 2, 3, ... and its keys are in the cache slots where plain decoding would
        write them. Siblings keep their order.
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
        """Assert the invariants of the class. For tests: a violation is a bug in a builder."""
        assert self.tokens.dtype == np.int64 and self.parents.dtype == np.int32
        assert self.tokens.shape == self.parents.shape == (self.num_nodes,)
        assert self.num_nodes >= 1 and self.parents[0] == -1
        for node in range(1, self.num_nodes):
            assert 0 <= self.parents[node] < node, f"node {node} precedes its parent"
        for node in range(self.num_nodes):
            tokens = [self.token_list[child] for child in self.children(node)]
            assert len(set(tokens)) == len(tokens), f"node {node} has duplicate children {tokens}"
        assert all(0 <= node < self.num_nodes for node in self.q or ())


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes that the draft must run next, with their parents and their attention mask.

    The order is best first in a dynamic tree and the order of the paths in a static one. The F
    draft rows of a step follow the rows of all earlier steps; R counts all of them, including this
    step. Rows are numbered from 0, starting with the first frontier (committed rows are not
    counted).
    """

    depth: int  # depth of these nodes; 1 = children of the root
    tokens: Int64s  # [F]
    parent_slots: Int64s  # [F] the parent's index in the previous frontier; 0 (the root) at first
    row_mask: Bools  # [F, R] True if a draft row is the node itself or one of its ancestors


def usable_candidates(ids: Int64s, sums: Float32s) -> Bools:
    """Return which of the candidates [F, K] may be proposed, bool [F, K].

    ids: candidate tokens [F, K]. sums: their log-probabilities, of the token or of its path.
    A candidate is usable if its sum is finite and no usable candidate before it in the same row has
    the same token.
    """
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
    """Return the row mask of the next step, bool [F', R + F'].

    row_mask: mask [F, R] of the previous step. parent_slots [F']: row of each new node's parent in
    it. A new node attends to the rows that its parent attends to, and to itself.
    """
    num_new, num_rows = parent_slots.size, row_mask.shape[1]
    extended = np.zeros((num_new, num_rows + num_new), np.bool_)
    extended[:, :num_rows] = row_mask[parent_slots]
    new = np.arange(num_new)
    extended[new, num_rows + new] = True
    return extended
