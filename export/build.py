"""`eagle3 export`: target and head in, a checked bundle out.

Everything is written to a temporary folder beside the output and renamed at the end, so an export
that is interrupted or fails its self-check leaves nothing half done.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle3.export.attention import LOWERINGS
from eagle3.export.check import SelfCheck, check_bundle
from eagle3.export.draft import trace_draft_engines
from eagle3.export.head_config import Head, TargetFacts, read_head
from eagle3.export.head_files import head_folder, read_config
from eagle3.export.head_graph import Eagle1Head, EagleHead, build_eagle1_head, build_head
from eagle3.export.onnx_graph import save
from eagle3.export.target import DTYPES, Target, lm_head_weight, load_target, trace_target
from eagle3.export.tokenizer import write_tokenizer
from eagle3.export.weights import (
    embedding_name,
    lm_head_name,
    quantize_int8,
    store_for_matmul,
)
from eagle3.plans.plan import Plan
from eagle3.plans.tensorrt_files import FOLDER, foreign_files
from eagle3.runtime.bundle import MANIFEST_NAME, Bundle, describe_files, write_manifest
from eagle3.runtime.errors import ExportError
from eagle3.runtime.manifest import (
    FORMAT,
    Convention,
    DraftInfo,
    EngineInfo,
    Manifest,
    TargetInfo,
    TensorSpec,
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """What to export, into which plan. draft: a head's folder or id, or None."""

    target: str
    draft: str | None
    output: Path
    plan: Plan
    aux_layer_ids: tuple[int, ...] | None = None
    trust_remote_code: bool = False
    force: bool = False
    command: str = "eagle3 export"


@dataclass
class _Parts:
    """What the manifest is made of, filled by the stages of `_write`."""

    target: Target
    head: Head | None
    head_module: EagleHead | Eagle1Head | None
    engines: dict[str, EngineInfo] = field(default_factory=dict)


def export_bundle(
    request: ExportRequest, report: Report = lambda _: None
) -> tuple[Bundle, SelfCheck]:
    """Exports, checks, and moves the finished bundle to request.output.

    Raises ExportError (UnsupportedModel, CheckpointError, SelfCheckFailed) and leaves no trace.
    """
    _check_output(request)
    if request.draft is not None:
        read_config(head_folder(request.draft))  # a wrong one is said before the long work
    report(f"loading target {request.target}")
    plan = request.plan
    target = load_target(
        request.target,
        plan.dtype,
        trust_remote_code=request.trust_remote_code,
        max_seq_len=plan.max_seq_len,
    )
    head = _read_head(request, target)
    module = _build_module(head, target, plan) if head is not None else None
    with _staging(request.output) as folder:
        parts = _Parts(target, head, module)
        _write_engines(folder, parts, plan, report)
        check = _finish(folder, parts, plan, request, report)
        _check_output(request)  # again: much time has passed
        _publish(folder, request.output)
    return Bundle.open(request.output), check


def _check_output(request: ExportRequest) -> None:
    """An output that cannot or must not be written is said before the long work."""
    output = request.output
    if output.name in ("", ".."):
        raise ExportError(f"output {output} has no name of its own; give one, as in ./bundle")
    with _staging(output):
        pass
    if not output.exists():
        return
    if not request.force:
        raise ExportError(f"{output} exists; choose another folder or pass --force to replace it")
    found = _foreign(output)
    if found:
        raise ExportError(
            f"{output} exists and is not a bundle alone: {found}; it will not be replaced,"
            " so choose another folder, or move it away"
        )


def _foreign(output: Path) -> str:
    """What `output` holds that no export or build wrote, in words; else empty."""
    try:
        names = {path.name for path in output.iterdir()}  # no folder but that of plan files
    except OSError as error:
        return f"it is no folder that can be read ({error.strerror})"
    if not names:
        return ""
    try:
        manifest = json.loads((output / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST_NAME}, but {_some(names)}"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"its {MANIFEST_NAME} has not the format {FORMAT!r}; it holds {_some(names)}"
    listed = manifest.get("files")
    others = names - {MANIFEST_NAME, *(listed if isinstance(listed, dict) else ())}
    if FOLDER in others:
        others = others - {FOLDER} | {f"{FOLDER}/{name}" for name in foreign_files(output / FOLDER)}
    return f"its {MANIFEST_NAME} does not list {_some(others)}" if others else ""


def _some(names: set[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _read_head(request: ExportRequest, target: Target) -> Head | None:
    if request.draft is None:
        return None
    facts = TargetFacts(
        hidden_size=target.config.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.kv.num_layers,
    )
    return read_head(request.draft, facts, request.aux_layer_ids)


def _build_module(head: Head, target: Target, plan: Plan) -> EagleHead | Eagle1Head:
    dtype = DTYPES[plan.dtype]
    if head.config.method == "eagle1":
        return build_eagle1_head(head, lm_head_weight(target), dtype)
    return build_head(head, dtype)


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A temporary folder on the output's file system, gone unless it was renamed."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}") from error
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, output: Path) -> None:
    """Renames the finished folder to `output`; what stood there is deleted only after that.

    If that fails, the old one is moved back, and where even that fails, it stays aside.
    """
    # Not with _staging: that would delete what could not be moved back.
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
    old = aside / output.name
    try:
        if output.exists():
            output.rename(old)
        folder.rename(output)
    except BaseException as error:
        _move_back(old, output)
        if isinstance(error, OSError):
            raise ExportError(f"{output} cannot be written: {error}") from error
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _move_back(old: Path, output: Path) -> None:
    try:
        if old.exists():
            old.rename(output)
        old.parent.rmdir()
    except OSError as error:
        raise ExportError(
            f"{output} could not be replaced ({error}); the old bundle is now {old}"
        ) from error


def _write_engines(folder: Path, parts: _Parts, plan: Plan, report: Report) -> None:
    lowering = LOWERINGS[plan.lowering]
    layers = parts.head.config.aux_layer_ids if parts.head else ()
    report(f"tracing {parts.target.architecture} ({plan.lowering} lowering)")
    model = trace_target(parts.target, lowering, layers, plan.cache_capacity)
    store_for_matmul(model)
    written = save(model, folder / "target.onnx")
    parts.engines["target"] = _describe(model, "target.onnx")
    if parts.head is None or parts.head_module is None:
        return
    report("tracing the draft head")
    table = parts.target.model.get_input_embeddings().weight.detach()
    is_int8 = plan.draft_weights == "int8"
    graphs = trace_draft_engines(
        parts.head, parts.head_module, table, lowering, plan.draft_capacity, may_tie=not is_int8
    )
    for name, graph in graphs.items():
        store_for_matmul(graph)
        if is_int8:
            quantize_int8(graph)
        shared = _shared(graph, model, parts.head) if name == "draft" else {}
        # A tiny weight stays in the .onnx.
        files = {own: written[theirs] for own, theirs in shared.items() if theirs in written}
        save(graph, folder / f"{name}.onnx", files)
        parts.engines[name] = _describe(graph, f"{name}.onnx")
    np.save(folder / "target_ids.npy", parts.head.target_ids)


def _shared(draft: ir.Model, target: ir.Model, head: Head) -> dict[str, str]:
    """Weights of the draft that are the target's, by the names they have in either graph."""
    shared = {embedding_name(draft): embedding_name(target)}
    own, theirs = lm_head_name(draft), lm_head_name(target)
    if head.config.method == "eagle1" and own is not None and theirs is not None:
        shared[own] = theirs
    return shared


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
    folder: Path, parts: _Parts, plan: Plan, request: ExportRequest, report: Report
) -> SelfCheck:
    """Tokenizer, manifest, self-check; the manifest is written again with what was measured."""
    tokenizer, generation = write_tokenizer(parts.target, folder)
    files = describe_files(folder)

    def manifest(check: Mapping[str, Any], draft_check: Mapping[str, Any]) -> Manifest:
        return Manifest(
            created_by=_versions(),
            command=request.command,
            plan=plan,
            target=_target_info(parts),
            draft=_draft_info(parts.head, draft_check),
            engines=parts.engines,
            files=files,
            tokenizer=tokenizer,
            generation=generation,
            self_check=check,
        )

    write_manifest(folder, manifest({}, {}))
    report("comparing the engines with PyTorch")
    check = check_bundle(Bundle.open(folder), parts.target, parts.head, parts.head_module, report)
    write_manifest(folder, manifest(check.engines, check.draft))
    return check


def _versions() -> dict[str, str]:
    packages = ("eagle3", "torch", "transformers", "onnx", "onnx-ir", "onnxruntime")
    return {name: version(name) for name in packages}


def _target_info(parts: _Parts) -> TargetInfo:
    config, head = parts.target.config, parts.head
    layers = head.config.aux_layer_ids if head else ()
    return TargetInfo(
        architecture=parts.target.architecture,
        vocab_size=parts.target.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=parts.target.kv.num_layers,
        num_kv_heads=parts.target.kv.num_kv_heads,
        head_dim=parts.target.kv.head_dim,
        max_position_embeddings=getattr(config, "max_position_embeddings", 1 << 20),
        aux_layer_ids=tuple(layers),
        feature_size=len(layers) * config.hidden_size,
        source=Path(parts.target.source).name,
    )


def _draft_info(head: Head | None, check: Mapping[str, Any]) -> DraftInfo | None:
    if head is None:
        return None
    config = head.config
    return DraftInfo(
        dialect=config.dialect,
        method=config.drafter,
        hidden_size=config.hidden_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        draft_vocab_size=config.draft_vocab_size,
        conventions={k: Convention(v.value, v.source) for k, v in config.conventions.items()},
        checks=check,
    )
