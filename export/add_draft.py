"""Adds a draft to an existing bundle (`eagle3 export --add-draft`).

The target's graph stays unchanged, so a head must use hidden states that it already outputs. The
bundle is replaced at the end, or stays as it was (`publish.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eagle3.export.checks.self_check import SelfCheck
from eagle3.export.drafts.draft_source import Draft, DraftSource, is_causal_lm
from eagle3.export.exporter import (
    check_device_graphs,
    compare,
    draft_info,
    load_named,
    refuse_name_twice,
    target_info,
    with_checks,
    write_draft,
)
from eagle3.export.graphs.weights import INT8, StoredGraph, embedding_name
from eagle3.export.int8.int8_reference import ModelWeights, stored_int8
from eagle3.export.publish import check_output, copy_files, publish, staging
from eagle3.export.targets.target import Target, load_target
from eagle3.plans.tensorrt.plan_files import FOLDER
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle, describe_files, write_manifest
from eagle3.runtime.bundle.manifest import Manifest, TargetInfo
from eagle3.runtime.errors import BundleError, ExportError, SelfCheckFailed


@dataclass(frozen=True)
class AddRequest:
    """A draft for an existing bundle. target: the source that the bundle was exported from. force:
    replace a draft of the same name.
    """

    target: str
    draft: DraftSource
    output: Path
    tree: TreePlan
    draft_weights: str
    aux_layer_ids: tuple[int, ...] | None = None
    assume: tuple[str, ...] = ()
    trust_remote_code: bool = False
    force: bool = False
    command: str = "eagle3 export"


def add_draft(
    request: AddRequest, report: Callable[[str], None] = lambda _: None
) -> tuple[Bundle, SelfCheck]:
    """Add a draft to the bundle request.output, after its other drafts. The target's graph stays.

    The bundle is replaced at the end, or stays as it was. Raises ExportError, also if the target
    does not output the layers that a head fuses or is not the bundle's target, and BundleError if
    there is no bundle.
    """
    check_output(request.output, force=True)
    bundle = Bundle.open(request.output)
    is_causal_lm(request.draft.source)  # reports an invalid draft before the long work
    before = bundle.manifest
    plan = replace(before.plan, tree=request.tree, draft_weights=request.draft_weights)
    report(f"loading target {request.target}")
    target = load_target(
        request.target,
        plan.dtype,
        trust_remote_code=request.trust_remote_code,
        max_seq_len=plan.max_seq_len,
    )
    stored = StoredGraph.load(bundle.path(before.engines["target"].file))
    _refuse_other_target(request.target, target, bundle, stored)
    name, draft = load_named(request.draft, target, plan, request)
    if not request.force:
        refuse_name_twice(name, before.drafts)
    _refuse_other_layers(request, draft, before.target)
    with staging(request.output) as folder:
        own = f"{name}."  # names of this draft's files in the bundle begin with it
        kept = [file for file in before.files if not file.startswith(own)]
        copy_files(bundle, kept, folder)
        engines = write_draft(folder, name, draft, target, stored, plan, report)
        check_device_graphs(folder, engines, plan)
        others = {k: v for k, v in before.engines.items() if not k.startswith(own)}
        info = draft_info(request.draft, draft, plan, request.command)
        manifest = replace(
            before,
            drafts={**before.drafts, name: info},
            engines={**others, **engines},
            files=describe_files(folder),
        )
        _refuse_altered(bundle, kept, manifest)
        write_manifest(folder, manifest)
        try:
            check = compare(folder, target, {name: draft}, report)
        except SelfCheckFailed as error:
            raise SelfCheckFailed(
                f"{error}; or {request.target} is a sibling of what {request.output} was exported"
                f" from, {before.target.source}: give that one"
            ) from error
        write_manifest(folder, with_checks(manifest, check))
        _refuse_changed(request.output, before)
        _copy_plan_files(bundle.root, folder, own)
        publish(folder, request.output)
    return Bundle.open(request.output), check


def _refuse_changed(output: Path, before: Manifest) -> None:
    """Raise ExportError if the bundle changed meanwhile: another draft may have been added and
    would be lost.
    """
    if Bundle.open(output).manifest != before:
        raise ExportError(f"{output} was changed by another export meanwhile: run this one again")


def _copy_plan_files(root: Path, folder: Path, own: str) -> None:
    """Copy TensorRT's files of the engines that stay. They are not in the manifest and take long
    to build.
    """
    if (root / FOLDER).is_dir():
        shutil.copytree(root / FOLDER, folder / FOLDER, ignore=shutil.ignore_patterns(f"{own}*"))


def _refuse_other_target(source: str, target: Target, bundle: Bundle, stored: StoredGraph) -> None:
    """Raise ExportError unless sizes and embedding match. The self-check finds other
    differences.
    """
    info = bundle.manifest.target
    found = target_info(target, info.aux_layer_ids)
    for field in ("architecture", "vocab_size", "hidden_size", "num_layers", "num_kv_heads"):
        own, other = getattr(info, field), getattr(found, field)
        if own != other:
            raise ExportError(
                f"{bundle.root} was not exported from {source}: its {field} is"
                f" {own}, not {other}; use the target named in its manifest, {info.source}"
            )
    if not _has_embedding_of(target, bundle, stored):
        raise ExportError(
            f"{bundle.root} was not exported from {source}: their embeddings"
            f" differ; use the target named in its manifest, {info.source}"
        )


def _has_embedding_of(target: Target, bundle: Bundle, stored: StoredGraph) -> bool:
    """Return whether a bundle contains the target's embedding. A tiny one is not compared, because
    it is not in the weight file.
    """
    own, name = target.model.get_input_embeddings().weight.detach(), embedding_name(stored.graph)
    if name not in stored.weights:
        return True
    if bundle.manifest.plan.target_weights == "int8":
        int8 = stored_int8(stored.graph, ModelWeights(target.model))
        return int8[name.removesuffix(INT8)].is_rounded(own)
    embedding = stored.weights[name].numpy().astype(np.float32)
    return np.array_equal(embedding, own.float().numpy())


def _refuse_other_layers(request: AddRequest, draft: Draft, target: TargetInfo) -> None:
    missing = [layer for layer in draft.aux_layer_ids if layer not in target.aux_layer_ids]
    if missing:
        raise ExportError(
            f"draft {request.draft.source} fuses hidden_states {[*draft.aux_layer_ids]}, but the"
            f" target of {request.output} outputs only {[*target.aux_layer_ids] or 'none'}, and"
            " --add-draft does not trace it again; export the bundle again with --draft per head"
        )


def _refuse_altered(bundle: Bundle, kept: Sequence[str], described: Manifest) -> None:
    """Raise ExportError if a file that stays differs from the manifest; otherwise a damaged file
    would get a valid hash.
    """
    for name in kept:
        if described.files[name] != bundle.manifest.files[name]:
            raise BundleError(
                f"{bundle.root / name} is not the exported file: its SHA-256 differs from the"
                f" manifest's;"
                " copy the bundle or export it again"
            )
