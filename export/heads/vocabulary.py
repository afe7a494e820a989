"""Maps draft ids to the target's ids. Letters: V target vocabulary, Vd draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from eagle3.export.heads.head_config import HeadConfig
from eagle3.export.heads.values import DEFAULT, FLAG, TENSORS, Values
from eagle3.runtime.errors import CheckpointError

_READINGS = ("offsets", "absolute")


def target_ids(config: HeadConfig, values: Values, weights: Mapping[str, Tensor]) -> np.ndarray:
    """Return the target's ids [Vd] int64 from the stored d2t [Vd] (method section 2).

    d2t holds offsets, target id minus draft id; without it draft ids are the target's. Raises
    CheckpointError if the mapping is invalid or contradicts t2d [V], and, unless the user decides,
    if d2t can be read as ids as well as, or instead of, offsets.
    """
    if "d2t" not in weights:
        values.note("d2t", "none: draft ids are the target's", TENSORS)
        return np.arange(config.draft_vocab_size, dtype=np.int64)
    assumed = values.assume.take("d2t")
    ids = _read(weights, config.vocab_size, assumed)
    values.note("d2t", assumed or "offsets", FLAG if assumed else DEFAULT)
    return ids


def _read(weights: Mapping[str, Tensor], vocab_size: int, assumed: str | None) -> np.ndarray:
    d2t = weights["d2t"].to(torch.int64).numpy()
    t2d = weights["t2d"].to(torch.bool).numpy() if "t2d" in weights else None
    ids = {"offsets": d2t + np.arange(len(d2t)), "absolute": d2t}
    fitting = [name for name in _READINGS if _is_mapping(ids[name], vocab_size, t2d)]
    shape = f"d2t [{len(d2t)}]"
    rule = f"ascending, unique, below the vocabulary size {vocab_size}, and those that t2d marks"
    if not fitting:
        raise CheckpointError(
            f"{shape} maps to the target's vocabulary neither as offsets nor as absolute ids: the "
            f"target's ids must be {rule}"
        )
    if assumed is not None:
        if assumed not in fitting:
            raise CheckpointError(
                f"{shape} cannot be read as {assumed}: the target's ids must be {rule}"
            )
        return ids[assumed]
    if fitting == ["absolute"]:
        raise CheckpointError(
            f"{shape} is not a valid mapping as offsets, as expected, but would be one as absolute "
            "ids: if the exporter wrote those, say --assume d2t=absolute"
        )
    if len(fitting) == 2 and not np.array_equal(ids["offsets"], d2t):
        raise CheckpointError(
            f"{shape} is a mapping as offsets and as absolute ids, and no t2d decides: say "
            "--assume d2t=offsets or --assume d2t=absolute"
        )
    return ids["offsets"]


def _is_mapping(ids: np.ndarray, vocab_size: int, t2d: np.ndarray | None) -> bool:
    ascending = bool(np.all(np.diff(ids) > 0)) and ids[0] >= 0 and ids[-1] < vocab_size
    return ascending and (t2d is None or np.array_equal(np.flatnonzero(t2d), ids))
