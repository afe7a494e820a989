"""The draft tree of a round: its sizes, and whether the draft's scores or fixed paths shape it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle3.plans.checked_fields import exact_fields, set_int
from eagle3.plans.tree_paths import DYNAMIC, TreePaths, named_paths
from eagle3.runtime.errors import PlanError

MAX_DRAFT_TOKENS = 1024
MAX_DRAFT_DEPTH = 1024
MAX_DRAFT_TOP_K = 256


@dataclass(frozen=True)
class TreePlan:
    """The draft tree of a round, root excluded. Raises PlanError for a value out of range.

    Dynamic (EAGLE-2) unless `static` names its nodes (EAGLE-1); the sizes then cut that tree.
    `num_draft_tokens` may exceed `num_candidates`: the tree then has every candidate there is.
    """

    draft_top_k: int = 1
    """K: children each frontier node proposes, and nodes kept as the next frontier."""
    draft_depth: int = 3
    """D: number of levels below the root."""
    num_draft_tokens: int = 3
    """Nodes kept for verification; one target call sees these and the root."""
    static: TreePaths | None = None
    """The nodes of a static tree; None lets the draft's scores choose them."""

    def __post_init__(self) -> None:
        set_int(self, "draft_top_k", MAX_DRAFT_TOP_K, where="tree.")
        set_int(self, "draft_depth", MAX_DRAFT_DEPTH, where="tree.")
        set_int(self, "num_draft_tokens", MAX_DRAFT_TOKENS, where="tree.")
        if not isinstance(self.static, TreePaths | None):
            raise PlanError(f"tree.static is {self.static!r:.80}: give TreePaths or None")

    @classmethod
    def of_paths(cls, paths: TreePaths, **sizes: int) -> TreePlan:
        """The static tree of `paths`, whole but for the sizes that are given."""
        whole = {
            "draft_top_k": paths.top_k,
            "draft_depth": paths.depth,
            "num_draft_tokens": paths.num_nodes,
        }
        return cls(**{**whole, **sizes}, static=paths)

    @property
    def policy(self) -> str:
        """`dynamic` or `static`."""
        return DYNAMIC if self.static is None else "static"

    @property
    def static_in_use(self) -> TreePaths | None:
        """The static tree within the sizes."""
        if self.static is None:
            return None
        return self.static.cut(self.draft_top_k, self.draft_depth, self.num_draft_tokens)

    @property
    def num_candidates(self) -> int:
        """Nodes a dynamic tree scores before the rerank: K under the root, K*K a level below."""
        return self.draft_top_k + (self.draft_depth - 1) * self.draft_top_k**2

    @property
    def top_k_in_use(self) -> int:
        """More children a node, or frontier nodes, than tokens in the tree change nothing."""
        paths = self.static_in_use
        return min(self.draft_top_k, self.num_draft_tokens) if paths is None else paths.top_k

    @property
    def depth_in_use(self) -> int:
        """More levels than tokens in the tree change nothing."""
        paths = self.static_in_use
        return min(self.draft_depth, self.num_draft_tokens) if paths is None else paths.depth

    @property
    def num_draft_rows(self) -> int:
        """Rows of the draft in one round, besides those of committed tokens."""
        paths = self.static_in_use
        if paths is None:
            return self.top_k_in_use * (self.depth_in_use - 1)
        return paths.num_draft_rows

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> TreePlan:
        """Read `to_json`'s object; PlanError for a missing, unknown or wrong field."""
        values = exact_fields(cls, data, "tree")
        static = values.pop("static")
        return cls(**values, static=None if static is None else TreePaths.from_json(static))


TreeRequest = str | Sequence[Sequence[int]] | TreePlan
"""A tree as a request may name it: "dynamic" or a static tree's name, paths, or a whole plan."""


def requested_tree(tree: TreeRequest, default: TreePlan) -> TreePlan:
    """Raises PlanError for a name that is unknown and paths that make no tree."""
    if isinstance(tree, TreePlan):
        return tree
    if isinstance(tree, str):
        if tree == DYNAMIC:
            return replace(default, static=None)
        return TreePlan.of_paths(named_paths(tree))
    return TreePlan.of_paths(TreePaths(tree))  # type: ignore[arg-type]
