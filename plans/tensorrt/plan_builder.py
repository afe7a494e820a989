"""`eagle3 build`: compile a bundle's portable graphs to TensorRT plan files.

For each engine, lint the graph and reuse the plan file of an earlier build if it has the same key.
Otherwise parse the graph, compare the network with it, compile it and write the plan file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.plans.lint.tensorrt_lint import GraphFacts, lint_file
from eagle3.plans.tensorrt.build_log import (
    BuildProgress,
    Log,
    captured,
    progress_monitor,
    stoppable,
)
from eagle3.plans.tensorrt.build_request import BuildRequest, Profile, profiles, resolved
from eagle3.plans.tensorrt.library import (
    Library,
    find_library,
    polygraphy_of,
    target_capability,
)
from eagle3.plans.tensorrt.network import Parsed, check_network, parse
from eagle3.plans.tensorrt.plan_files import (
    TIMING_CACHE,
    LayerCounts,
    PlanFile,
    file_key,
    read_note,
    set_folder,
    write_note,
)
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BuildError

Report = Callable[[str], None]

# Upper estimate of the kernels and tables in a plan file, in addition to the weights.
_KERNEL_BYTES = 64 << 20
_NO_KERNEL = "not supported by a dedicated kernel"


@dataclass(frozen=True)
class _Job:
    """The build of one engine: its graph, settings and destination."""

    bundle: Bundle
    engine: str
    graph: Path
    facts: GraphFacts
    sources: dict[str, str]
    profiles: tuple[Profile, ...]
    request: BuildRequest
    library: Library
    capability: str
    key: str

    @property
    def folder(self) -> Path:
        return set_folder(self.bundle.root, self.library.name, self.capability)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.engine}.plan"


def build_bundle(
    bundle_path: str | os.PathLike[str],
    request: BuildRequest,
    report: Report = lambda _: None,
    *,
    force: bool = False,
) -> list[PlanFile]:
    """Build the plan files of all engines of a bundle, except those that are up to date.

    report: called with progress messages. force: also build files that are up to date. Returns one
    plan file per engine. Raises EngineMissing if no TensorRT library is installed, and BuildError
    if a build is impossible or fails; files that were built before the error are kept.
    """
    bundle = Bundle.open(bundle_path)
    _refuse_lowering(bundle)
    request = resolved(request, bundle.manifest.plan)
    library = find_library(request.backend)
    capability = target_capability(library, request.compute_capability)
    polygraphy = polygraphy_of(library)
    request = replace(request, backend=library.name, compute_capability=capability)
    jobs = [_job(bundle, name, request, library) for name in bundle.manifest.engines]
    kept = {} if force else {job.engine: old for job in jobs if (old := _existing(job))}
    waiting = [job for job in jobs if job.engine not in kept]
    _check_disk(waiting)
    _check_sources(bundle, waiting)
    for name, old in kept.items():
        report(f"{name}: up to date ({old.path})")
    built = {job.engine: _build(job, polygraphy, report) for job in waiting}
    return [built.get(name) or kept[name] for name in bundle.manifest.engines]


def _refuse_lowering(bundle: Bundle) -> None:
    plan = bundle.manifest.plan
    if plan.lowering != "portable":
        raise BuildError(
            f"{bundle.root} was exported with --lowering {plan.lowering}, whose operators only ONNX"
            " Runtime supports: export it again with --lowering portable --dtype float16 (it was"
            f" exported by `{bundle.manifest.command}`)"
        )


def _job(bundle: Bundle, engine: str, request: BuildRequest, library: Library) -> _Job:
    info = bundle.manifest.engines[engine]
    graph = bundle.path(info.file)
    facts = lint_file(graph)
    names = sorted({info.file, *facts.files})
    for name in names:
        bundle.path(name)  # raises unless the manifest lists the file, and so has its hash
    sources = {name: bundle.manifest.files[name].sha256 for name in names}
    shapes = profiles(bundle.manifest, engine, request)
    capability = str(request.compute_capability)
    named = (library.name, library.version)
    key = file_key(sources, shapes, request.workspace_bytes, named, capability)
    return _Job(bundle, engine, graph, facts, sources, shapes, request, library, capability, key)


def _existing(job: _Job) -> PlanFile | None:
    """Return the intact plan file of an earlier build with the same key, or None.

    If the request differs, which the key does not depend on, the file's JSON is updated to it.
    """
    note = job.path.with_suffix(".json")
    if not note.is_file():
        return None
    try:
        old = read_note(note)
    except BuildError:  # another version or damaged; the new build replaces it
        return None
    if old.key != job.key or not job.path.is_file() or _sha256(job.path) != old.sha256:
        return None
    if old.request != job.request:
        old = replace(old, request=job.request)
        with _disk_errors(job):
            write_note(old)
    return old


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_disk(jobs: list[_Job]) -> None:
    """Raise BuildError if the disk is too small, before the long build starts.

    A plan file contains a copy of its weights.
    """
    if not jobs:
        return
    files = jobs[0].bundle.manifest.files
    needed = sum(_KERNEL_BYTES + sum(files[name].size for name in job.sources) for job in jobs)
    root = jobs[0].bundle.root
    free = shutil.disk_usage(root).free
    if free < needed:
        raise BuildError(
            f"{len(jobs)} plan files need about {needed:,} bytes, but {root} has {free:,} free:"
            " free disk space, or move the bundle to a larger disk"
        )


def _check_sources(bundle: Bundle, jobs: list[_Job]) -> None:
    """Raise BuildError if a source file does not match its hash, which is part of the key."""
    for name, sha256 in {k: v for job in jobs for k, v in job.sources.items()}.items():
        if _sha256(bundle.path(name)) != sha256:
            raise BuildError(
                f"{bundle.path(name)} does not match its SHA-256 in the manifest: copy the bundle"
                " again or export it again"
            )


def _build(job: _Job, polygraphy: Any, report: Report) -> PlanFile:
    report(f"{job.engine}: building for {job.library.name}, compute capability {job.capability}")
    with _disk_errors(job):
        job.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with captured(polygraphy) as log:
        plan, fused = _compile(job, polygraphy, log, report)
    seconds = time.monotonic() - start
    view = memoryview(plan)
    plan_file = PlanFile(
        path=job.path,
        engine=job.engine,
        library=job.library.name,
        library_version=job.library.version,
        compute_capability=job.capability,
        key=job.key,
        request=job.request,
        profiles=job.profiles,
        aliases=job.facts.aliases,
        sources=job.sources,
        counts=LayerCounts(
            cache_updates=job.facts.num_cache_updates,
            attentions=job.facts.num_attentions,
            fused_attentions=job.facts.num_attentions if fused else 0,
        ),
        size=view.nbytes,
        sha256=hashlib.sha256(view).hexdigest(),
        build_seconds=round(seconds, 3),
    )
    with _disk_errors(job):
        _write(plan_file, view)
    return plan_file


def _write(plan_file: PlanFile, content: memoryview) -> None:
    """Write a plan file and its JSON.

    The old JSON is deleted first and the new one written last, so that a JSON never describes
    another build's plan file.
    """
    partial = plan_file.path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        plan_file.note_path.unlink(missing_ok=True)
        partial.replace(plan_file.path)
        write_note(plan_file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _disk_errors(job: _Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(f"{job.path} cannot be written: {error.strerror or error}") from error


def _compile(job: _Job, polygraphy: Any, log: Log, report: Report) -> tuple[Any, bool]:
    """Return the plan file's bytes, and whether every attention is one fused kernel.

    By default, TensorRT only builds a graph if it has a fused kernel for each attention. It has
    none for float32. For other types, a build with fused attention is tried first and one with
    decomposed attention second, which tells which of the two the file has.
    """
    fused = job.bundle.manifest.plan.dtype != "float32" and job.facts.num_attentions > 0
    plan = _compile_once(job, polygraphy, log, decomposed=not fused)
    if plan is None and fused and log.says(_NO_KERNEL):
        report(
            f"{job.engine}: {job.library.name} has no fused attention kernel for this head size;"
            " using decomposed attention, which is slower"
        )
        log.messages.clear()
        fused = False
        plan = _compile_once(job, polygraphy, log, decomposed=True)
    if plan is None:
        raise BuildError(
            f"{job.library.name} {job.library.version} cannot build {job.graph} for compute"
            f" capability {job.capability}: {log.errors()}"
        )
    return plan, fused


def _compile_once(job: _Job, polygraphy: Any, log: Log, *, decomposed: bool) -> Any | None:
    """Try to compile once. Returns None if TensorRT fails; its errors are then in the log.

    decomposed: allow TensorRT to build attention from several kernels.
    """
    trt = polygraphy.backend.trt
    parsed = parse(polygraphy, job.library, job.graph, log)
    check_network(parsed[1], job.library, job.facts, str(job.graph))
    if decomposed:
        trt.SetDecomposableAttentions(parsed)()
    progress = BuildProgress(job.engine)
    with stoppable(progress):
        try:
            return _engine_bytes(job, polygraphy, parsed, progress)
        except polygraphy.exception.PolygraphyException:
            return None
        finally:
            progress.clear()


def _engine_bytes(job: _Job, polygraphy: Any, parsed: Parsed, progress: BuildProgress) -> Any:
    trt, module = polygraphy.backend.trt, job.library.module
    options = _options(job, progress_monitor(module, progress))
    options["profiles"] = [_profile(trt, each) for each in job.profiles]
    if "compute_capabilities" in options:
        config = polygraphy.backend.tensorrt_rtx.CreateConfigRTX(**options)
    else:
        config = trt.CreateConfig(**options)
    timing_cache = options.get("load_timing_cache")
    return trt.EngineBytesFromNetwork(parsed, config, save_timing_cache=timing_cache)()


def _options(job: _Job, monitor: Any) -> dict[str, Any]:
    """Return the options that polygraphy passes to TensorRT's builder, without the profiles.

    TensorRT-RTX does not time kernels when it compiles, so it gets no timing cache.
    """
    options: dict[str, Any] = {"progress_monitor": monitor}
    if job.request.workspace_bytes is not None:
        pool = job.library.module.MemoryPoolType.WORKSPACE
        options["memory_pool_limits"] = {pool: job.request.workspace_bytes}
    if job.library.compute_capabilities is None:
        options["load_timing_cache"] = str(job.folder / TIMING_CACHE)
    else:
        major, minor = job.capability.split(".")
        options["compute_capabilities"] = [(int(major), int(minor))]
    return options


def _profile(trt: Any, profile: Profile) -> Any:
    shapes = trt.Profile()
    for name, ranges in profile.ranges.items():
        shapes.add(name, *ranges)
    return shapes
