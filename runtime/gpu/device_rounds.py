"""Rounds on the device: one step proposes, verifies, accepts and keeps (method section 1).

A greedy round replays the draft half and the target half, waits once and reads one small result.
If the host needs logits (sampling, penalties, log-probabilities), the target half stops before
acceptance. The host then walks the tree with the same rule as on the CPU, fetches only the rows it
visits, and sends the path back as a list of rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.acceptance.rules import NAN_LOGITS, AcceptanceRule
from eagle3.runtime.errors import EngineError
from eagle3.runtime.gpu.buffers import RESULT_HEAD
from eagle3.runtime.gpu.device import Device, Int64s
from eagle3.runtime.rounds.protocol import Step
from eagle3.runtime.trees.tree import Tree


class VisitedRows:
    """Rows of logits, float32 [V] each, fetched on first access."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: dict[int, NDArray[np.float32]] = {}

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        if row not in self._rows:
            self._rows[row] = self._device.logits(row)
        return self._rows[row]


@dataclass(frozen=True)
class DeviceOutput:
    """What a rule reads of a verification: next_token int64 [M], and logits by row."""

    next_token: Int64s
    logits: VisitedRows


class DeviceRounds:
    """The rounds of one request on a device. drafts: whether its rounds can propose."""

    def __init__(self, device: Device, rule: AcceptanceRule, drafts: bool) -> None:
        self._device, self._rule = device, rule
        self._drafts = drafts and device.drafts
        self.prefill_chunk = device.prefill_chunk
        self._prompt = np.empty(0, np.int64)
        self._past = 0
        self._last_chunk = 0  # its number of rows
        self._waiting = 0  # committed rows that the draft has not run
        self._tree_ready = False  # whether the device holds a tree under the newest token
        self._settings = (0, False)

    def start(self, prompt: Int64s) -> None:
        """Start a new sequence and discard the previous one."""
        self._device.driver.attach()
        self._device.start(prompt)
        self._prompt, self._past = prompt, 0
        self._waiting, self._tree_ready, self._settings = 0, False, (0, False)

    def prefill(self, start: int) -> None:
        """Run one chunk, and the draft on it unless it is the last, whose next token is not known
        yet.
        """
        begin = time.perf_counter_ns()
        self._device.driver.attach()
        end = min(start + self.prefill_chunk, len(self._prompt))
        self._last_chunk = end - start
        self._device.run_chunk(start, end - start)
        if end < len(self._prompt):
            self._keep_chunk(int(self._prompt[end]))
            self._device.wait()
        self._device.timed_since(begin)

    def first(self) -> Step:
        """Return the first token, chosen by the same rule as every later token."""
        self._device.driver.attach()
        tree = Tree.root_only(int(self._prompt[-1]))
        output = DeviceOutput(np.array([self._device.first_token()]), VisitedRows(self._device))
        accepted = self._rule.accept(tree, output, len(self._prompt) - 1)
        self._keep_chunk(accepted.token)
        self._tree_ready = self._drafts
        return self._step(tree, output, (), accepted.token)

    def last_logits(self) -> NDArray[np.float32]:
        """Return the logits that `first` reads."""
        self._device.driver.attach()
        return self._device.logits(0)

    def fit(self, tree: TreePlan, remaining: int) -> TreePlan | None:
        """Return the tree cut to the remaining context. Tokens beyond the remaining ones are
        dropped later.
        """
        room = self._device.capacity - self._past - 1
        nodes = min(tree.num_draft_tokens, room, self._device.num_nodes - 1)
        if not self._drafts or remaining < 2 or nodes < 1:
            return None
        return replace(tree, num_draft_tokens=nodes)

    def round(self, root: int, remaining: int, tree: TreePlan | None) -> Step:
        """Run one round: two replays and one wait."""
        begin = time.perf_counter_ns()
        self._device.driver.attach()  # several threads can read one stream
        num_nodes = 1 if tree is None else tree.num_draft_tokens + 1
        width = self._width(num_nodes)
        self._run_draft(width)
        self._set_round(min(num_nodes, width))
        self._device.verify(width)
        step = self._finish(root, width)
        self._device.timed_since(begin)
        return replace(step, plain=width == 1)

    def clear(self) -> None:
        """Clear the caches."""
        self._device.driver.attach()
        self._device.clear()

    def _width(self, num_nodes: int) -> int:
        """Return the narrowest graph that holds the nodes and whose rows fit the cache."""
        slots = self._device.num_slots - self._past
        fitting = [width for width in self._device.widths if width <= slots]
        return next((width for width in fitting if width >= num_nodes), fitting[-1])

    def _run_draft(self, width: int) -> None:
        """Grow a tree for a wide round; for a plain round, make room for one more waiting row."""
        stale = width > 1 and not self._tree_ready
        full = self._drafts and self._waiting == self._device.round_rows
        if stale or full:
            self._device.grow()
            self._waiting, self._tree_ready = 0, True

    def _set_round(self, node_limit: int) -> None:
        settings = (node_limit, not self._rule.want_logits)
        if settings != self._settings:
            self._device.set_round(*settings)
            self._settings = settings

    def _finish(self, root: int, width: int) -> Step:
        """Wait and accept. If a draft token caused NaN in the call, run it again without the
        draft.

        This biases nothing: the tree's tokens are not sampled, so whether they spoil a call is
        determined before any random number of this round.
        """
        if self._rule.want_logits:
            self._device.fetch_tree(width)
        result = self._device.wait()
        spoiled, num_used = bool(result[0]), int(result[4])
        if spoiled and num_used > 1:
            self._device.clear_behind(width)
            self._set_round(1)
            self._device.verify(1)
            return self._finish(root, 1)
        if spoiled:
            raise EngineError(NAN_LOGITS)
        if self._rule.want_logits:
            return self._accept_on_host(root, int(result[3]), num_used)
        return self._accepted_on_device(result)

    def _accepted_on_device(self, result: Int64s) -> Step:
        kept, token, depth = int(result[1]), int(result[2]), int(result[3])
        assert kept <= self._device.round_rows, "the tree is deeper than it was compiled to be"
        self._kept(kept)
        path = result[RESULT_HEAD + 1 : RESULT_HEAD + kept].tolist()
        return Step((*path, token), num_levels=depth, num_accepted=kept - 1)

    def _accept_on_host(self, root: int, depth: int, num_used: int) -> Step:
        tokens, parents, next_token = self._device.tree(num_used)
        assert tokens[0] == root, f"the device stands at token {tokens[0]}, the text at {root}"
        tree = Tree(tokens, parents.astype(np.int32))
        output = DeviceOutput(next_token, VisitedRows(self._device))
        accepted = self._rule.accept(tree, output, self._past)
        self._device.keep(accepted.path, accepted.token)
        self._kept(len(accepted.path) + 1)
        step = self._step(tree, output, accepted.path, accepted.token)
        return replace(step, num_levels=depth, num_accepted=len(accepted.path))

    def _keep_chunk(self, token: int) -> None:
        self._device.keep_chunk(self._last_chunk, token, self._drafts)
        self._past += self._last_chunk

    def _kept(self, num_rows: int) -> None:
        self._past += num_rows
        self._waiting = min(self._waiting + num_rows, self._device.round_rows)
        self._tree_ready = False

    def _step(self, tree: Tree, output: DeviceOutput, path: tuple[int, ...], token: int) -> Step:
        tokens = (*(tree.token_list[node] for node in path), token)
        logprobs = self._rule.logprobs(tree, output, path, token)
        return Step(tokens, logprobs=None if logprobs is None else tuple(logprobs))
