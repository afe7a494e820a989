"""The kernels and the driver alone on a GPU: captured rounds over random trees, against Python.

`gpu_check.py` runs this first, because it needs neither TensorRT nor a model, only cuda-bindings
and NVRTC, or a cubin compiled elsewhere (`--cubin`). Trees and the target's choices are random.
What a round must leave in caches, draft rows and lengths is computed with the runtime's own
`accept`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.acceptance.accept import accept_by_token
from eagle3.runtime.gpu.driver import DeviceBuffer, Driver
from eagle3.runtime.gpu.kernels import Kernels
from eagle3.runtime.trees.tree import Tree

WIDTH, VOCAB, HEADS, SLOTS, WORDS, LAYERS, FEATURES = 60, 11, 4, 512, 32, 6, 48
ROOM = 128  # rows that can wait for the draft
FUSED, LAYER_WORDS = (2, 0), 12  # the layers of a row of features that the draft reads
DRAFT_FEATURES = len(FUSED) * LAYER_WORDS


@dataclass
class Mirror:
    """The expected content of the device, computed on the host."""

    caches: NDArray[np.uint32]  # [2 * LAYERS, HEADS, SLOTS, WORDS]
    past: int = 0
    root: int = 3
    waiting: int = 0


class KernelCheck:
    """One captured round without a model. `run` replays it over random trees."""

    def __init__(self, driver: Driver, image: bytes, seed: int = 0) -> None:
        self.driver, self._rng = driver, np.random.default_rng(seed)
        self._kernels = Kernels(driver, image)
        self._device: dict[str, DeviceBuffer] = {}
        self._host: dict[str, Any] = {}
        for name, count in (
            ("tokens", WIDTH),
            ("parents", WIDTH),
            ("next_token", WIDTH),
            *((name, 1) for name in ("num_nodes", "past_len", "root", "num_used", "draft_rows")),
            ("settings", 2),
            ("input_ids", WIDTH),
            ("position_ids", WIDTH),
            ("chosen", WIDTH + 2),
            ("result", WIDTH + 5),
            ("table", 2 * LAYERS),
            ("draft_next_ids", ROOM),
            ("layers", len(FUSED)),
        ):
            self._make(name, count, np.int64)
        self._make("tree_mask", WIDTH * WIDTH, np.uint8)
        self._make("features", WIDTH * FEATURES, np.uint32)
        self._make("draft_features", ROOM * DRAFT_FEATURES, np.uint32)
        self._make("cache", HEADS * SLOTS * WORDS, np.uint32)  # the host side of any cache
        size = 4 * HEADS * SLOTS * WORDS
        self._caches = [driver.allocate(size, "a cache") for _ in range(2 * LAYERS)]
        shape = (2 * LAYERS, HEADS, SLOTS, WORDS)
        self.mirror = Mirror(self._rng.integers(0, 1 << 32, shape).astype(np.uint32))
        self._fill()
        self._issue()  # the first launch of a kernel loads it, which is not allowed in a capture
        driver.synchronize()
        with driver.capture() as graphs:
            self._issue()
            self._get("result")
        self._graph = graphs[0]

    def run(self, num_rounds: int) -> int:
        """Replay rounds and return the number of accepted draft tokens.

        Raises AssertionError if the device differs.
        """
        accepted = sum(self._round() for _ in range(num_rounds))
        for index, cache in enumerate(self._caches):
            self.driver.download(self._buffer("cache"), cache.address, cache.num_bytes)
            self.driver.synchronize()
            found = self._host["cache"].reshape(HEADS, SLOTS, WORDS)
            # Rows after the text are garbage, on the device and here alike.
            kept = slice(0, self.mirror.past)
            np.testing.assert_array_equal(found[:, kept], self.mirror.caches[index][:, kept])
        return accepted

    def _round(self) -> int:
        """Replay one round over a tree and a target that sometimes agrees with it."""
        own, rng = self.mirror, self._rng
        if own.past + WIDTH > SLOTS or own.waiting + WIDTH > ROOM:
            own.waiting = 0
            own.past = own.past if own.past + WIDTH <= SLOTS else 0
            self._put("draft_rows", [own.waiting])
            self._put("past_len", [own.past])
        tree = self._random_tree(int(rng.integers(1, WIDTH + 1)))
        next_token = rng.integers(0, VOCAB, WIDTH)
        for node in range(tree.num_nodes):
            if tree.children(node) and rng.random() < 0.8:
                next_token[node] = tree.token_list[int(rng.choice(tree.children(node)))]
        features = rng.integers(0, 1 << 32, (WIDTH, FEATURES)).astype(np.uint32)
        self._put("tokens", tree.tokens)
        self._put("parents", tree.parents)
        self._put("num_nodes", [tree.num_nodes])
        self._put("next_token", next_token)
        self._put("features", features.ravel())
        before = self.driver.counters.copy()
        self._graph.replay()
        self.driver.synchronize()
        cost = self.driver.counters.since(before)
        assert (cost.replays, cost.synchronizations) == (1, 1)
        expected = accept_by_token(tree, lambda node: int(next_token[node]))
        self._compare(tree, (0, *expected.path), expected.token, features)
        return len(expected.path)

    def _compare(self, tree: Tree, rows: tuple[int, ...], token: int, features: Any) -> None:
        own, count = self.mirror, len(rows)
        depth = int(tree.depths.max())
        found = self._host["result"]
        assert found[:5].tolist() == [0, count, token, depth, tree.num_nodes], found[:5]
        np.testing.assert_array_equal(found[5 : 5 + count], tree.tokens[list(rows)])
        for name in ("tree_mask", "position_ids", "draft_features", "draft_next_ids"):
            self._get(name)
        self.driver.synchronize()
        size = tree.num_nodes
        mask = self._host["tree_mask"].reshape(WIDTH, WIDTH)
        np.testing.assert_array_equal(mask[:size, :size], tree.ancestor_mask())
        np.testing.assert_array_equal(mask[size:], np.eye(WIDTH, dtype=np.uint8)[size:])
        positions = self._host["position_ids"][:size]
        np.testing.assert_array_equal(positions, own.past + tree.depths)
        fed = slice(own.waiting, own.waiting + count)
        draft_features = self._host["draft_features"].reshape(ROOM, len(FUSED), LAYER_WORDS)
        read = features[list(rows)].reshape(count, -1, LAYER_WORDS)[:, list(FUSED)]
        np.testing.assert_array_equal(draft_features[fed], read)
        following = [*tree.tokens[list(rows[1:])], token]
        np.testing.assert_array_equal(self._host["draft_next_ids"][fed], following)
        slots = own.past + np.array(rows)
        own.caches[:, :, own.past : own.past + count] = own.caches[:, :, slots].copy()
        own.past, own.root, own.waiting = own.past + count, token, own.waiting + count

    def _random_tree(self, size: int) -> Tree:
        tokens, parents = [self.mirror.root], [-1]
        while len(tokens) < size:
            parent = int(self._rng.integers(max(0, len(tokens) - 6), len(tokens)))
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            token = int(self._rng.integers(VOCAB))
            if token not in siblings:
                tokens.append(token)
                parents.append(parent)
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))

    def _issue(self) -> None:
        """Issue the target half of a round, without the target."""
        at = {name: buffer.address for name, buffer in self._device.items()}
        launch = self._kernels.launch
        tree = (at["tokens"], at["parents"], at["num_nodes"], at["settings"], at["root"])
        placed = (at["input_ids"], at["position_ids"], at["tree_mask"], at["num_used"])
        sizes = (at["past_len"], VOCAB, WIDTH)
        self._kernels.launch_rows("place_tree", WIDTH, *tree, *sizes, *placed)
        seen = (at["input_ids"], at["parents"], at["position_ids"], at["next_token"])
        said = (at["num_used"], at["settings"] + 8, at["chosen"], at["result"])
        launch("accept_greedy", *seen, *said, threads=1)
        where = (at["table"], HEADS, SLOTS, WORDS, at["past_len"], at["chosen"])
        launch("keep_kv", *where, blocks=2 * LAYERS * HEADS)
        layers = (at["layers"], len(FUSED), LAYER_WORDS)
        sources = (at["features"], FEATURES, *layers, at["input_ids"], at["chosen"], 0)
        targets = (at["draft_rows"], ROOM, at["draft_features"], at["draft_next_ids"])
        launch("feed_draft", *sources, *targets, blocks=WIDTH)
        launch("count_fed", at["chosen"], 0, ROOM, at["draft_rows"], threads=1)
        launch("advance", at["chosen"], at["past_len"], at["root"], threads=1)

    def _fill(self) -> None:
        """Fill everything that the first round reads. The warm-up accepts nothing."""
        for cache, values in zip(self._caches, self.mirror.caches, strict=True):
            self._host["cache"][:] = values.ravel()
            self.driver.upload(cache.address, self._buffer("cache"), cache.num_bytes)
            self.driver.synchronize()
        self._put("table", [cache.address for cache in self._caches])
        self._put("layers", FUSED)
        self._put("root", [self.mirror.root])
        self._put("settings", [WIDTH, 0])
        self._issue()
        self.driver.synchronize()
        self._put("settings", [WIDTH, 1])
        self._put("next_token", np.full(WIDTH, -1))  # NaN logits: nothing is kept
        self.driver.synchronize()

    def _make(self, name: str, count: int, dtype: Any) -> None:
        num_bytes = count * np.dtype(dtype).itemsize
        self._device[name] = self.driver.allocate(num_bytes, name)
        pinned = self.driver.allocate_host(num_bytes)
        self._host[f"{name} pinned"], self._host[name] = pinned, pinned.view(dtype)

    def _buffer(self, name: str) -> Any:
        return self._host[f"{name} pinned"]

    def _put(self, name: str, values: Any) -> None:
        """Upload values. A wait must precede the next `_put` of the same name."""
        self._host[name][: len(values)] = values
        num_bytes = len(values) * self._host[name].itemsize
        self.driver.upload(self._device[name].address, self._buffer(name), num_bytes)

    def _get(self, name: str) -> None:
        device = self._device[name]
        self.driver.download(self._buffer(name), device.address, device.num_bytes)
