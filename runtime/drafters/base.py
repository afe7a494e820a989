"""The drafter contract: what proposes a tree, and what the round loop tells it.

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
    """What one round asks for.

    root: the last committed token. tree: budget of the round, already cut to what still fits.
    temperature and rng are set when the draft's tokens may be sampled, which pays under the
    `rejection` rule; otherwise candidates must not depend on chance.
    """

    root: int
    tree: TreePlan
    temperature: float | None = None
    rng: np.random.Generator | None = None


class Drafter(Protocol):
    """Proposes trees for one sequence at a time.

    proposes: False for one that never does, so that its rounds are plain decoding.
    """

    name: str
    proposes: bool

    def reset(self) -> None:
        """Forgets the sequence."""

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Learns of committed tokens [R] that the target ran, with their features [R,F].

        Both are views that the caller overwrites afterwards.
        """

    def rewind(self, num_tokens: int) -> None:
        """Forgets the newest observed tokens; they are observed again, perhaps others."""

    def propose(self, request: DraftRequest) -> Tree:
        """A tree under request.root, of at most request.tree.num_draft_tokens nodes."""


class NoDrafter:
    """Plain autoregressive decoding: the tree is its root."""

    name = "none"
    proposes = False

    def reset(self) -> None:
        """Nothing to forget."""

    def observe(self, tokens: Int64s, features: NDArray[Any] | None) -> None:
        """Nothing to learn."""

    def rewind(self, num_tokens: int) -> None:
        """Nothing to forget."""

    def propose(self, request: DraftRequest) -> Tree:
        """The root alone."""
        return Tree.root_only(request.root)
