"""All device and pinned memory of a bundle, allocated once and never moved.

Letters: N rows of a call, W rows of a verification, M nodes of the draft's tree (root included), S
cache slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eagle3.plans.plan import ITEM_BYTES
from eagle3.runtime.bundle.manifest import DraftInfo, Manifest
from eagle3.runtime.errors import BundleError
from eagle3.runtime.gpu.driver import DeviceBuffer, Driver, HostBuffer

_ENDLESS = 1 << 62
RESULT_HEAD = 5
"""int64 entries of a round's result before the tokens of the kept rows (kernels.cu)"""


class DeviceCache:
    """Keys and values of one engine: a block [Hkv, S, D] per layer and kind, and a table of their
    addresses.
    """

    def __init__(
        self,
        driver: Driver,
        what: str,
        num_layers: int,
        shape: tuple[int, int, int],
        item_bytes: int,
    ) -> None:
        self.num_heads, self.capacity, head_dim = shape
        self.words = _words(f"a row of {what}", head_dim, item_bytes)
        num_bytes = self.num_heads * self.capacity * self.words * 4
        names = [f"{kind}.{layer}" for layer in range(num_layers) for kind in "kv"]
        self.blocks = {name: driver.allocate(num_bytes, what) for name in names}
        self.table = upload_once(driver, [block.address for block in self.blocks.values()])

    @property
    def num_blocks(self) -> int:
        """Number of CUDA blocks of a kernel that runs over all heads of all blocks."""
        return len(self.blocks) * self.num_heads

    def addresses(self) -> Iterator[tuple[str, int]]:
        """Yield past_* and present_*, which name the same memory."""
        for name, block in self.blocks.items():
            yield f"past_{name}", block.address
            yield f"present_{name}", block.address

    def clear(self, driver: Driver) -> None:
        """Set the cache to zero."""
        for block in self.blocks.values():
            driver.fill_zero(block.address, block.num_bytes)


class TargetBuffers:
    """The target's inputs and outputs, and the state of a round.

    max_rows: maximum rows of any call. max_width: maximum rows of a verification.
    """

    def __init__(self, driver: Driver, manifest: Manifest, max_rows: int, max_width: int) -> None:
        plan, info = manifest.plan, manifest.target
        item = ITEM_BYTES[plan.dtype]

        def ints(count: int) -> int:
            return driver.allocate(8 * count, "a buffer of integers").address

        self.vocab_size = info.vocab_size
        self.feature_words = _words("a row of features", info.feature_size, item)
        self.input_ids, self.position_ids = ints(max_rows), ints(max_rows)
        self.tree_mask = driver.allocate(max_rows * max_rows, "the tree mask").address
        self.past_len, self.root, self.num_used = ints(1), ints(1), ints(1)
        self.next_token = ints(max_width)
        self.logits = driver.allocate(max_width * self.vocab_size * 4, "the logits").address
        features = max_rows * info.feature_size * item
        self.features = driver.allocate(features, "the features").address
        shape = (info.num_kv_heads, plan.cache_capacity, info.head_dim)
        self.cache = DeviceCache(driver, "the target's cache", info.num_layers, shape, item)
        # Written by the host: settings [node limit, greedy], chosen [count, token, rows ...].
        self.settings, self.chosen = ints(2), ints(2 + max_rows)
        self.result, self.chunk_ids, self.last_row = (
            ints(RESULT_HEAD + max_width),
            ints(max_rows),
            ints(1),
        )
        # Constants.
        self.rows = upload_once(driver, range(max_rows))
        self.chain = upload_once(driver, range(-1, max_rows - 1))
        self.endless = upload_once(driver, [_ENDLESS])

    def addresses(self, logit_rows: int) -> dict[str, int]:
        """Return the addresses of every input and output of the target's engine. logit_rows: the
        address of that input.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "tree_mask": self.tree_mask,
            "past_len": self.past_len,
            "logit_rows": logit_rows,
            "next_token": self.next_token,
            "logits": self.logits,
            "features": self.features,
            **dict(self.cache.addresses()),
        }


class DraftBuffers:
    """The inputs and outputs of `draft_tree`. max_rows: maximum rows of one call.

    Of a row of the target's features the head reads `num_layers` layers of `layer_words` words
    each, selected by the table `layers`.
    """

    def __init__(self, driver: Driver, manifest: Manifest, info: DraftInfo, max_rows: int) -> None:
        plan, num_nodes = manifest.plan, info.tree.num_draft_tokens + 1
        item = ITEM_BYTES[plan.dtype]

        def ints(count: int) -> int:
            return driver.allocate(8 * count, "a buffer of integers").address

        target = manifest.target
        self.layer_words = _words("a layer's features", target.hidden_size, item)
        self.num_layers = len(info.aux_layer_ids)
        layers = [target.aux_layer_ids.index(layer) for layer in info.aux_layer_ids]
        self.layers = upload_once(driver, layers)
        features = max_rows * self.num_layers * self.layer_words * 4
        self.features = driver.allocate(features, "the draft's features").address
        self.next_ids, self.num_rows, self.past_len = ints(max_rows), ints(1), ints(1)
        self.tokens, self.parents, self.positions = (ints(num_nodes) for _ in range(3))
        self.tree_mask = driver.allocate(num_nodes * num_nodes, "the draft's mask").address
        self.num_nodes = ints(1)
        shape = (info.num_kv_heads, plan.draft_capacity, info.head_dim)
        self.cache = DeviceCache(driver, "the draft's cache", 1, shape, item)

    def addresses(self) -> dict[str, int]:
        """Return the addresses of every input and output of `draft_tree`."""
        names = ("features", "next_ids", "num_rows", "past_len", "tokens", "parents", "positions")
        own = {name: getattr(self, name) for name in (*names, "tree_mask", "num_nodes")}
        return {**own, **dict(self.cache.addresses())}


class Staging:
    """Pinned host memory. Values written here are uploaded before the next `synchronize` and must
    not be overwritten until then.
    """

    def __init__(
        self, driver: Driver, manifest: Manifest, max_rows: int, max_width: int, num_nodes: int
    ) -> None:
        def ints(count: int) -> tuple[HostBuffer, Any]:
            buffer = driver.allocate_host(8 * count)
            return buffer, buffer.view(np.int64)

        self.prompt, self.prompt_ids = ints(manifest.plan.max_seq_len)
        self.settings, self.settings_values = ints(2)
        self.chosen, self.chosen_values = ints(2 + max_rows)
        self.last_row, self.last_row_value = ints(1)
        self.result, self.result_values = ints(RESULT_HEAD + max_width)
        self.next_token, self.next_token_values = ints(max_width)
        self.tree_tokens, self.tree_tokens_values = ints(max_width)
        self.tree_parents, self.tree_parents_values = ints(max(num_nodes, 1))
        self.logits = driver.allocate_host(4 * manifest.target.vocab_size)
        self.logits_row = self.logits.view(np.float32)


def _words(what: str, num_values: int, item_bytes: int) -> int:
    """Return the size of a row in 4-byte words, the unit that the kernels move."""
    if num_values * item_bytes % 4:
        raise BundleError(
            f"{what} has {num_values} values of {item_bytes} bytes, not a whole number of 4-byte"
            " words, which the kernels move: export with --dtype float32"
        )
    return num_values * item_bytes // 4


def upload_once(driver: Driver, values: Sequence[int]) -> int:
    """Upload constant int64 values and return their address."""
    array = np.array(values, np.int64)
    target: DeviceBuffer = driver.allocate(array.nbytes, "a table")
    source = driver.allocate_host(array.nbytes)
    source.view(np.int64)[:] = array
    driver.upload(target.address, source, array.nbytes)
    return target.address
