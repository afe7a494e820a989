"""Rounds whose steps all run on the host: numpy trees and ONNX Runtime engines (method
section 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.acceptance.accept import Accepted, Settled, settle
from eagle3.runtime.acceptance.rules import NAN_LOGITS, AcceptanceRule
from eagle3.runtime.drafters.base import Drafter, DraftRequest
from eagle3.runtime.errors import EngineError
from eagle3.runtime.ort.target_engine import TargetEngine, TargetOutput
from eagle3.runtime.rounds.protocol import Step
from eagle3.runtime.trees.tree import Tree


@dataclass(frozen=True)
class _Place:
    """The state at the start of a round: `past` tokens are in the cache, the newest committed one
    is not.

    carried: tokens that the previous round accepted after it and that this round verifies again
    (`settle`). num_ahead: number of tokens from position `past` on that the drafter has observed.
    """

    past: int
    carried: tuple[int, ...] = ()
    num_ahead: int = 0


class HostRounds:
    """The rounds of one request, on one target and one drafter."""

    def __init__(self, target: TargetEngine, drafter: Drafter, rule: AcceptanceRule) -> None:
        self._target, self._drafter, self._rule = target, drafter, rule
        self.prefill_chunk = target.prefill_chunk
        self._prompt = np.empty(0, np.int64)
        self._output: TargetOutput | None = None
        self._place = _Place(0)

    def start(self, prompt: NDArray[np.int64]) -> None:
        """Start a new sequence and discard the previous one."""
        self._drafter.reset()
        self._prompt, self._place = prompt, _Place(past=len(prompt))

    def prefill(self, start: int) -> None:
        """Run one chunk of the prompt. The drafter observes it."""
        ids = self._prompt[start : start + self.prefill_chunk]
        self._output = self._target.prefill(ids, start, self._rule.want_logits)
        if self._output.next_token[0] < 0:  # an int8 target does not pass a NaN to later chunks
            raise EngineError(NAN_LOGITS)
        self._drafter.observe(ids, self._output.features)

    def first(self) -> Step:
        """Return the first token, chosen by the same rule as every later token."""
        assert self._output is not None
        tree = Tree.root_only(int(self._prompt[-1]))
        accepted = self._rule.accept(tree, self._output, len(self._prompt) - 1)
        return self._step(tree, self._output, Settled(accepted.path, accepted.token))

    def last_logits(self) -> NDArray[np.float32]:
        """Return a copy of the logits that `first` reads."""
        assert self._output is not None and self._output.logits is not None
        row: NDArray[np.float32] = self._output.logits[0].copy()
        return row

    def fit(self, tree: TreePlan, remaining: int) -> TreePlan | None:
        """Return the tree cut to the remaining context and tokens, or None for no draft."""
        target, num_carried = self._target, len(self._still_fits(remaining))
        depth = min(tree.draft_depth, remaining - 1 - num_carried)
        room = min(target.capacity - self._place.past, target.max_verify_rows) - 1 - num_carried
        nodes = min(tree.num_draft_tokens, room)
        if not self._drafter.proposes or depth < 1 or nodes < 1:
            return None
        return replace(tree, draft_depth=depth, num_draft_tokens=nodes)

    def round(self, root: int, remaining: int, tree: TreePlan | None) -> Step:
        """Run one round: propose, verify, accept, keep."""
        carried = self._still_fits(remaining)
        draft = self._propose(carried[-1] if carried else root, tree)
        accepted, step = self._verify(root, carried, draft)
        return replace(
            step,
            num_levels=int(draft.depths.max()),
            num_accepted=max(len(accepted.path) - len(carried), 0),
            plain=tree is None and not carried,
        )

    def clear(self) -> None:
        """Clear the target's cache."""
        self._target.clear()

    def _verify(self, root: int, carried: tuple[int, ...], draft: Tree) -> tuple[Accepted, Step]:
        """Verify, accept and keep. The root is the newest committed token."""
        past, rule = self._place.past, self._rule
        tree = draft.laid_out(root, carried) if rule.token_exact else draft
        output = self._target.verify(tree, past, rule.want_logits)
        spoiled = tree.num_draft_tokens > 0 and output.next_token.min() < 0
        if spoiled:
            output = self._row_by_row(tree, past)
        accepted = rule.accept(tree, output, past)
        settled = Settled(accepted.path, accepted.token)
        if rule.token_exact:
            settled = settle(tree, accepted)
        if spoiled:
            self._run_path(tree, past, settled.path)
        else:
            self._target.keep(past, settled.path)
        seen = [0, *accepted.path]
        features = None if output.features is None else output.features[seen]
        self._drafter.rewind(self._place.num_ahead)
        self._drafter.observe(tree.tokens[seen], features)
        self._place = _Place(
            past=past + len(settled.path) + 1,
            carried=settled.carried,
            num_ahead=len(accepted.path) - len(settled.path),
        )
        return accepted, self._step(tree, output, settled)

    def _row_by_row(self, tree: Tree, past: int) -> TargetOutput:
        """Compute every row in a call of its own path, as plain decoding would.

        A draft token for which the target returns NaN spoils every row of its call, because a
        masked slot has weight 0 and 0 times NaN is NaN. Dropping the whole tree instead would bias
        the result: the fact that a *drawn* token spoiled its call would decide what is drawn
        instead.
        """
        each = [self._run_path(tree, past, tree.path(node)) for node in range(tree.num_nodes)]
        return TargetOutput(
            next_token=np.concatenate([out.next_token for out in each]),
            logits=_stacked([out.logits for out in each]),
            features=_stacked([out.features for out in each]),
        )

    def _run_path(self, tree: Tree, past: int, path: tuple[int, ...]) -> TargetOutput:
        """Run the root and `path` alone in a clean cache, and return copies of the last row."""
        self._target.clear(past)
        tokens = [tree.token_list[node] for node in path]
        chain = Tree.chain(tree.token_list[0], tokens)
        out = self._target.verify(chain, past, self._rule.want_logits)
        last = slice(len(path), None)
        return TargetOutput(
            next_token=out.next_token[last].copy(),
            logits=None if out.logits is None else out.logits[last].copy(),
            features=None if out.features is None else out.features[last].copy(),
        )

    def _still_fits(self, remaining: int) -> tuple[int, ...]:
        """Return the carried tokens that fit the remaining context and tokens."""
        room = min(
            remaining - 1,
            self._target.capacity - self._place.past - 1,
            self._target.max_verify_rows - 1,
        )
        return self._place.carried[: max(room, 0)]

    def _propose(self, root: int, budget: TreePlan | None) -> Tree:
        """Return a tree under the newest token, carried or committed. Invalid ids end the tree."""
        if budget is None:
            return Tree.root_only(root)
        temperature = self._rule.draft_temperature
        tree = self._drafter.propose(DraftRequest(root, budget, temperature, self._rule.rng))
        valid = tree.tokens.min() >= 0 and tree.tokens.max() < self._target.vocab_size
        return tree if valid else Tree.root_only(root)

    def _step(self, tree: Tree, output: TargetOutput, settled: Settled) -> Step:
        tokens = (*(tree.token_list[node] for node in settled.path), settled.token)
        logprobs = self._rule.logprobs(tree, output, settled.path, settled.token)
        return Step(tokens, logprobs=None if logprobs is None else tuple(logprobs))


def _stacked(rows: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Concatenate M rows [1, ...] to [M, ...]. Returns None if the rows are None."""
    there = [row for row in rows if row is not None]
    return np.concatenate(there) if there else None
