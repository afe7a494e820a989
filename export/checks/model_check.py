"""The self-check of a small LM as a draft: its engine against the PyTorch model it came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.export.checks.reference import judge, num_threads, relative_error, with_int8_weights
from eagle3.export.targets.target import Target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.model_engine import ModelEngine
from eagle3.runtime.stats import Clock

_TEXT_ROWS = 48
_STEPS = 3


def check_model(
    bundle: Bundle, name: str, lm: Target, tokens: NDArray[np.int64], tolerance: float
) -> dict[str, Any]:
    """Compare a text in two calls, then two branches side by side, level by level.

    Raises SelfCheckFailed if a row's logits are not those of its path in PyTorch.
    """
    engine = ModelEngine(bundle, name, num_threads(), Clock())
    info = bundle.manifest.drafts[name]
    model: Any = with_int8_weights(lm.model) if info.weights == "int8" else lm.model
    text = np.minimum(tokens[: min(_TEXT_ROWS, engine.max_rows)], info.draft_vocab_size - 1)

    def expected(branch: tuple[int, ...]) -> NDArray[Any]:
        ids = torch.tensor([[*text.tolist(), *branch]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        return logits[: info.draft_vocab_size].float().numpy()  # type: ignore[no-any-return]

    engine.extend(text[: len(text) // 2], top_k=1)
    out = engine.extend(text[len(text) // 2 :], top_k=2, want_logits=True)
    assert out.logits is not None
    errors = {"step_0": relative_error(out.logits[0], expected(()))}
    branches: list[tuple[int, ...]] = [(int(token),) for token in out.top_ids[0]]
    mask = own = np.eye(len(branches), dtype=np.bool_)
    for depth in range(1, _STEPS + 1):
        ids = np.array([branch[-1] for branch in branches], np.int64)
        out = engine.step(ids, depth, mask, top_k=1, want_logits=True)
        assert out.logits is not None
        errors[f"step_{depth}"] = max(
            relative_error(found, expected(branch))
            for found, branch in zip(out.logits, branches, strict=True)
        )
        branches = [(*b, int(t[0])) for b, t in zip(branches, out.top_ids, strict=True)]
        mask = np.concatenate([mask, own], 1)
    judge(name, errors, tolerance)
    return {"tolerance": tolerance, "relative_errors": errors}
