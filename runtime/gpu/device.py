"""A bundle on the GPU, as `device_rounds.py` uses it: a prompt in chunks, then halves of rounds.

Everything is issued on one stream and runs in order. A method that returns numbers waits for them
and says so. The host writes pinned memory only after a wait, because pending uploads still read
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.backends import widths_up_to
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import PlanError
from eagle3.runtime.gpu.device_engines import TARGET, Engines
from eagle3.runtime.gpu.driver import Driver
from eagle3.runtime.gpu.halves import Halves
from eagle3.runtime.gpu.kernels import Kernels
from eagle3.runtime.stats import Clock

Int64s = NDArray[np.int64]


def graph_widths(widths: Sequence[int], num_nodes: int) -> list[int]:
    """Return the rows of a verification that get a graph, ascending: 1, and those of `widths` up
    to the first that holds the draft's largest tree.
    """
    needed = [width for width in widths if width < num_nodes]
    return sorted({1, *needed, *[width for width in widths if width >= num_nodes][:1]})


class Device:
    """Batch 1. Everything is allocated and captured here, so that a round allocates nothing.

    widths: rows that a verification is padded to; by default those that the plan files were built
    for, otherwise the plan's (`Plan.verify_widths`). Raises DeviceError if the GPU has too little
    memory, and EngineError if an engine cannot be captured.
    """

    def __init__(
        self,
        engines: Engines,
        driver: Driver,
        kernels: Kernels,
        clock: Clock,
        widths: Sequence[int] | None = None,
    ) -> None:
        plan = engines.manifest.plan
        self.driver, self.clock, self._engines = driver, clock, engines
        self.num_nodes, self.round_rows = engines.num_nodes, engines.round_rows
        asked = widths or engines.verify_widths or plan.resolved().verify_widths
        self.widths = graph_widths(asked or widths_up_to(self.num_nodes), self.num_nodes)
        self.capacity, self.num_slots = plan.max_seq_len, plan.cache_capacity
        self.prefill_chunk = engines.prefill_chunk
        max_rows = max(self.prefill_chunk, self.widths[-1])
        self._halves = Halves(engines, driver, kernels, max_rows, self.widths)

    @property
    def drafts(self) -> bool:
        """Whether a draft can grow trees here."""
        return self._halves.draft is not None

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of drafters that a request can select, the default first."""
        own = self._engines.drafter
        return ("none",) if own is None else (own, "none")

    def check_tree(self, tree: TreePlan) -> None:
        """Raise PlanError for a tree that the compiled growth cannot produce. Its shape is fixed,
        and a request can only ask for fewer of its nodes.
        """
        assert self._engines.info is not None
        own = self._engines.info.tree
        if tree.static is not None:
            raise PlanError(
                "the tree is static, but on the GPU the draft grows the dynamic trees that it was"
                " compiled for: leave it out, or load the bundle with device 'cpu'"
            )
        for name in ("draft_top_k", "draft_depth"):
            asked, built = getattr(tree, name), getattr(own, name)
            if asked != built:
                raise PlanError(
                    f"{name} is {asked}, but the draft was compiled for {built} and on the GPU only"
                    f" num_draft_tokens may be lowered: leave it out, or export with {name} {asked}"
                )
        if tree.num_draft_tokens > own.num_draft_tokens:
            raise PlanError(
                f"num_draft_tokens is {tree.num_draft_tokens}, but the draft was compiled for trees"
                f" of {own.num_draft_tokens}: ask for at most that, or export with a larger tree"
            )

    # Prompt.

    def start(self, prompt: Int64s) -> None:
        """Wait for the previous request, discard its sequence, and keep the prompt's ids [P] for
        `run_chunk`.
        """
        self.driver.synchronize()
        self._halves.staging.prompt_ids[: len(prompt)] = prompt
        self.driver.fill_zero(self._halves.own.past_len, 8)
        draft = self._halves.draft
        if draft is not None:
            # NaN left there by a broken head would reach the next request: 0 times NaN is NaN.
            draft.cache.clear(self.driver)
            self.driver.fill_zero(draft.past_len, 8)
            self.driver.fill_zero(draft.num_rows, 8)

    def run_chunk(self, start: int, num_rows: int) -> None:
        """Run ids start .. start + num_rows - 1 of the prompt. Only the last row gets logits."""
        own, staging = self._halves.own, self._halves.staging
        staging.last_row_value[0] = num_rows - 1
        self.driver.upload(own.chunk_ids, staging.prompt, 8 * num_rows, 8 * start)
        self.driver.upload(own.last_row, staging.last_row, 8)
        self._halves.issue_chunk(num_rows)
        self._count(TARGET)

    def keep_chunk(self, num_rows: int, token: int, drafts: bool) -> None:
        """Commit a chunk whose next token is `token`. drafts: also run the draft on it, so that a
        tree under that token is ready.
        """
        self._choose(range(num_rows), token)
        halves, engine = self._halves, self._engines.draft
        if drafts and halves.draft is not None and engine is not None:
            most = self._engines.draft_rows
            for first in range(0, num_rows, most):
                count = min(most, num_rows - first)
                halves.feed(halves.draft, count, first, most)
                halves.issue_draft(count)
                self._count(engine.name)
        halves.advance()

    def first_token(self) -> int:
        """Wait for the argmax of a chunk's last row and return it; -1 if its logits are NaN."""
        staging = self._halves.staging
        self.driver.download(staging.next_token, self._halves.own.next_token, 8)
        self.wait()
        return int(staging.next_token_values[0])

    # Round.

    def grow(self) -> None:
        """Run the draft on the waiting rows: they join its cache, and a new tree is ready."""
        assert self._halves.draft_graph is not None and self._engines.draft is not None
        self._halves.draft_graph.replay()
        self._count(self._engines.draft.name)

    def set_round(self, node_limit: int, greedy: bool) -> None:
        """Set the number of tree nodes to run, root included, and whether the device accepts
        greedily.
        """
        staging = self._halves.staging
        staging.settings_values[:] = (node_limit, greedy)
        self.driver.upload(self._halves.own.settings, staging.settings, 16)

    def verify(self, width: int) -> None:
        """Run the first `width` nodes of the tree and, if greedy, the acceptance and
        what follows.
        """
        self._halves.target_graphs[width].replay()
        self._count(TARGET)

    def wait(self) -> Int64s:
        """Wait, once per round, and return the result of the target half (kernels.cu)."""
        self.driver.synchronize()
        result: Int64s = self._halves.staging.result_values
        return result

    def fetch_tree(self, width: int) -> None:
        """Request the data that `tree` returns after the next `wait`."""
        own, staging, draft = self._halves.own, self._halves.staging, self._halves.draft
        self.driver.download(staging.tree_tokens, own.input_ids, 8 * width)
        self.driver.download(staging.next_token, own.next_token, 8 * width)
        if draft is not None:
            num_nodes = min(width, self.num_nodes)  # the rest of the call is padding
            self.driver.download(staging.tree_parents, draft.parents, 8 * num_nodes)

    def tree(self, num_nodes: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return tokens, parents and the target's argmax of the first nodes, int64 [num_nodes]
        each.
        """
        staging = self._halves.staging
        parents = staging.tree_parents_values[:num_nodes].copy()
        parents[0] = -1
        return (
            staging.tree_tokens_values[:num_nodes].copy(),
            parents,
            staging.next_token_values[:num_nodes].copy(),
        )

    def logits(self, row: int) -> NDArray[np.float32]:
        """Return one row of logits, float32 [V]. Copies V floats and synchronizes."""
        own, staging = self._halves.own, self._halves.staging
        num_bytes = 4 * own.vocab_size
        self.driver.download(staging.logits, own.logits + row * num_bytes, num_bytes)
        self.driver.synchronize()
        row_logits: NDArray[np.float32] = staging.logits_row.copy()
        return row_logits

    def keep(self, path: Sequence[int], token: int) -> None:
        """Commit the root, `path` of the last verification, chosen by the host, and `token`."""
        self._choose((0, *path), token)
        self._halves.commit(len(path) + 1)

    def clear_behind(self, num_slots: int) -> None:
        """Set the target's next cache slots to zero, because they may contain NaN."""
        self._halves.clear_behind(num_slots)

    def clear(self) -> None:
        """Set both caches to zero, and wait."""
        self._halves.clear()
        self.driver.synchronize()

    def half_ms(self, width: int | None, repeats: int = 20) -> float:
        """Return the milliseconds on the device of one target half of a width, or of one draft
        half if `width` is None: the cost of a round without the host. Call it between requests
        only; it discards the sequence.
        """
        halves, draft = self._halves, self._halves.draft
        self.start(np.zeros(1, np.int64))
        self.set_round(self.num_nodes, False)
        graph = halves.draft_graph if width is None else halves.target_graphs[width]
        assert graph is not None
        halves.staging.last_row_value[0] = 1
        start = self.driver.mark()
        for _ in range(repeats):
            if width is None and draft is not None:
                self.driver.upload(draft.num_rows, halves.staging.last_row, 8)
            graph.replay()
        end = self.driver.mark()
        self.driver.synchronize()
        return self.driver.elapsed_ms(start, end) / repeats

    def timed_since(self, start_ns: int) -> None:
        """Add the time since `start_ns` to the time spent inside engines."""
        self.clock.engine_ns += time.perf_counter_ns() - start_ns

    def _choose(self, rows: Sequence[int], token: int) -> None:
        """Upload the kept rows of the last call, in order, and the next root."""
        staging = self._halves.staging
        values = staging.chosen_values
        values[0], values[1] = len(rows), token
        values[2 : 2 + len(rows)] = rows
        self.driver.upload(self._halves.own.chosen, staging.chosen, 8 * (2 + len(rows)))

    def _count(self, engine: str) -> None:
        self.clock.calls[engine] = self.clock.calls.get(engine, 0) + 1
