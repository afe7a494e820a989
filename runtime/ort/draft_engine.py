"""The engines of a draft head and their KV cache.

`DraftEngine.extend` runs committed rows, made from the target's features. `DraftEngine.step` runs
tree rows, made from the head's own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import (
    DRAFT_ENGINES,
    DraftInfo,
    Manifest,
    TargetInfo,
    TensorSpec,
    engine_name,
)
from eagle3.runtime.ort.candidates import CandidateEngine, Candidates, Int64s, bound_candidates
from eagle3.runtime.ort.kv_cache import Buffer
from eagle3.runtime.ort.session import Session, load_session
from eagle3.runtime.ort.signature import Bound
from eagle3.runtime.stats import Clock


@dataclass(frozen=True)
class DraftOutput(Candidates):
    """Candidates, and the head's output that is fed back in the next step.

    hidden: [N,d] of all rows, in the plan's dtype; a view that the next call overwrites.
    """

    hidden: NDArray[Any]


class DraftEngine(CandidateEngine):
    """The engine of an EAGLE head. The rows of its text are made from the target's features.

    name: name of the head in the bundle; default: the first draft.
    columns: index that selects the columns [N,F] which this head fuses from the target's features
    [N,F'].
    """

    def __init__(self, bundle: Bundle, threads: int, clock: Clock, name: str | None = None) -> None:
        manifest = bundle.manifest
        name = next(iter(manifest.drafts)) if name is None else name
        plan, info = manifest.plan, manifest.drafts[name]
        # Load first: a manifest that does not match the graphs must not determine buffer sizes.
        self._fuse: Session | None = None
        if "draft_fuse" in DRAFT_ENGINES[info.method]:
            bound = _bound_fuse(manifest, info)
            self._fuse = load_session(
                bundle, engine_name(name, "draft_fuse"), bound, threads, clock
            )
        shape = ("B", "N", info.hidden_size)
        bound = bound_candidates(
            manifest,
            info,
            [TensorSpec("hidden", plan.dtype, shape)],
            [TensorSpec("hidden_out", plan.dtype, shape)],
        )
        session = load_session(bundle, engine_name(name, "draft"), bound, threads, clock)
        super().__init__(session, manifest, info)
        self.hidden_size = info.hidden_size
        self.columns = _columns(manifest.target, info)
        self.feature_size = feature_size_of(manifest.target, info)
        rows, dtype = self.max_rows, np.dtype(plan.dtype)
        self._features = Buffer(rows * self.feature_size, dtype)
        self._hidden_in = Buffer(rows * self.hidden_size, dtype)
        self._hidden_out = Buffer(rows * self.hidden_size, dtype)

    def feature_slots(self, num_rows: int) -> NDArray[Any]:
        """Return the buffer [N,F] into which the caller writes the features for `extend`."""
        slots: NDArray[Any] = self._features.view(1, num_rows, self.feature_size)[0]
        return slots

    def extend(self, next_ids: Int64s, top_k: int, want_logits: bool = False) -> DraftOutput:
        """Run rows with the target's features and keep them. Return candidates of the last row.

        The features must already be in `feature_slots`.

        next_ids: int64 [N]. The features of row i belong to position i, its token to position i +
        1.
        """
        self._fill_hidden(len(next_ids))
        return self._with_hidden(self._run_text(next_ids, top_k, want_logits), len(next_ids))

    def _fill_hidden(self, count: int) -> None:
        """Turn the first `count` feature rows into the draft's input `hidden` [N,d]."""
        if self._fuse is None:  # no fusion, so F = d
            self._hidden_in.view(1, count, self.hidden_size)[0] = self.feature_slots(count)
            return
        self._fuse.run(
            count,
            lambda: (
                {"features": self._features.value(1, count, self.feature_size)},
                {"hidden": self._hidden_in.value(1, count, self.hidden_size)},
            ),
        )

    def shared(self, num_rows: int) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
        """Return the OrtValues for another graph that takes turns with this engine on its cache.

        Returns the features [1,N,F] in `feature_slots`, and the cache as inputs past_* and as
        outputs present_*.
        """
        features = self._features.value(1, num_rows, self.feature_size)
        return features, self._bound_past, self._bound_present

    def keep_rows(self, count: int) -> None:
        """Keep `count` rows that another graph (see `shared`) has written after the kept ones."""
        self.num_rows += count
        self._num_used = max(self._num_used, self.num_rows)

    def step(
        self,
        ids: Int64s,
        hidden: NDArray[Any],
        depth: int,
        row_mask: NDArray[np.bool_],
        top_k: int,
        want_logits: bool = False,
    ) -> DraftOutput:
        """Run tree rows with the head's own output as features and return their candidates.

        ids: int64 [N], tokens of nodes at `depth` (1 = children of the root).
        hidden: [N,d], the `hidden` output of the parents of `ids`.
        row_mask: bool [N,W], the tree rows so far, including these, that each row attends to.
        """
        count = len(ids)
        self._hidden_in.view(1, count, self.hidden_size)[0] = hidden
        return self._with_hidden(self._run_tree(ids, depth, row_mask, top_k, want_logits), count)

    def _with_hidden(self, out: Candidates, count: int) -> DraftOutput:
        hidden = self._hidden_out.view(1, count, self.hidden_size)[0]
        return DraftOutput(out.top_ids, out.top_log_probs, out.logits, hidden)

    def _own_values(self, count: int, window: int) -> tuple[dict[str, Any], dict[str, Any]]:
        shape = (1, count, self.hidden_size)
        return (
            {"hidden": self._hidden_in.value(*shape)},
            {"hidden_out": self._hidden_out.value(*shape)},
        )


def feature_size_of(target: TargetInfo, info: DraftInfo) -> int:
    """Return F, the number of columns of the target's features that this head fuses."""
    return len(info.aux_layer_ids) * target.hidden_size


def _columns(target: TargetInfo, info: DraftInfo) -> slice | Int64s:
    """Return the columns of the target's features that the head fuses.

    All columns are returned as a slice, because indexing with a slice does not copy.
    """
    if info.aux_layer_ids == target.aux_layer_ids:
        return slice(None)
    width = target.hidden_size
    blocks = [target.aux_layer_ids.index(layer) for layer in info.aux_layer_ids]
    return np.concatenate([np.arange(block * width, (block + 1) * width) for block in blocks])


def _bound_fuse(manifest: Manifest, info: DraftInfo) -> Bound:
    """Return the tensors that the engine `draft_fuse` binds in `extend`."""
    dtype = manifest.plan.dtype
    return Bound(
        [TensorSpec("features", dtype, ("B", "N", feature_size_of(manifest.target, info)))],
        [TensorSpec("hidden", dtype, ("B", "N", info.hidden_size))],
    )
