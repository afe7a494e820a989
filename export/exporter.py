"""Exports a target and its drafts into a checked bundle (`eagle3 export`).

Everything is written into a temporary folder that becomes the bundle at the end (`publish.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
import torch

from eagle3.export.checks.quality import measure_quality
from eagle3.export.checks.reference import num_threads
from eagle3.export.checks.self_check import SelfCheck, check_bundle
from eagle3.export.drafts.draft_source import Draft, DraftSource, is_causal_lm, load_draft
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.tracer import save
from eagle3.export.graphs.weights import StoredGraph, embedding_name, quantize_int8, unshare_int8
from eagle3.export.heads.assume import parse_assumptions
from eagle3.export.int8.int8_products import (
    Rounded,
    quantize_lookups,
    quantize_products,
    unquantized_names,
)
from eagle3.export.int8.int8_reference import ModelWeights
from eagle3.export.int8.rounding import calibration_tokens, rounded_weights
from eagle3.export.publish import check_output, publish, staging
from eagle3.export.targets.target import Target, load_target, trace_target
from eagle3.export.targets.tokenizer_files import write_tokenizer
from eagle3.plans.lint.ort_cuda_lint import lint_ort_cuda
from eagle3.plans.plan import Plan
from eagle3.runtime.bundle.folder import Bundle, describe_files, write_manifest
from eagle3.runtime.bundle.manifest import (
    HEAD_METHODS,
    DraftInfo,
    EngineInfo,
    Manifest,
    TargetInfo,
    TensorSpec,
    engine_name,
)
from eagle3.runtime.errors import ExportError
from eagle3.runtime.ort.growth_engine import ENGINE as GROWTH
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import Clock

Report = Callable[[str], None]
Drafts = Mapping[str, Draft]  # by name in the bundle, the default first


@dataclass(frozen=True)
class ExportRequest:
    """What to export. The plan's tree and draft weights apply to every draft.

    drafts: the default first; empty for plain decoding. assume: KEY=VALUE, decisions of the user
    where a head's checkpoint is ambiguous.
    """

    target: str
    drafts: tuple[DraftSource, ...]
    output: Path
    plan: Plan
    aux_layer_ids: tuple[int, ...] | None = None
    assume: tuple[str, ...] = ()
    trust_remote_code: bool = False
    force: bool = False
    calibration: Path | None = None
    accept_quality: bool = False
    command: str = "eagle3 export"


class ReadsDrafts(Protocol):
    """The fields of a request that matter for reading a draft."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None: ...

    @property
    def assume(self) -> tuple[str, ...]: ...

    @property
    def trust_remote_code(self) -> bool: ...


def export_bundle(
    request: ExportRequest, report: Report = lambda _: None
) -> tuple[Bundle, SelfCheck]:
    """Export, check, and move the finished bundle to request.output.

    Raises PlanError and ExportError (UnsupportedModel, CheckpointError, SelfCheckFailed); a failed
    export leaves nothing behind.
    """
    request.plan.require_built()
    check_output(request.output, request.force)
    plan = request.plan
    # Report invalid assumptions before the long work.
    parse_assumptions(request.assume)
    heads = [each.source for each in request.drafts if not is_causal_lm(each.source)]
    _refuse_options_of_one_head(request, heads)
    report(f"loading target {request.target}")
    target = load_target(
        request.target,
        plan.dtype,
        trust_remote_code=request.trust_remote_code,
        max_seq_len=plan.max_seq_len,
    )
    drafts: dict[str, Draft] = {}
    for each in request.drafts:
        name, draft = load_named(each, target, plan, request)
        refuse_name_twice(name, drafts)
        drafts[name] = draft
    with staging(request.output) as folder:
        engines = _write_engines(folder, target, drafts, plan, request.calibration, report)
        check_device_graphs(folder, engines, plan)
        check = _finish(folder, target, drafts, engines, request, report)
        check_output(request.output, request.force)  # again, since much time has passed
        publish(folder, request.output)
    return Bundle.open(request.output), check


def _refuse_options_of_one_head(request: ExportRequest, heads: Sequence[str]) -> None:
    given = {"--aux-layers": request.aux_layer_ids is not None, "--assume": bool(request.assume)}
    for option in (name for name, is_given in given.items() if is_given):
        if not heads:
            raise ExportError(
                f"{option} applies to draft heads only, and there is none: leave it out"
            )
        if len(heads) > 1:
            raise ExportError(
                f"{option} applies to one head, got {len(heads)}: {', '.join(heads)}; export one of"
                " them, and add the others with --add-draft"
            )


def load_named(
    source: DraftSource, target: Target, plan: Plan, request: ReadsDrafts
) -> tuple[str, Draft]:
    """Return a draft and its name in the bundle."""
    draft = load_draft(
        source.source,
        target,
        plan,
        aux_layer_ids=request.aux_layer_ids,
        assume=request.assume,
        trust_remote_code=request.trust_remote_code,
    )
    return source.name or draft.method, draft


def refuse_name_twice(name: str, others: Mapping[str, Any]) -> None:
    if name in others:
        raise ExportError(
            f"drafter {name} already exists (drafters: {', '.join(others)}): use another name, as"
            " in mine=PATH, or pass --force with --add-draft to replace it"
        )


def _write_engines(
    folder: Path,
    target: Target,
    drafts: Drafts,
    plan: Plan,
    calibration: Path | None,
    report: Report,
) -> dict[str, EngineInfo]:
    """Write the target, which outputs all layers that the drafts fuse, and the engines of each
    draft.
    """
    report(f"tracing {target.architecture} ({plan.lowering} lowering)")
    lowering = LOWERINGS[plan.lowering]
    model = trace_target(target, lowering, _aux_layer_ids(drafts), plan.cache_capacity)
    if plan.target_weights == "int8":
        quantize_products(model, _rounded(target, calibration, report))
    stored = StoredGraph(model, save(model, folder / "target.onnx"))
    engines = {"target": _describe(model, "target.onnx")}
    for name, draft in drafts.items():
        engines |= write_draft(folder, name, draft, target, stored, plan, report)
    return engines


def _rounded(target: Target, calibration: Path | None, report: Report) -> Rounded:
    """Return the int8 weights by their names in the graph, rounded on a calibration text."""
    for name, parameter in target.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ExportError(
                f"target {target.source}: {name} has values that are not finite, which int8 cannot"
                " represent: export it with --weights same"
            )
    found = rounded_weights(target, calibration_tokens(target, calibration), report)
    weights = ModelWeights(target.model)
    return lambda name: found.get(weights[name].data_ptr())


def check_device_graphs(folder: Path, engines: Mapping[str, EngineInfo], plan: Plan) -> None:
    """Raise BuildError if ONNX Runtime's CUDA provider would run nodes of the plan's graphs on the
    CPU.
    """
    if plan.backend == "ort-cuda":
        for name, engine in engines.items():
            if name == "target" or name.endswith(f".{GROWTH}"):
                lint_ort_cuda(folder / engine.file)


def _aux_layer_ids(drafts: Drafts) -> tuple[int, ...]:
    return tuple(sorted({layer for draft in drafts.values() for layer in draft.aux_layer_ids}))


def write_draft(
    folder: Path,
    name: str,
    draft: Draft,
    target: Target,
    stored: StoredGraph,
    plan: Plan,
    report: Report,
) -> dict[str, EngineInfo]:
    """Write the engines of a draft and describe them, by their names in the bundle."""
    report(f"tracing the draft {name}")
    engines = {}
    written: dict[str, ir.ExternalTensor] = {}
    embedding = None
    for role, graph in draft.engines(target, plan).items():
        if role == "draft" and plan.target_weights == "int8" and draft.reads_target_embedding:
            embedding = embedding_name(graph)
        if embedding is not None:
            quantize_lookups(graph, embedding, stored.graph)
        is_int8 = plan.draft_weights == "int8"
        if is_int8:
            quantize_int8(graph)
        if is_int8 and LOWERINGS[plan.lowering].fuses:
            unshare_int8(graph)
        shared = draft.shared(graph, stored) if role == "draft" else {}
        if role == GROWTH:  # its layers are copies of the other engines' layers
            sources = {own: own.partition("#")[0] for own in graph.graph.initializers}
            shared = {own: written[each] for own, each in sources.items() if each in written}
        engine = engine_name(name, role)
        written |= shared | save(graph, folder / f"{engine}.onnx", shared)
        engines[engine] = _describe(graph, f"{engine}.onnx")
    if draft.method in HEAD_METHODS and engine_name(name, GROWTH) not in engines:
        report(
            f"no graph grows the tree of {name}, static or too large: it takes one call per level"
        )
    draft.write_files(folder, name)
    return engines


def _describe(model: ir.Model, file: str) -> EngineInfo:
    def specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=str(v.name),
                dtype=v.dtype.numpy().name if v.dtype is not None else "",
                shape=tuple(d if isinstance(d, int) else str(d) for d in v.shape or ()),
            )
            for v in values
        )

    return EngineInfo(file, specs(model.graph.inputs), specs(model.graph.outputs))


def _finish(
    folder: Path,
    target: Target,
    drafts: Drafts,
    engines: Mapping[str, EngineInfo],
    request: ExportRequest,
    report: Report,
) -> SelfCheck:
    """Write tokenizer and manifest, run the self-check, and write the manifest again with its
    results.
    """
    tokenizer, generation = write_tokenizer(target, folder)
    manifest = Manifest(
        created_by=_versions(),
        command=request.command,
        plan=request.plan,
        target=target_info(target, _aux_layer_ids(drafts)),
        drafts={
            name: draft_info(source, draft, request.plan, request.command)
            for source, (name, draft) in zip(request.drafts, drafts.items(), strict=True)
        },
        engines=engines,
        files=describe_files(folder),
        tokenizer=tokenizer,
        generation=generation,
        self_check={},
    )
    write_manifest(folder, manifest)
    if request.plan.target_weights == "int8":
        quality = _quality(folder, target, request, report)
    check = compare(folder, target, drafts, report)
    if request.plan.target_weights == "int8":
        check.engines |= quality
    write_manifest(folder, replace(with_checks(manifest, check), self_check=check.engines))
    return check


def _quality(
    folder: Path, target: Target, request: ExportRequest, report: Report
) -> dict[str, Any]:
    """Return the facts about the quantization that the manifest contains."""
    report("comparing the int8 target with the original")
    bundle = Bundle.open(folder)
    quality = measure_quality(TargetEngine(bundle, num_threads(), Clock()), target)
    if not request.accept_quality:
        quality.refuse_low()
    graph = ir.load(bundle.path(bundle.manifest.engines["target"].file))
    return {"quality": quality.to_json(), "not_quantized": unquantized_names(graph)}


def compare(folder: Path, target: Target, drafts: Drafts, report: Report) -> SelfCheck:
    report("comparing the engines with PyTorch")
    return check_bundle(Bundle.open(folder), target, drafts, report)


def with_checks(manifest: Manifest, check: SelfCheck) -> Manifest:
    """Return the manifest with the results of each draft."""
    drafts = {
        name: replace(info, checks=check.drafts.get(name, info.checks))
        for name, info in manifest.drafts.items()
    }
    return replace(manifest, drafts=drafts)


def _versions() -> dict[str, str]:
    packages = ("eagle3", "torch", "transformers", "onnx", "onnx-ir", "onnxruntime")
    return {name: version(name) for name in packages}


def target_info(target: Target, layers: tuple[int, ...]) -> TargetInfo:
    return TargetInfo(
        architecture=target.architecture,
        vocab_size=target.vocab_size,
        hidden_size=target.config.hidden_size,
        num_layers=target.kv.num_layers,
        num_kv_heads=target.kv.num_kv_heads,
        head_dim=target.kv.head_dim,
        max_position_embeddings=getattr(target.config, "max_position_embeddings", 1 << 20),
        aux_layer_ids=layers,
        feature_size=len(layers) * target.config.hidden_size,
        source=Path(target.source).name,
    )


def draft_info(source: DraftSource, draft: Draft, plan: Plan, command: str) -> DraftInfo:
    return DraftInfo(
        method=draft.method,
        source=Path(source.source).name,
        aux_layer_ids=draft.aux_layer_ids,
        weights=plan.draft_weights,
        tree=plan.tree,
        checks={},
        command=command,
        **draft.facts(),
    )
