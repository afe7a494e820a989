"""A small causal LM as a draft: its engine over a cache of its own, a target's graph with top-k.

It reads tokens alone: no features, nothing fed back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import TensorSpec, engine_name
from eagle3.runtime.ort.candidates import CandidateEngine, Candidates, Int64s, bound_candidates
from eagle3.runtime.ort.kv_cache import Buffer
from eagle3.runtime.ort.session import load_session
from eagle3.runtime.stats import Clock


class ModelEngine(CandidateEngine):
    """The LM `name` of a bundle. Positions of all rows of the tree so far are an input: a sliding
    window reads them.
    """

    def __init__(self, bundle: Bundle, name: str, threads: int, clock: Clock) -> None:
        manifest, info = bundle.manifest, bundle.manifest.drafts[name]
        # First, so that a manifest which does not fit the graph sizes no buffer.
        bound = bound_candidates(
            manifest, info, [TensorSpec("window_positions", "int64", ("B", "W"))]
        )
        session = load_session(bundle, engine_name(name, "draft"), bound, threads, clock)
        super().__init__(session, manifest, info)
        self._window = Buffer(self._max_window, np.int64)

    def extend(self, ids: Int64s, top_k: int, want_logits: bool = False) -> Candidates:
        """Runs the next tokens [N] of the text and keeps their rows; candidates of the last one."""
        count = len(ids)
        self._window.view(1, count)[0] = np.arange(self.num_rows, self.num_rows + count)
        return self._run_text(ids, top_k, want_logits)

    def step(
        self,
        ids: Int64s,
        depth: int,
        row_mask: NDArray[np.bool_],
        top_k: int,
        want_logits: bool = False,
    ) -> Candidates:
        """Runs tree rows behind the text, whose last token is the root; see `_run_tree`."""
        count, window = row_mask.shape
        # Those of the levels before are there.
        self._window.view(1, window)[0, window - count :] = self.num_rows - 1 + depth
        return self._run_tree(ids, depth, row_mask, top_k, want_logits)

    def _own_values(self, count: int, window: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"window_positions": self._window.value(1, window)}, {}
