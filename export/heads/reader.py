"""Reads a draft checkpoint of any dialect. Every value is resolved, with its source, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.export.heads.assume import Assumptions
from eagle3.export.heads.checkpoint_files import Checkpoint, open_checkpoint
from eagle3.export.heads.fused_layers import aux_layers
from eagle3.export.heads.head_config import AUX_LAYERS, Head, TargetSizes
from eagle3.export.heads.recognize import recognize
from eagle3.export.heads.resolve import check_head_fits, head_config
from eagle3.export.heads.tensors import check_head_tensors, check_numbers
from eagle3.export.heads.ties import embedding_is_own, with_lm_head
from eagle3.export.heads.values import FLAG, Values
from eagle3.export.heads.vocabulary import target_ids
from eagle3.runtime.errors import CheckpointError


def read_head(
    source: str | Path,
    target: TargetSizes,
    aux_layer_ids: Sequence[int] | None = None,
    assume: Mapping[str, str] | None = None,
) -> Head:
    """Read the folder or hub id `source`.

    aux_layer_ids: hidden_states indices, which override the checkpoint's. assume: decisions of the
    user, from `parse_assumptions`. Raises CheckpointError that names the key or tensor and both
    values.
    """
    head = _read(open_checkpoint(source), target, aux_layer_ids, assume or {})
    check_numbers(head.checkpoint.weights)
    return head


def reread(
    head: Head,
    aux_layer_ids: Sequence[int] | None = None,
    assume: Mapping[str, str] | None = None,
) -> Head:
    """Return the same checkpoint under another reading, from memory. Weights are shared, not
    copied.

    What is not passed keeps its value from when `head` was read; of aux_layer_ids and layer_ids,
    the one that is passed replaces the other. Raises CheckpointError if the checkpoint cannot be
    read this way.
    """
    given, layers = {**head.assume, **(assume or {})}, head.aux_layer_ids
    if aux_layer_ids is not None:
        layers = tuple(aux_layer_ids)
        given.pop("layer_ids", None)
    elif "layer_ids" in (assume or {}):
        layers = None
    return _read(head.checkpoint, head.target, layers, given)


def _read(
    checkpoint: Checkpoint,
    target: TargetSizes,
    aux_layer_ids: Sequence[int] | None,
    given: Mapping[str, str],
) -> Head:
    assume = Assumptions(given)
    dialect, known_by = recognize(checkpoint, assume)
    raw = _without(checkpoint.raw, assume.ignored())
    dialect.check_keys(raw)
    values = Values(dialect.read_keys(raw), assume)
    values.resolved["dialect"] = known_by
    layers = aux_layers(dialect, raw, assume, target.num_layers, aux_layer_ids)
    values.resolved[AUX_LAYERS] = layers
    config = head_config(dialect, raw, values, target, checkpoint.weights, tuple(layers.value))
    weights = with_lm_head(config, values, checkpoint.weights)
    config = replace(config, own_embedding=embedding_is_own(config, values, weights, target))
    check_head_fits(config, target, weights, layers.source)
    check_head_tensors(config, weights)
    ids = target_ids(config, values, weights)
    if assume.ignored():
        values.note("ignored config keys", sorted(assume.ignored()), FLAG)
    assume.check_all_taken(f"this head ({dialect.name})")
    return Head(
        config=replace(config, conventions=values.resolved),
        weights=_official_names(weights),
        target_ids=ids,
        checkpoint=checkpoint,
        target=target,
        aux_layer_ids=None if aux_layer_ids is None else tuple(aux_layer_ids),
        assume=dict(given),
    )


def _without(raw: Mapping[str, Any], ignored: frozenset[str]) -> dict[str, Any]:
    """Return the config without the keys that the user ignores, at any level.

    Raises CheckpointError for a key that does not occur.
    """
    found: set[str] = set()

    def strip(level: Mapping[str, Any]) -> dict[str, Any]:
        found.update(ignored.intersection(level))
        kept = {key: value for key, value in level.items() if key not in ignored}
        return {k: strip(v) if isinstance(v, Mapping) else v for k, v in kept.items()}

    stripped = strip(raw)
    if absent := sorted(ignored - found):
        raise CheckpointError(f"--assume ignore: the head's config has no {', '.join(absent)}")
    return stripped


def _official_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the layer of an EAGLE-3 head `midlayer`; that of an EAGLE-1/2 head stays `layers.0`."""
    if "layers.0.hidden_norm.weight" not in weights:
        return dict(weights)
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: t
        for name, t in weights.items()
    }
