"""The drafter protocol, between drafters and the round loop.

The loop does not know which drafter it runs (method section 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.trees.tree import Tree

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class DraftRequest:
    """The request of a round to a drafter.

    root: the newest token, committed or carried (`settle`). tree: the budget of the round, already
    cut to the remaining context and tokens. temperature and rng are set if draft tokens may be
    sampled, which increases acceptance under the `rejection` rule; otherwise candidates must not
    depend on random numbers.
    """

    root: int
    tree: TreePlan
    temperature: float | None = None
    rng: np.random.Generator | None = None


class Drafter(Protocol):
    """Proposes trees for one sequence at a time.

    proposes: False for a drafter that never proposes, so that its rounds are plain decoding.
    """

    name: str
    proposes: bool

    def reset(self) -> None:
        """Discard the sequence."""

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Record accepted tokens [R] that the target has run, with their features [R,F]. Those
        that are not committed yet are rewound before the next call.

        Both are views that the caller overwrites afterwards.
        """

    def rewind(self, num_tokens: int) -> None:
        """Discard the newest observed tokens. They, or others in their place, are
        observed again.
        """

    def propose(self, request: DraftRequest) -> Tree:
        """Return a tree under request.root with at most request.tree.num_draft_tokens draft
        tokens.
        """


class NoDrafter:
    """Plain autoregressive decoding: the tree is only its root."""

    name = "none"
    proposes = False

    def reset(self) -> None:
        """Do nothing."""

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Do nothing."""

    def rewind(self, num_tokens: int) -> None:
        """Do nothing."""

    def propose(self, request: DraftRequest) -> Tree:
        """Return the root alone."""
        return Tree.root_only(request.root)
