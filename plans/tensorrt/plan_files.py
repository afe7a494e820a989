"""Plan files: where they lie in a bundle, what is known of each, and whether one may be used.

    BUNDLE/plans/tensorrt-rtx-sm89/target.plan     what TensorRT loads
    BUNDLE/plans/tensorrt-rtx-sm89/target.json     `PlanFile`: what it was made of, and for what

They stand apart from the manifest: it says what was exported and holds everywhere, plan files are
made from that on one machine for one GPU, and can be deleted and built again. One set for each
library and compute capability; `PlanFile.key` is a hash of everything that shaped a file, and a
file of another key is built again in its place. Nothing here needs TensorRT.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eagle3.plans.tensorrt.build_request import BuildRequest, Profile, Shapes, resolved
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BuildError

FOLDER = "plans"
FORMAT = "eagle3-plan-file"
SCHEMA_VERSION = 1
BUILDER_VERSION = 1
"""Raised when the same graph and request are built in another way."""
PLAN_SUFFIX, NOTE_SUFFIX = ".plan", ".json"
TIMING_CACHE = "timing.cache"


@dataclass(frozen=True)
class LayerCounts:
    """What TensorRT made of a graph: caches written in place, attention in one kernel a layer.

    fused_attentions is `attentions` or 0: a build either insists on fused kernels or allows
    attention to be taken apart.
    """

    cache_updates: int
    attentions: int
    fused_attentions: int


@dataclass(frozen=True)
class PlanFile:
    """One plan file, as its JSON says; `path` is where it lies now.

    profiles: by index, see `tensorrt_request.Profile`; a context takes the index with
    `set_optimization_profile_async`. aliases: present -> past, which must be given one address.
    sources: files of the bundle that it was made of -> their SHA-256.
    """

    path: Path
    engine: str
    library: str
    library_version: str
    compute_capability: str
    key: str
    request: BuildRequest
    profiles: tuple[Profile, ...]
    aliases: Mapping[str, str]
    sources: Mapping[str, str]
    counts: LayerCounts
    size: int
    sha256: str
    build_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Everything but the path."""
        data = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "path"}
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            **data,
            "request": self.request.to_json(),
            "profiles": [_profile_json(each) for each in self.profiles],
            "counts": asdict(self.counts),
        }

    @property
    def note_path(self) -> Path:
        """Its JSON."""
        return self.path.with_suffix(NOTE_SUFFIX)


def set_folder(root: Path, library: str, compute_capability: str) -> Path:
    """Where the plan files of a library and compute capability lie."""
    return root / FOLDER / f"{library}-sm{compute_capability.replace('.', '')}"


def file_key(
    sources: Mapping[str, str],
    shapes: Sequence[Profile],
    workspace_bytes: int | None,
    library: tuple[str, str],
    compute_capability: str,
) -> str:
    """SHA-256, as hex, of everything that shapes a plan file. library: name and version."""
    data = {
        "builder": BUILDER_VERSION,
        "sources": dict(sources),
        "profiles": [_profile_json(each) for each in shapes],
        "workspace_bytes": workspace_bytes,
        "library": list(library),
        "compute_capability": compute_capability,
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def rebuild_command(bundle: Bundle, request: BuildRequest, backend: str, capability: str) -> str:
    """The command line that builds the bundle's plan files for this library and GPU."""
    words = ["eagle3", "build", str(bundle.root), "--backend", backend]
    words += ["--compute-capability", capability]
    plan = bundle.manifest.plan
    asked, default = resolved(request, plan), resolved(BuildRequest(), plan)
    for name in ("batch", "verify_widths", "prefill_chunk", "workspace_bytes"):
        value = getattr(asked, name)
        if value != getattr(default, name):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def write_note(plan_file: PlanFile) -> None:
    """Writes the JSON; a file without one is no plan file, so it comes last."""
    partial = plan_file.note_path.with_suffix(".partial")
    partial.write_text(json.dumps(plan_file.to_json(), indent=2) + "\n", encoding="utf-8")
    partial.replace(plan_file.note_path)


def read_note(path: Path) -> PlanFile:
    """The plan file of the JSON at `path`.

    Raises BuildError when that cannot be read or is of another version.
    """
    advice = f"delete {path.parent} and run `eagle3 build` again"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        head = (data.pop("format"), data.pop("schema_version"))
        if head != (FORMAT, SCHEMA_VERSION):
            raise BuildError(
                f"{path} is {head[0]!r} of version {head[1]!r}, this eagle3 reads {FORMAT!r} of"
                f" version {SCHEMA_VERSION}: {advice}"
            )
        return _from_json(path.with_suffix(PLAN_SUFFIX), data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"{path} cannot be read ({type(error).__name__}: {error}): {advice}"
        ) from error


def _from_json(path: Path, data: dict[str, Any]) -> PlanFile:
    shapes = [Profile(each["name"], _ranges(each["ranges"])) for each in data["profiles"]]
    return PlanFile(
        path=path,
        **{
            **data,
            "request": BuildRequest.from_json(data["request"]),
            "profiles": tuple(shapes),
            "counts": LayerCounts(**data["counts"]),
        },
    )


def _ranges(data: dict[str, Any]) -> dict[str, Shapes]:
    return {
        name: (tuple(least), tuple(best), tuple(most)) for name, (least, best, most) in data.items()
    }


def _profile_json(profile: Profile) -> dict[str, Any]:
    ranges = {name: [list(shape) for shape in each] for name, each in profile.ranges.items()}
    return {"name": profile.name, "ranges": ranges}


def plan_files(root: Path) -> list[PlanFile]:
    """Every plan file in the bundle at `root`, by folder and engine. Raises BuildError."""
    notes = sorted((root / FOLDER).glob(f"*/*{NOTE_SUFFIX}"))
    return [read_note(path) for path in notes]


def foreign_files(folder: Path) -> list[str]:
    """What a folder of plan files holds that no build wrote, relative to it."""
    own = (PLAN_SUFFIX, NOTE_SUFFIX, ".partial", ".cache", ".lock")
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in paths if path.suffix not in own]


def usable_plan_files(
    bundle: Bundle, library: str, library_version: str, compute_capability: str
) -> dict[str, PlanFile]:
    """Engine -> plan file, of all engines, for this library on this GPU.

    Raises BuildError, with the command that builds them, when there are none, when they are for
    another GPU or of another library version, or stale: made of other graphs than the bundle's.
    """
    folder = set_folder(bundle.root, library, compute_capability)
    here = f"{library} {library_version} on a GPU of compute capability {compute_capability}"
    found = {path.stem: read_note(path) for path in sorted(folder.glob(f"*{NOTE_SUFFIX}"))}
    asked = next(iter(found.values())).request if found else BuildRequest()
    advice = rebuild_command(bundle, asked, library, compute_capability)
    missing = [name for name in bundle.manifest.engines if name not in found]
    if missing:
        raise BuildError(
            f"{bundle.root} has no plan file of {', '.join(missing)} for {here}"
            f"{_others(bundle.root)}: run `{advice}`"
        )
    for name in bundle.manifest.engines:
        made = (found[name].library, found[name].compute_capability)
        reason = why_not(bundle, found[name], library_version, asked)
        if made != (library, compute_capability):
            reason = f"is for {made[0]} on {made[1]}"
        if reason is not None:
            raise BuildError(f"{found[name].path} {reason}, here is {here}: run `{advice}`")
    return {name: found[name] for name in bundle.manifest.engines}


def why_not(
    bundle: Bundle, plan_file: PlanFile, library_version: str, request: BuildRequest
) -> str | None:
    """What is wrong with a plan file, as the rest of a sentence about it; None if nothing is."""
    stale = stale_sources(bundle, plan_file)
    if stale:
        return f"is stale: it was built from another {', '.join(stale)}"
    if plan_file.library_version != library_version:
        return f"was built by {plan_file.library} {plan_file.library_version}"
    if plan_file.request != request:
        return "was built for other sizes than its neighbours"
    size = plan_file.path.stat().st_size if plan_file.path.is_file() else 0
    if size != plan_file.size:
        return f"has {size} bytes, {plan_file.note_path.name} says {plan_file.size}"
    return None


def stale_sources(bundle: Bundle, plan_file: PlanFile) -> list[str]:
    """Files it was made of that are others in the bundle now, or gone."""
    hashes = {name: info.sha256 for name, info in bundle.manifest.files.items()}
    return [name for name, sha256 in plan_file.sources.items() if hashes.get(name) != sha256]


def _others(root: Path) -> str:
    """What there is instead, in words."""
    kinds = sorted({f"{f.library} on {f.compute_capability}" for f in plan_files(root)})
    return f" (it has some for {', '.join(kinds)})" if kinds else ""
