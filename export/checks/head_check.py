"""The self-check of a head: its draft engines against the head in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.export.checks.readings import causal_attention
from eagle3.export.checks.reference import (
    AnyHead,
    Array,
    Reference,
    judge,
    num_threads,
    relative_error,
    with_int8_weights,
)
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.stats import Clock

_DRAFT_STEPS = 3


def check_head(
    bundle: Bundle,
    name: str,
    module: AnyHead,
    table: Tensor,
    reference: Reference,
    tolerance: float,
) -> dict[str, Any]:
    """Compare logits per step: rows with the target's features, then rows with the fed back
    output, K = 2.
    """
    engine = DraftEngine(bundle, num_threads(), Clock(), name)
    if bundle.manifest.drafts[name].weights == "int8":
        module = with_int8_weights(module)
    assert reference.features is not None
    count = min(48, len(reference.tokens) - 1, engine.max_rows)
    features = reference.features[:count, engine.columns]
    engine.feature_slots(count)[:] = features
    next_ids = reference.tokens[1 : count + 1]
    out = engine.extend(next_ids, top_k=2, want_logits=True)
    path = _DraftPath(module, reference, features, table)
    errors = {}
    hidden, ids = out.hidden[-1:].copy(), out.top_ids[0].copy()
    assert out.logits is not None
    errors["step_0"] = relative_error(out.logits[0], path.logits(()))
    # Two branches side by side: each row sees itself and its own ancestors.
    branches: list[tuple[int, ...]] = [(int(i),) for i in ids]
    hidden, mask = np.repeat(hidden, len(ids), 0), np.eye(len(ids), dtype=np.bool_)
    for depth in range(1, _DRAFT_STEPS + 1):
        tokens = np.array([branch[-1] for branch in branches], np.int64)
        out = engine.step(tokens, hidden, depth, mask, top_k=1, want_logits=True)
        assert out.logits is not None
        errors[f"step_{depth}"] = max(
            relative_error(found, path.logits(branch))
            for found, branch in zip(out.logits, branches, strict=True)
        )
        branches = [(*b, int(t[0])) for b, t in zip(branches, out.top_ids, strict=True)]
        hidden, mask = out.hidden.copy(), np.concatenate([mask, np.eye(len(ids), dtype=bool)], 1)
    judge(name, errors, tolerance)
    return {"tolerance": tolerance, "relative_errors": errors}


class _DraftPath:
    """The head in plain PyTorch, without cache or tree: one path at a time, from the start.

    table [V,d]: the embedding that it reads.
    """

    def __init__(
        self, module: AnyHead, reference: Reference, features: Array, table: Tensor
    ) -> None:
        self._module, self._table = module, table
        self._features = torch.from_numpy(features)[None].to(module.fc.weight)
        self._tokens = reference.tokens[1 : len(features) + 1].tolist()

    def logits(self, path: tuple[int, ...]) -> Array:
        """Return the logits [Vd] of the row with the last token of `path` (() is the last prefix
        row).
        """
        with torch.no_grad():
            g = self._module.fuse(self._features)
            for length in range(len(path) + 1):
                out = self._forward(g, [*self._tokens, *path[:length]])
                g = torch.cat([g, self._module.feed_back(out[:, -1:])], 1)
            return self._module.logits(out[:, -1:])[0, 0].numpy()

    def _forward(self, g: Tensor, tokens: list[int]) -> Tensor:
        positions = torch.arange(len(tokens))[None]
        embedding = torch.nn.functional.embedding(torch.tensor([tokens]), self._table)
        out: Tensor = self._module(embedding, g, positions, causal_attention)
        return out
