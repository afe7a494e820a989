"""What grows a tree from a draft's proposals, and which one a plan asks for."""

from typing import Protocol

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.trees.dynamic import DynamicTree
from eagle3.runtime.trees.static import StaticTree
from eagle3.runtime.trees.tree import Float32s, Frontier, Int64s, Tree


class TreeBuilder(Protocol):
    """Grows a tree one depth at a time; what the draft proposes decides it, or only fills it.

    `add_root_candidates` gives depth 1; then, while `frontier` is not None, run the draft on it
    and `add` what it proposes; `finish` at any time. Rows of ids and log-probabilities are sorted
    best first; a candidate with a non-finite one, or with a sibling's token, is dropped.
    """

    @property
    def frontier(self) -> Frontier | None:
        """What to run next; None once nothing is left to expand."""

    def add_root_candidates(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Depth 1: the root's candidates, ids [K] (target vocabulary) and log q float32 [K]."""

    def add(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """One more depth: row f of ids and log q, both [F, K], belongs to frontier node f."""

    def finish(self) -> Tree:
        """The tree as it stands."""


def tree_builder(root_token: int, plan: TreePlan, top_k: int) -> TreeBuilder:
    """Nothing but the root yet. top_k: columns that the draft will give, `plan.top_k_in_use` or
    fewer where its vocabulary is smaller."""
    paths = plan.static_in_use
    if paths is not None:
        return StaticTree(root_token, paths)
    return DynamicTree(root_token, top_k, plan.depth_in_use, plan.num_draft_tokens)
