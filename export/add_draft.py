"""`eagle3 export --add-draft`: one more draft for a bundle that is there.

The target's graph stays as it is, so a head must be content with the hidden states that it puts
out. The bundle is replaced at the end, or stays as it was (`publish.py`).
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
from eagle3.export.graphs.weights import StoredGraph, embedding_name
from eagle3.export.publish import check_output, copy_files, publish, staging
from eagle3.export.targets.target import Target, load_target
from eagle3.plans.tensorrt.plan_files import FOLDER
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle, describe_files, write_manifest
from eagle3.runtime.bundle.manifest import Manifest, TargetInfo
from eagle3.runtime.errors import BundleError, ExportError, SelfCheckFailed


@dataclass(frozen=True)
class AddRequest:
    """A draft for a bundle that is there. target: what the bundle was exported from; force: it
    replaces a draft of its name."""

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
    """Adds a draft to the bundle request.output, behind its others; the target's graph stays.

    The bundle is replaced at the end, or stays as it is. Raises ExportError: also where the target
    does not put out what a head fuses, or is not the bundle's own; BundleError for no bundle.
    """
    check_output(request.output, force=True)
    bundle = Bundle.open(request.output)
    is_causal_lm(request.draft.source)  # a wrong one is said before the long work
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
        own = f"{name}."  # what a draft of this name has in the bundle begins so
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
    """Much time has passed: another draft may have been added, and would be lost."""
    if Bundle.open(output).manifest != before:
        raise ExportError(f"{output} was changed by another export meanwhile: run this one again")


def _copy_plan_files(root: Path, folder: Path, own: str) -> None:
    """TensorRT's files of the engines that stay; they are in no manifest, and long to build."""
    if (root / FOLDER).is_dir():
        shutil.copytree(root / FOLDER, folder / FOLDER, ignore=shutil.ignore_patterns(f"{own}*"))


def _refuse_other_target(source: str, target: Target, bundle: Bundle, stored: StoredGraph) -> None:
    """Sizes and embedding tell it from others of its family; the self-check tells the rest."""
    info = bundle.manifest.target
    found = target_info(target, info.aux_layer_ids)
    for field in ("architecture", "vocab_size", "hidden_size", "num_layers", "num_kv_heads"):
        own, other = getattr(info, field), getattr(found, field)
        if own != other:
            raise ExportError(
                f"{bundle.root} was exported from another target than {source}: its {field} is"
                f" {own}, not {other}; give the target that its manifest names, {info.source}"
            )
    embedding = stored.weights.get(embedding_name(stored.graph))
    own = target.model.get_input_embeddings().weight.detach().float().numpy()
    if embedding is not None and not np.array_equal(embedding.numpy().astype(np.float32), own):
        raise ExportError(
            f"{bundle.root} was exported from another target than {source}: their embeddings"
            f" differ; give the target that its manifest names, {info.source}"
        )


def _refuse_other_layers(request: AddRequest, draft: Draft, target: TargetInfo) -> None:
    missing = [layer for layer in draft.aux_layer_ids if layer not in target.aux_layer_ids]
    if missing:
        raise ExportError(
            f"draft {request.draft.source} fuses hidden_states {[*draft.aux_layer_ids]}, but the"
            f" target of {request.output} puts out {[*target.aux_layer_ids] or 'none'}, and its"
            " graph is not traced again here; export the bundle anew with a --draft for each head"
        )


def _refuse_altered(bundle: Bundle, kept: Sequence[str], described: Manifest) -> None:
    """Files that stay must be what the manifest said, or a damaged one would be described anew."""
    for name in kept:
        if described.files[name] != bundle.manifest.files[name]:
            raise BundleError(
                f"{bundle.root / name} is foreign or altered: its SHA-256 is not the manifest's;"
                " copy the bundle or export it again"
            )
