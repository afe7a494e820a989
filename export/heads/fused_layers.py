"""Which of the target's layers a head fuses. Checkpoints count them in two ways that differ by
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.export.heads.assume import Assumptions
from eagle3.export.heads.dialects.dialect import AUX_LAYERS_KEY, Dialect
from eagle3.export.heads.dialects.fields import mapping
from eagle3.export.heads.head_config import Resolved
from eagle3.runtime.errors import CheckpointError

_COUNTS = {"outputs": "layer outputs, plus one", "inputs": "hidden_states indices"}


def aux_layers(
    dialect: Dialect,
    raw: Mapping[str, Any],
    assume: Assumptions,
    depth: int,
    flag: Sequence[int] | None,
) -> Resolved:
    """Return the fused layers as hidden_states indices of a target of `depth` layers, low to high.

    flag: hidden_states indices that override the checkpoint's. A checkpoint that counts layer
    outputs stores the index minus one: [1, 3] are hidden_states[2] and [4]. The output of the last
    of L layers, stored as L - 1, is index L, and like hidden_states[L] it is taken after the
    target's last norm.
    """
    if flag is not None:
        found = Resolved(list(flag), "flag")
    elif (stored := _stored(raw)) is not None:
        found = _counted(dialect, raw, stored, assume)
    elif dialect.method == "eagle1":
        found = Resolved([depth], "dialect default")
    else:
        found = Resolved([2, depth // 2, depth - 3], "dialect default")
    _check(found, dialect, depth)
    return found


def _stored(raw: Mapping[str, Any]) -> list[int] | None:
    inside, outside = mapping(raw, "eagle_config").get(AUX_LAYERS_KEY), raw.get(AUX_LAYERS_KEY)
    stored = outside if inside is None else inside
    if inside is not None and outside is not None and inside != outside:
        raise CheckpointError(f"the head's {AUX_LAYERS_KEY} is {outside}, and {inside} inside it")
    if stored is not None and not (
        isinstance(stored, list) and all(type(each) is int for each in stored)
    ):
        raise CheckpointError(f"{AUX_LAYERS_KEY} is {stored!r}, not a list of integers")
    return stored


def _counted(
    dialect: Dialect, raw: Mapping[str, Any], stored: list[int], assume: Assumptions
) -> Resolved:
    assumed = assume.take("layer_ids")
    if assumed is None and raw.get(AUX_LAYERS_KEY) is not None and not dialect.nested:
        raise CheckpointError(
            f"the head's config has {AUX_LAYERS_KEY} {stored} outside eagle_config; whether it "
            "counts layer outputs (plus one) or hidden_states indices is not known: say --assume "
            "layer_ids=outputs or layer_ids=inputs, or give the hidden_states indices with "
            "--aux-layers"
        )
    counts = assumed or dialect.layer_ids
    source = f"{'config' if assumed is None else 'flag'} ({_COUNTS[counts]})"
    return Resolved([i + (counts == "outputs") for i in stored], source)


def _check(found: Resolved, dialect: Dialect, depth: int) -> None:
    layers, source = found.value, found.source
    if dialect.method == "eagle1" and layers != [depth]:
        raise CheckpointError(
            f"aux layers {layers} ({source}): an EAGLE-1/2 head reads only the final hidden state "
            f"after the last norm, hidden_states[{depth}] of a target of {depth} layers"
        )
    low_to_high = bool(layers) and layers == sorted(set(layers))
    if not low_to_high or layers[0] < 0 or layers[-1] > depth:
        raise CheckpointError(
            f"aux layers {layers} ({source}) do not fit a target of {depth} layers: they must be "
            f"different hidden_states indices from 0 to {depth} (the final hidden state, after the "
            "last norm), low to high; give them with --aux-layers"
        )
