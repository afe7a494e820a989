"""The kernels of kernels.cu in numpy, over the stand-in's memory: same names, same arguments."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    def view(self, address: int, dtype: Any, count: int) -> NDArray[Any]:
        """`count` elements at an address; refused unless they lie in one live allocation."""


Ints = NDArray[np.int64]


class NumpyKernels:
    """Every kernel as a method: blocks, then the kernel's own arguments."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def _ints(self, address: int, count: int = 1) -> Ints:
        return self._memory.view(address, np.int64, count)

    def place_tree(
        self,
        blocks: int,
        tokens: int,
        parents: int,
        num_nodes: int,
        node_limit: int,
        root: int,
        past_len: int,
        vocab_size: int,
        width: int,
        input_ids: int,
        position_ids: int,
        tree_mask: int,
        num_used: int,
    ) -> None:
        used = max(min(self._ints(num_nodes)[0], self._ints(node_limit)[0], width), 1)
        found = self._ints(tokens, used).copy()
        bad = np.flatnonzero((found[1:] < 0) | (found[1:] >= vocab_size))
        used = int(bad[0]) + 1 if bad.size else int(used)
        above = self._ints(parents, used)
        mask = np.eye(width, dtype=np.uint8)
        for node in range(1, used):
            mask[node] |= mask[above[node]]
        ids = np.zeros(width, np.int64)
        ids[:used] = found[:used]
        ids[0] = self._ints(root)[0]
        self._ints(input_ids, width)[:] = ids
        self._ints(position_ids, width)[:] = self._ints(past_len)[0] + mask.sum(1) - 1
        self._memory.view(tree_mask, np.uint8, width * width)[:] = mask.ravel()
        self._ints(num_used)[0] = used

    def accept_greedy(
        self,
        blocks: int,
        input_ids: int,
        parents: int,
        position_ids: int,
        next_token: int,
        num_used: int,
        greedy: int,
        chosen: int,
        result: int,
    ) -> None:
        used = int(self._ints(num_used)[0])
        ids, above, after, positions = (
            self._ints(address, used) for address in (input_ids, parents, next_token, position_ids)
        )
        spoiled = bool((after < 0).any())
        path: list[int] = []
        if self._ints(greedy)[0] and not spoiled:
            path = [0]
            while True:
                below = (
                    (above == path[-1]) & (ids == after[path[-1]]) & (np.arange(used) > path[-1])
                )
                if not below.any():
                    break
                path.append(int(below.argmax()))
        token = after[path[-1]] if path else -1
        depth = int((positions - positions[0]).max())
        head = [int(spoiled), len(path), int(token), depth, used]
        self._ints(chosen, 2 + len(path))[:] = [len(path), token, *path]
        self._ints(result, 5 + len(path))[:] = [*head, *ids[path].tolist()]

    def _blocks(
        self, caches: int, num_heads: int, capacity: int, words: int, blocks: int
    ) -> list[NDArray[np.uint32]]:
        """The first caches of the table, uint32 [Hkv, S, words] each."""
        assert blocks % num_heads == 0
        size = num_heads * capacity * words
        return [
            self._memory.view(int(address), np.uint32, size).reshape(num_heads, capacity, words)
            for address in self._ints(caches, blocks // num_heads)
        ]

    def keep_kv(
        self,
        blocks: int,
        caches: int,
        num_heads: int,
        capacity: int,
        words: int,
        past_len: int,
        chosen: int,
    ) -> None:
        past, count = int(self._ints(past_len)[0]), int(self._ints(chosen)[0])
        path = self._ints(chosen, 2 + count)[2:]
        for cache in self._blocks(caches, num_heads, capacity, words, blocks):
            cache[:, past : past + count] = cache[:, past + path].copy()

    def clear_kv(
        self,
        blocks: int,
        caches: int,
        num_heads: int,
        capacity: int,
        words: int,
        past_len: int,
        count: int,
    ) -> None:
        past = int(self._ints(past_len)[0])
        for cache in self._blocks(caches, num_heads, capacity, words, blocks):
            cache[:, past : past + count] = 0

    def feed_draft(
        self,
        blocks: int,
        features: int,
        words: int,
        layers: int,
        num_layers: int,
        layer_words: int,
        input_ids: int,
        chosen: int,
        first: int,
        draft_rows: int,
        capacity: int,
        draft_features: int,
        draft_next_ids: int,
    ) -> None:
        count, token = self._ints(chosen, 2)
        path = self._ints(chosen, 2 + count)[2:]
        start = int(self._ints(draft_rows)[0])
        rows = range(first, min(int(count), first + blocks))
        for to, row in zip(range(start, capacity), rows, strict=False):
            source = self._memory.view(features + 4 * words * int(path[row]), np.uint32, words)
            size = num_layers * layer_words
            target = self._memory.view(draft_features + 4 * size * to, np.uint32, size)
            for at, layer in enumerate(self._ints(layers, num_layers)):
                own = source[layer * layer_words : (layer + 1) * layer_words]
                target[at * layer_words : (at + 1) * layer_words] = own
            following = input_ids + 8 * int(path[row + 1]) if row + 1 < count else None
            next_id = token if following is None else self._ints(following)[0]
            self._ints(draft_next_ids + 8 * to)[0] = next_id

    def advance(self, blocks: int, chosen: int, past_len: int, root: int) -> None:
        count, token = self._ints(chosen, 2)
        if count:
            self._ints(past_len)[0] += count
            self._ints(root)[0] = token

    def count_fed(
        self, blocks: int, chosen: int, first: int, capacity: int, draft_rows: int
    ) -> None:
        rows = self._ints(draft_rows)
        rows[0] += max(min(self._ints(chosen)[0] - first, capacity - rows[0]), 0)

    def draft_done(self, blocks: int, draft_past_len: int, draft_rows: int) -> None:
        self._ints(draft_past_len)[0] += self._ints(draft_rows)[0]
        self._ints(draft_rows)[0] = 0
