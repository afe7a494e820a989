"""The acceptance rule of a request: greedy, `coupled` or `rejection`, for any tree.

Plain decoding applies the same rule to a tree that contains only the root, so both use the same
code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.acceptance.accept import Accepted, accept_by_token, accept_rejection
from eagle3.runtime.acceptance.sampling import (
    CoupledUniforms,
    Float32s,
    TokenHistory,
    edit_logits,
    log_softmax,
    rejection_rng,
    sample_inverse_cdf,
    target_probs,
)
from eagle3.runtime.errors import EngineError
from eagle3.runtime.params import SamplingParams
from eagle3.runtime.trees.tree import Tree

NAN_LOGITS = "the target's logits are NaN; check its weights and its precision"


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of an emitted token under the target, before any warper.

    top: the most likely tokens as (token id, log-probability) pairs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogitRows(Protocol):
    """Logits of a target call by row, float32 [V] each. A rule reads only the rows it visits."""

    def __getitem__(self, row: int, /) -> Float32s: ...


class RuleInput(Protocol):
    """The outputs of a target call that a rule reads.

    next_token: argmax of each row, int64 [M]; -1 if the row's logits are NaN.
    logits: logits by row; None unless they were requested.
    """

    @property
    def next_token(self) -> NDArray[np.int64]: ...
    @property
    def logits(self) -> LogitRows | None: ...


class AcceptanceRule:
    """Turns target outputs into tokens for one request (docs/method.md, section 4).

    rng: the random generator of the `rejection` rule; drafters also sample from it.
    want_logits: whether `accept` or `logprobs` needs the logits and not only the argmax.
    """

    def __init__(
        self, params: SamplingParams, history: TokenHistory, num_logprobs: int | None
    ) -> None:
        self._params, self._history, self._num_logprobs = params, history, num_logprobs
        self._uniforms = CoupledUniforms(params.seed)
        self.rng = rejection_rng(params.seed)
        self.want_logits = not params.greedy or params.edits_logits or num_logprobs is not None

    @property
    def draft_temperature(self) -> float | None:
        """The temperature for sampling draft tokens, or None for rules that gain nothing by it."""
        return None if self.token_exact else self._params.temperature

    @property
    def token_exact(self) -> bool:
        """Whether the rule guarantees that the tokens themselves do not depend on the draft."""
        return self._params.greedy or self._params.acceptance == "coupled"

    def accept(self, tree: Tree, output: RuleInput, past: int) -> Accepted:
        """Walk the tree and return the accepted path and the target's token.

        past: position of the root. Raises EngineError if the target's logits are NaN.
        """
        if self._params.greedy:
            return accept_by_token(tree, lambda node: self._argmax(tree, output, node))
        if self._params.acceptance == "coupled":
            depths = tree.depths
            return accept_by_token(
                tree,
                lambda node: sample_inverse_cdf(
                    self._p(tree, output, node),
                    self._uniforms.uniform(past + int(depths[node]) + 1),
                ),
            )
        return accept_rejection(tree, lambda node: self._p(tree, output, node), self.rng)

    def logprobs(
        self, tree: Tree, output: RuleInput, path: tuple[int, ...], token: int
    ) -> list[TokenLogprob] | None:
        """Return the log-probabilities of the path's tokens, then of `token`.

        Returns None unless log-probabilities were requested.
        """
        if self._num_logprobs is None:
            return None
        assert output.logits is not None
        tokens = [*(tree.token_list[node] for node in path), token]
        rows = (0, *path)
        return [
            self._logprob(log_softmax(output.logits[row]), token)
            for row, token in zip(rows, tokens, strict=True)
        ]

    def _logprob(self, log_p: Float32s, token: int) -> TokenLogprob:
        count = min(self._num_logprobs or 0, log_p.size)
        best = np.argpartition(-log_p, count - 1)[:count] if count else np.empty(0, np.int64)
        best = best[np.argsort(-log_p[best], kind="stable")]
        top = tuple((int(i), float(log_p[i])) for i in best)
        return TokenLogprob(token, float(log_p[token]), top)

    def _argmax(self, tree: Tree, output: RuleInput, node: int) -> int:
        token = int(output.next_token[node])
        if token < 0:
            raise EngineError(NAN_LOGITS)
        if not self._params.edits_logits:
            return token
        assert output.logits is not None
        path = tree.path_tokens(node)
        return int(edit_logits(output.logits[node], self._history, path, self._params).argmax())

    def _p(self, tree: Tree, output: RuleInput, node: int) -> Float32s:
        assert output.logits is not None
        path = tree.path_tokens(node)
        return target_probs(output.logits[node], self._history, path, self._params)
