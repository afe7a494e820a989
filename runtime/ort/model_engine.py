"""The engine of a small causal LM as a draft.

Its graph is like that of a target, plus top-k, and it has its own KV cache. Its only input is
tokens: it uses no features and feeds nothing back.
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
    """The engine of the draft LM `name` of a bundle.

    The positions of all tree rows so far are an additional input, which a sliding window needs.
    """

    def __init__(self, bundle: Bundle, name: str, threads: int, clock: Clock) -> None:
        manifest, info = bundle.manifest, bundle.manifest.drafts[name]
        # Load first: a manifest that does not match the graph must not determine buffer sizes.
        bound = bound_candidates(
            manifest, info, [TensorSpec("window_positions", "int64", ("B", "W"))]
        )
        session = load_session(bundle, engine_name(name, "draft"), bound, threads, clock)
        super().__init__(session, manifest, info)
        self._window = Buffer(self._max_window, np.int64)

    def extend(self, ids: Int64s, top_k: int, want_logits: bool = False) -> Candidates:
        """Run the next tokens [N] of the text and keep their rows.

        Returns the candidates of the last row.
        """
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
        """Run tree rows after the text, whose last token is the root; return their candidates.

        ids: int64 [N], tokens of nodes at `depth` (1 = children of the root).
        row_mask: bool [N,W], the tree rows so far, including these, that each row attends to.
        """
        count, window = row_mask.shape
        # The positions of earlier levels are already in the buffer.
        self._window.view(1, window)[0, window - count :] = self.num_rows - 1 + depth
        return self._run_tree(ids, depth, row_mask, top_k, want_logits)

    def _own_values(self, count: int, window: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"window_positions": self._window.value(1, window)}, {}
