"""What the round loop needs of an engine: a prompt run in chunks, then one round at a time.

`decode.py` decides when a request ends and what of it is shown; a `RoundEngine` proposes, verifies,
accepts and keeps (method section 1), on the host (`host_rounds.py`) or on a GPU (`gpu/rounds.py`).
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

    tokens: to be committed, the target's own token last. num_levels: of the tree that was verified;
    num_accepted: draft tokens accepted of what this round proposed. plain: only the newest token
    ran. logprobs: of `tokens`, if asked for.
    """

    tokens: tuple[int, ...]
    num_levels: int = 0
    num_accepted: int = 0
    plain: bool = True
    logprobs: tuple[TokenLogprob, ...] | None = None


class RoundEngine(Protocol):
    """One request's rounds; owns nothing that outlives the request. Raises EngineError."""

    prefill_chunk: int

    def start(self, prompt: NDArray[np.int64]) -> None:
        """Forgets what came before; `prompt` [P] is the sequence to go on from."""

    def prefill(self, start: int) -> None:
        """Runs the prompt's chunk from `start` on, at most prefill_chunk ids of it."""

    def first(self) -> Step:
        """The token behind the prompt, once all chunks have run."""

    def last_logits(self) -> NDArray[np.float32]:
        """float32 [V], of the prompt's last row, once all chunks have run; the rule must want
        logits."""

    def fit(self, tree: TreePlan, remaining: int) -> TreePlan | None:
        """The tree cut to what the context and the tokens to go leave room for; None: no draft."""

    def round(self, root: int, remaining: int, tree: TreePlan | None) -> Step:
        """One round under `root`, the newest committed token; tree None: without a draft."""

    def clear(self) -> None:
        """After an EngineError: nothing of it reaches the next request."""
