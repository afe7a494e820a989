"""The tensors of a head: compared with what its layout asks for, and the vocabulary mapping.

Letters: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from eagle3.runtime.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def check_tensors(
    layout: str, needed: Shapes, optional: Shapes, weights: Mapping[str, Tensor]
) -> None:
    """Refuses tensors that are missing, unexpected, misshapen, of a wrong dtype or no numbers.

    layout: its name, for the message. needed, optional: tensor name -> shape. Raises
    CheckpointError naming the tensors, with both shapes where they differ.
    """
    missing = sorted(set(needed) - set(weights))
    unexpected = sorted(set(weights) - set(needed) - set(optional))
    if missing or unexpected:
        raise CheckpointError(
            f"the head's tensors are not those of {layout}: missing {missing}, "
            f"unexpected {unexpected}"
        )
    expected = {**needed, **{name: shape for name, shape in optional.items() if name in weights}}
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} is {list(weights[name].shape)}, the config asks for {list(shape)}"
            )
    _check_dtypes({name: weights[name].dtype for name in expected})
    broken = sorted(n for n in expected if not bool(torch.isfinite(weights[n].float()).all()))
    if broken:
        raise CheckpointError(f"these tensors hold NaN or Inf: {', '.join(broken)}")


def _check_dtypes(dtypes: Mapping[str, torch.dtype]) -> None:
    """Ids are integers, weights are not: anything else was stored in a way we do not know."""
    for name, dtype in dtypes.items():
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if name == "d2t" and not is_integer:
            raise CheckpointError(f"tensor d2t is {dtype}; it must be of an integer dtype")
        if name not in ("d2t", "t2d") and not dtype.is_floating_point:
            raise CheckpointError(f"tensor {name} is {dtype}; weights must be floating point")


def target_ids(weights: Mapping[str, Tensor], draft_vocab_size: int, vocab_size: int) -> np.ndarray:
    """d2t as stored (offsets; by some exporters absolute ids) -> the target's ids [Vd] int64.

    Without d2t [Vd] draft ids are the target's. Raises CheckpointError when neither reading is a
    mapping that agrees with t2d [V] (method section 2).
    """
    if "d2t" not in weights:
        return np.arange(draft_vocab_size, dtype=np.int64)
    d2t = weights["d2t"].to(torch.int64).numpy()
    t2d = weights["t2d"].to(torch.bool).numpy() if "t2d" in weights else None
    for ids in (d2t + np.arange(len(d2t)), d2t):
        ascending = bool(np.all(np.diff(ids) > 0)) and ids[0] >= 0 and ids[-1] < vocab_size
        if ascending and (t2d is None or np.array_equal(np.flatnonzero(t2d), ids)):
            return ids
    raise CheckpointError(
        f"d2t [{draft_vocab_size}] maps to the target's vocabulary ({vocab_size}) neither as "
        "offsets nor as absolute ids: either reading must be ascending, unique, below the "
        "vocabulary size and agree with t2d"
    )
