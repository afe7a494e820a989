"""`TreePlan`: the sizes of the draft tree of a round, and its fixed paths if it is static."""

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
    """The draft tree of a round, root excluded.

    The tree is dynamic (EAGLE-2) unless `static` lists its nodes (EAGLE-1), in which case the sizes
    cut that tree. If `num_draft_tokens` exceeds `num_candidates`, a dynamic tree keeps all
    candidates. Raises PlanError if a value is out of range.
    """

    draft_top_k: int = 1
    """K: number of children that each frontier node proposes, and size of the next frontier."""
    draft_depth: int = 3
    """D: number of levels below the root."""
    num_draft_tokens: int = 3
    """Number of nodes kept for verification; one target call runs these and the root."""
    static: TreePaths | None = None
    """Nodes of a static tree; None for a dynamic tree."""

    def __post_init__(self) -> None:
        set_int(self, "draft_top_k", MAX_DRAFT_TOP_K, where="tree.")
        set_int(self, "draft_depth", MAX_DRAFT_DEPTH, where="tree.")
        set_int(self, "num_draft_tokens", MAX_DRAFT_TOKENS, where="tree.")
        if not isinstance(self.static, TreePaths | None):
            raise PlanError(f"tree.static must be TreePaths or None, got {self.static!r:.80}")

    @classmethod
    def of_paths(cls, paths: TreePaths, **sizes: int) -> TreePlan:
        """Return the static tree of `paths`, cut only by the given sizes."""
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
        """The static tree cut to the sizes; None for a dynamic tree."""
        if self.static is None:
            return None
        return self.static.cut(self.draft_top_k, self.draft_depth, self.num_draft_tokens)

    @property
    def num_candidates(self) -> int:
        """Number of nodes that a dynamic tree scores before the rerank.

        That is K under the root and K*K on each level below.
        """
        return self.draft_top_k + (self.draft_depth - 1) * self.draft_top_k**2

    @property
    def top_k_in_use(self) -> int:
        """`draft_top_k` limited to the size of the tree, since a larger value has no effect."""
        paths = self.static_in_use
        return min(self.draft_top_k, self.num_draft_tokens) if paths is None else paths.top_k

    @property
    def depth_in_use(self) -> int:
        """`draft_depth` limited to the size of the tree, since a larger value has no effect."""
        paths = self.static_in_use
        return min(self.draft_depth, self.num_draft_tokens) if paths is None else paths.depth

    @property
    def num_draft_rows(self) -> int:
        """Number of rows that the draft runs in one round, without those of committed tokens."""
        paths = self.static_in_use
        if paths is None:
            return self.top_k_in_use * (self.depth_in_use - 1)
        return paths.num_draft_rows

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> TreePlan:
        """Return the tree from the object that `to_json` returned.

        Raises PlanError if a field is missing, unknown or invalid.
        """
        values = exact_fields(cls, data, "tree")
        static = values.pop("static")
        return cls(**values, static=None if static is None else TreePaths.from_json(static))


TreeRequest = str | Sequence[Sequence[int]] | TreePlan
"""A tree in a request: "dynamic" or the name of a static tree, a list of paths, or a TreePlan."""


def requested_tree(tree: TreeRequest, default: TreePlan) -> TreePlan:
    """Return the tree plan of a request; "dynamic" takes the sizes of `default`.

    Raises PlanError if the name is unknown or the paths do not form a tree.
    """
    if isinstance(tree, TreePlan):
        return tree
    if isinstance(tree, str):
        if tree == DYNAMIC:
            return replace(default, static=None)
        return TreePlan.of_paths(named_paths(tree))
    return TreePlan.of_paths(TreePaths(tree))  # type: ignore[arg-type]
