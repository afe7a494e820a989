"""The protocol between the round loop and an engine: a prompt in chunks, then one round at a time.

`decode.py` decides when a request ends and what is shown. A `RoundEngine` proposes, verifies,
accepts and keeps (method section 1), on the host (`host_rounds.py`) or on a GPU
(`gpu/device_rounds.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.acceptance.rules import TokenLogprob


@dataclass(frozen=True)
class Step:
    """What one round, or the prefill, accepted.

    tokens: the tokens to commit, the target's own token last. num_levels: levels of the verified
    tree. num_accepted: accepted draft tokens among those that this round proposed. plain: whether
    only the newest token ran. logprobs: log-probabilities of `tokens`, if requested.
    """

    tokens: tuple[int, ...]
    num_levels: int = 0
    num_accepted: int = 0
    plain: bool = True
    logprobs: tuple[TokenLogprob, ...] | None = None


class RoundEngine(Protocol):
    """The rounds of one request. It owns nothing that outlives the request. Raises EngineError."""

    prefill_chunk: int

    def start(self, prompt: NDArray[np.int64]) -> None:
        """Start a new sequence with the prompt `prompt`, int64 [P], and discard the
        previous one.
        """

    def prefill(self, start: int) -> None:
        """Run the chunk of the prompt that begins at `start`, at most prefill_chunk ids."""

    def first(self) -> Step:
        """Return the first token, after all chunks have run."""

    def last_logits(self) -> NDArray[np.float32]:
        """Return the logits float32 [V] of the prompt's last row, after all chunks have run. The
        rule must require logits.
        """

    def fit(self, tree: TreePlan, remaining: int) -> TreePlan | None:
        """Return the tree cut to the remaining context and tokens, or None for no draft."""

    def round(self, root: int, remaining: int, tree: TreePlan | None) -> Step:
        """Run one round under `root`, the newest committed token. tree: None for no draft."""

    def clear(self) -> None:
        """Clear the caches after an EngineError, so that nothing reaches the next request."""
