"""Vanilla speculative decoding: an independent small LM with the same vocabulary drafts.

Its cache holds rows of a text. Rows that agree with the committed text are kept, including
accepted draft tokens of a chain; the rest is run in the next `propose`. It therefore makes no
difference which tokens this drafter proposed itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.acceptance.sampling import Float32s
from eagle3.runtime.drafters.base import DraftRequest, Int64s
from eagle3.runtime.drafters.draw import draw
from eagle3.runtime.ort.candidates import Candidates
from eagle3.runtime.ort.model_engine import ModelEngine
from eagle3.runtime.trees.builder import tree_builder
from eagle3.runtime.trees.tree import Tree


class ModelDrafter:
    """Proposes a tree of deterministic candidates, or a chain (method sections 2 and 3).

    name: the drafter's name in the bundle. vocab_size: V of the target.
    """

    proposes = True

    def __init__(self, name: str, engine: ModelEngine, vocab_size: int) -> None:
        self.name = name
        self._engine, self._vocab_size = engine, vocab_size
        self._text = np.zeros(engine.capacity, np.int64)  # observed tokens, then the root
        self._rows = np.zeros(engine.capacity, np.int64)  # the tokens of the cache's rows
        self._observed = 0

    def reset(self) -> None:
        """Discard the text and all rows."""
        self._engine.reset()
        self._observed = 0

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Record the tokens [R]. They are run when enough of them are pending, or when they are
        needed.
        """
        end = self._observed + len(tokens)
        # A padding id of the target's vocabulary can be beyond this model's.
        last = self._engine.draft_vocab_size - 1
        np.minimum(tokens, last, out=self._text[self._observed : end])
        self._observed = end
        if end - self._num_agreeing(end) >= self._engine.max_rows:
            self._catch_up(end, 1, False)

    def rewind(self, num_tokens: int) -> None:
        """Drop the newest tokens of the text. Their rows are dropped when other tokens replace
        them.
        """
        self._observed -= num_tokens

    def propose(self, request: DraftRequest) -> Tree:
        """Run the new part of the text, then grow the tree of this round under request.root."""
        self._text[self._observed] = min(request.root, self._engine.draft_vocab_size - 1)
        if request.tree.draft_top_k == 1:
            return self._chain(request)
        return self._tree(request)

    def _num_agreeing(self, count: int) -> int:
        """Return how many rows of the cache agree with the first `count` tokens of the text."""
        count = min(count, self._engine.num_rows)
        differ = np.flatnonzero(self._rows[:count] != self._text[:count])
        return int(differ[0]) if differ.size else count

    def _catch_up(self, count: int, top_k: int, want_logits: bool) -> Candidates:
        """Extend the cache to the first `count` tokens of the text; return candidates of the last
        one.
        """
        engine = self._engine
        engine.num_rows = min(self._num_agreeing(count), count - 1)
        while engine.num_rows < count:
            first = engine.num_rows
            part = self._text[first : min(first + engine.max_rows, count)]
            self._rows[first : first + len(part)] = part
            out = engine.extend(part, top_k, want_logits)
        return out

    def _tree(self, request: DraftRequest) -> Tree:
        """Grow a static tree, or expand and rerank (EAGLE-2) by the model's probabilities, with
        one engine call per level.
        """
        engine = self._engine
        top_k = min(request.tree.top_k_in_use, engine.draft_vocab_size)
        tree = tree_builder(request.root, request.tree, top_k)
        out = self._catch_up(self._observed + 1, top_k, False)
        tree.add_root_candidates(out.top_ids[0], out.top_log_probs[0])
        while (frontier := tree.frontier) is not None:
            out = engine.step(frontier.tokens, frontier.depth, frontier.row_mask, top_k)
            tree.add(out.top_ids, out.top_log_probs)
        return tree.finish()

    def _chain(self, request: DraftRequest) -> Tree:
        """Return a chain of the most likely tokens, or of sampled tokens with their distributions
        q.

        Its rows extend the text, so accepted ones need not be run again.
        """
        sampled, depth = request.temperature is not None, request.tree.depth_in_use
        tokens: list[int] = []
        q: dict[int, Float32s] = {}
        out = self._catch_up(self._observed + 1, 1, sampled)
        while True:
            if sampled:
                assert out.logits is not None
                drawn = draw(out.logits[0], request, self._vocab_size)
                if drawn is None:
                    break
                token, q[len(tokens)] = drawn
            elif np.isfinite(out.top_log_probs[0, 0]):
                token = int(out.top_ids[0, 0])
            else:
                break
            tokens.append(token)
            if len(tokens) == depth:
                break
            self._rows[self._engine.num_rows] = token
            out = self._engine.extend(np.array([token], np.int64), 1, sampled)
        return Tree.chain(request.root, tokens, q if sampled else None)
