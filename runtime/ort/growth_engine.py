"""The engine `draft_tree`: extends a draft's text and grows a whole tree in one call.

Its graph contains the extension, all depths, top-k and rerank. It grows only the tree of the plan;
with `DraftEngine`, any other tree is grown one level per call. Both engines share one cache and may
take turns within a request.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import DraftInfo, Manifest, TensorSpec, engine_name
from eagle3.runtime.ort.draft_engine import DraftEngine, feature_size_of
from eagle3.runtime.ort.kv_cache import Buffer
from eagle3.runtime.ort.session import OrtValues, load_session
from eagle3.runtime.ort.signature import Bound, cache_specs
from eagle3.runtime.stats import Clock
from eagle3.runtime.trees.tree import Tree

Int64s = NDArray[np.int64]

ENGINE = "draft_tree"
# A graph contains one copy of the layer per depth, and compares candidates and nodes pairwise.
_MAX_DEPTH, _MAX_CANDIDATES, _MAX_NODES = 16, 2048, 256


def grown_tree(tree: TreePlan, draft_vocab_size: int) -> TreePlan | None:
    """Return the effective sizes of a draft's tree, for which a graph is built.

    Returns None if the tree is static or too large to be unrolled into a graph. Such a tree is
    grown one level per call.
    """
    if tree.static is not None:
        return None
    top_k = min(tree.top_k_in_use, draft_vocab_size)
    grown = TreePlan(top_k, tree.depth_in_use, tree.num_draft_tokens)
    fits = (
        grown.draft_depth <= _MAX_DEPTH
        and grown.num_candidates <= _MAX_CANDIDATES
        and grown.num_draft_tokens <= _MAX_NODES
    )
    return grown if fits else None


class GrowthEngine:
    """Grows trees in one call, batch 1.

    Uses the cache, the rows and the feature slots of a `DraftEngine`.
    """

    def __init__(
        self, bundle: Bundle, name: str, draft: DraftEngine, threads: int, clock: Clock
    ) -> None:
        manifest, info = bundle.manifest, bundle.manifest.drafts[name]
        self._tree = info.tree
        bound = bound_growth(manifest, info)
        self._session = load_session(bundle, engine_name(name, ENGINE), bound, threads, clock)
        self._draft = draft
        nodes = self._tree.num_draft_tokens + 1
        self._next_ids = Buffer(draft.max_rows, np.int64)
        self._num_rows, self._past = Buffer(1, np.int64), Buffer(1, np.int64)
        self._tokens, self._parents = Buffer(nodes, np.int64), Buffer(nodes, np.int64)
        self._num_nodes = Buffer(1, np.int64)

    def grows(self, tree: TreePlan) -> bool:
        """Return whether the graph can grow `tree`.

        This is the case for the graph's own tree, and for the same tree with fewer nodes, which
        consists of the first nodes of the graph's own tree.
        """
        own = self._tree
        if tree.static is not None:
            return False
        same = (tree.draft_top_k, tree.draft_depth) == (own.draft_top_k, own.draft_depth)
        return same and tree.num_draft_tokens <= own.num_draft_tokens

    def grow(self, next_ids: Int64s, num_draft_tokens: int) -> Tree:
        """Run and keep rows with the target's features, and return a tree grown from them.

        The features must already be in the draft's `feature_slots`.

        next_ids: int64 [N], as in `DraftEngine.extend`; the last one is the root of the tree.
        num_draft_tokens: maximum number of nodes, without the root.
        """
        count = len(next_ids)
        self._next_ids.view(1, count)[0] = next_ids
        self._num_rows.view(1)[0] = count
        self._past.view(1)[0] = self._draft.num_rows
        self._session.run(count, lambda: self._values(count))
        self._draft.keep_rows(count)
        nodes = self._tree.num_draft_tokens + 1
        num_nodes = min(int(self._num_nodes.view(1)[0]), num_draft_tokens + 1)
        parents = self._parents.view(1, nodes)[0, :num_nodes].astype(np.int32)
        return Tree(self._tokens.view(1, nodes)[0, :num_nodes].copy(), parents)

    def _values(self, count: int) -> OrtValues:
        nodes = self._tree.num_draft_tokens + 1
        features, past, present = self._draft.shared(count)
        inputs = {
            "features": features,
            "next_ids": self._next_ids.value(1, count),
            "num_rows": self._num_rows.value(1),
            "past_len": self._past.value(1),
            **past,
        }
        outputs = {
            "tokens": self._tokens.value(1, nodes),
            "parents": self._parents.value(1, nodes),
            "num_nodes": self._num_nodes.value(1),
            **present,
        }
        return inputs, outputs


def bound_growth(manifest: Manifest, info: DraftInfo) -> Bound:
    """Return the tensors that a caller of the graph binds.

    `features` has only the columns of the layers that this head fuses.
    """
    plan, nodes = manifest.plan, info.tree.num_draft_tokens + 1
    cache = (info.num_kv_heads, plan.draft_capacity, info.head_dim)
    inputs = (
        TensorSpec("features", plan.dtype, ("B", "N", feature_size_of(manifest.target, info))),
        TensorSpec("next_ids", "int64", ("B", "N")),
        TensorSpec("num_rows", "int64", ("B",)),
        TensorSpec("past_len", "int64", ("B",)),
    )
    outputs = (
        TensorSpec("tokens", "int64", ("B", nodes)),
        TensorSpec("parents", "int64", ("B", nodes)),
        TensorSpec("positions", "int64", ("B", nodes)),
        TensorSpec("tree_mask", "bool", ("B", nodes, nodes)),
        TensorSpec("num_nodes", "int64", ("B",)),
    )
    return Bound(
        chain(inputs, cache_specs("past", 1, cache, plan.dtype)),
        chain(outputs, cache_specs("present", 1, cache, plan.dtype)),
    )
