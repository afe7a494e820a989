"""The two halves of a round, as they are issued and as they are captured.

draft half    draft_tree over the waiting rows -> a tree
target half   place_tree -> target -> accept_greedy -> keep_kv -> feed_draft -> advance

There is one draft half, and one target half per width; each is replayed as one CUDA graph. The
state of a round (lengths, root, waiting rows) is in device memory, so one captured graph serves
every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from eagle3.runtime.gpu.buffers import RESULT_HEAD, DraftBuffers, Staging, TargetBuffers
from eagle3.runtime.gpu.device_engines import DeviceCall, Engines, Shape
from eagle3.runtime.gpu.driver import Driver, Graph
from eagle3.runtime.gpu.kernels import Kernels
from eagle3.runtime.ort.signature import Bound
from eagle3.runtime.ort.target_engine import bound_target

_WARM_UPS = 3  # the arena of ONNX Runtime can still grow in a second call


class Halves:
    """Buffers, contexts and graphs. max_rows: of any call. widths: rows of a verification,
    ascending.
    """

    def __init__(
        self, engines: Engines, driver: Driver, kernels: Kernels, max_rows: int, widths: list[int]
    ) -> None:
        manifest, widest = engines.manifest, widths[-1]
        self.engines, self._driver, self._kernels = engines, driver, kernels
        self.own = TargetBuffers(driver, manifest, max_rows, widest)
        self.staging = Staging(driver, manifest, max_rows, widest, engines.num_nodes)
        self.draft: DraftBuffers | None = None
        if engines.info is not None:
            self.draft = DraftBuffers(driver, manifest, engines.info, engines.draft_rows)
        self._scratch = driver.allocate(engines.scratch_bytes, "the engines' scratch memory")
        self.target_graphs: dict[int, Graph] = {}
        self.draft_graph: Graph | None = None
        self._capture(widths)

    def issue_chunk(self, num_rows: int) -> None:
        """Run the target on a chunk of a prompt: a tree that is a chain of any length."""
        own = self.own
        self._place(num_rows, (own.chunk_ids, own.chain, own.endless, own.endless, own.chunk_ids))
        shapes = _shapes(bound_target(self.engines.manifest), num_rows)
        addresses = own.addresses(own.last_row)
        self.engines.target.loose_call(shapes, addresses, self._scratch).enqueue()

    def issue_draft(self, num_rows: int) -> None:
        """Run the draft half over `num_rows` rows of a prompt."""
        assert self.engines.draft is not None and self.draft is not None
        shapes = _shapes(self.engines.bound_draft(), num_rows)
        addresses = self.draft.addresses()
        call = self.engines.draft.loose_call(shapes, addresses, self._scratch)
        self._draft_half(call, self.draft)

    def feed(self, draft: DraftBuffers, count: int, first: int, capacity: int) -> None:
        """Append `count` chosen rows, from index `first` on, to those that wait for the draft."""
        own = self.own
        features = (own.features, own.feature_words)
        layers = (draft.layers, draft.num_layers, draft.layer_words)
        sources = (*features, *layers, own.input_ids, own.chosen, first)
        where = (draft.num_rows, capacity, draft.features, draft.next_ids)
        self._kernels.launch("feed_draft", *sources, *where, blocks=count)
        self._kernels.launch("count_fed", own.chosen, first, capacity, draft.num_rows, threads=1)

    def advance(self) -> None:
        """Count the chosen rows as committed, and make the chosen token the root."""
        own = self.own
        self._kernels.launch("advance", own.chosen, own.past_len, own.root, threads=1)

    def commit(self, num_rows: int) -> None:
        """Keep the chosen rows, at most `num_rows`, in cache, draft input and lengths."""
        own, cache = self.own, self.own.cache
        sizes = (cache.num_heads, cache.capacity, cache.words)
        where = (cache.table, *sizes, own.past_len, own.chosen)
        self._kernels.launch("keep_kv", *where, blocks=cache.num_blocks)
        if self.draft is not None:
            # The draft half reads no more rows than this, so no more can wait.
            self.feed(self.draft, num_rows, 0, self.engines.round_rows)
        self.advance()

    def clear_behind(self, num_slots: int) -> None:
        """Set the target's next cache slots to zero."""
        own, cache = self.own, self.own.cache
        sizes = (cache.num_heads, cache.capacity, cache.words)
        where = (cache.table, *sizes, own.past_len, num_slots)
        self._kernels.launch("clear_kv", *where, blocks=cache.num_blocks)

    def clear(self) -> None:
        """Set both caches to zero."""
        self.own.cache.clear(self._driver)
        if self.draft is not None:
            self.draft.cache.clear(self._driver)

    def _place(self, width: int, tree: tuple[int, int, int, int, int]) -> None:
        """Place a tree. tree: addresses of tokens, parents, number of nodes, node limit, root."""
        own = self.own
        outputs = (own.input_ids, own.position_ids, own.tree_mask, own.num_used)
        sizes = (own.past_len, own.vocab_size, width)
        self._kernels.launch_rows("place_tree", width, *tree, *sizes, *outputs)

    def _draft_half(self, call: DeviceCall, draft: DraftBuffers) -> None:
        call.enqueue()
        self._kernels.launch("draft_done", draft.past_len, draft.num_rows, threads=1)

    def _target_half(self, call: DeviceCall, width: int) -> None:
        own, draft = self.own, self.draft
        limit, greedy = own.settings, own.settings + 8
        tree = (own.input_ids, own.chain, own.endless)  # only the root of it is used
        if draft is not None:
            tree = (draft.tokens, draft.parents, draft.num_nodes)
        self._place(width, (*tree, limit, own.root))
        call.enqueue()
        seen = (own.input_ids, tree[1], own.position_ids, own.next_token, own.num_used)
        self._kernels.launch("accept_greedy", *seen, greedy, own.chosen, own.result, threads=1)
        self.commit(width)
        rows = min(width, self.engines.round_rows)
        self._driver.download(self.staging.result, own.result, 8 * (RESULT_HEAD + rows))

    def _capture(self, widths: Sequence[int]) -> None:
        """Warm up and capture every graph, then clear what that left in the caches.

        The longest calls of a prompt run first. An engine's own memory then never grows again;
        otherwise it would grow with every longer remainder of a prompt and never shrink.
        """
        own, draft, engines = self.own, self.draft, self.engines
        self.staging.settings_values[:] = (1, 0)
        self._driver.upload(own.settings, self.staging.settings, 16)
        self.issue_chunk(engines.prefill_chunk)
        if draft is not None and engines.draft is not None:
            one = self._driver.allocate_host(8)
            one.view(np.int64)[0] = 1
            upload_one = partial(self._driver.upload, draft.num_rows, one, 8)
            upload_one()
            self.issue_draft(engines.draft_rows)
            shapes = _shapes(engines.bound_draft(), engines.round_rows)
            call = engines.draft.call(shapes, draft.addresses(), self._scratch)
            self.draft_graph = self._captured(
                call,
                partial(self._draft_half, call, draft),
                upload_one,
            )
        addresses = own.addresses(own.rows)
        for width in widths:
            shapes = _shapes(bound_target(engines.manifest), width, width)
            verify = engines.target.call(shapes, addresses, self._scratch)
            issue = partial(self._target_half, verify, width)
            self.target_graphs[width] = self._captured(verify, issue)
        self.clear()
        self._driver.synchronize()

    def _captured(
        self, call: DeviceCall, issue: Callable[[], Any], prepare: Callable[[], Any] = lambda: None
    ) -> Graph:
        """Issue warm-up calls, which do the setup that is not allowed in a capture,
        then capture.
        """
        for _ in range(_WARM_UPS):
            prepare()
            issue()
            self._driver.synchronize()
        call.check_capturable()
        with self._driver.capture() as graphs:
            issue()
        return graphs[0]


def _shapes(bound: Bound, num_rows: int, num_logit_rows: int = 1) -> dict[str, Shape]:
    """Return the shapes of a call's inputs: N rows, M of them with logits, one sequence."""
    sizes = {"B": 1, "N": num_rows, "M": num_logit_rows}
    return {
        spec.name: tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
        for spec in bound.inputs
    }
