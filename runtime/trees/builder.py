"""The interface of tree builders, and the function that creates the builder for a `TreePlan`."""

from typing import Protocol

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.trees.dynamic import DynamicTree
from eagle3.runtime.trees.static import StaticTree
from eagle3.runtime.trees.tree import Float32s, Frontier, Int64s, Tree


class TreeBuilder(Protocol):
    """Grows a draft tree one depth at a time.

    The draft's proposals either decide the shape of the tree (`DynamicTree`) or only fill a fixed
    shape with tokens (`StaticTree`).

    Call `add_root_candidates` once for depth 1. Then, while `frontier` is not None, run the draft
    on it and pass the proposals to `add`. `finish` may be called at any time. Rows of ids and
    log-probabilities must be sorted best first. A candidate is dropped if its log-probability is
    not finite or if a sibling already has its token.

    Letters: K top-k, F frontier nodes.
    """

    @property
    def frontier(self) -> Frontier | None:
        """The nodes to run next, or None if there is nothing left to expand."""

    def add_root_candidates(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Add the root's candidates (depth 1).

        top_ids: int64 [K], target vocabulary. top_log_probs: log q, float32 [K].
        """

    def add(self, top_ids: Int64s, top_log_probs: Float32s) -> None:
        """Add one more depth.

        top_ids: int64 [F, K], target vocabulary. top_log_probs: log q, float32 [F, K]. Row f of
        both contains the candidates of frontier node f.
        """

    def finish(self) -> Tree:
        """Return the tree grown so far."""


def tree_builder(root_token: int, plan: TreePlan, top_k: int) -> TreeBuilder:
    """Return a builder for the tree of `plan` that contains only the root.

    top_k: number of candidates per node that the draft will return, which is `plan.top_k_in_use`,
    or the size of the draft vocabulary if that is smaller.
    """
    paths = plan.static_in_use
    if paths is not None:
        return StaticTree(root_token, paths)
    return DynamicTree(root_token, top_k, plan.depth_in_use, plan.num_draft_tokens)
