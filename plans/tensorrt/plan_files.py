"""Plan files in a bundle: their location and JSON, and the check whether they are usable.

    BUNDLE/plans/tensorrt-rtx-sm89/target.plan     the engine that TensorRT loads
    BUNDLE/plans/tensorrt-rtx-sm89/target.json     its `PlanFile`: sources, settings and versions

The manifest does not list plan files: it describes the export, which is valid on every machine,
whereas plan files are built from it on one machine for one GPU, and can be deleted and built again.
There is one set for each library and compute capability. `PlanFile.key` is a hash of everything
that affects a plan file; a build replaces a file that has another key. This module does not need
TensorRT.
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
"""Version of the build; to be increased when the same graph and request give another plan file."""
PLAN_SUFFIX, NOTE_SUFFIX = ".plan", ".json"
TIMING_CACHE = "timing.cache"


@dataclass(frozen=True)
class LayerCounts:
    """Number of cache updates in place, of attention layers, and of those with a fused kernel.

    fused_attentions equals `attentions` or 0, because a build either requires fused kernels for all
    attention layers or allows decomposed attention.
    """

    cache_updates: int
    attentions: int
    fused_attentions: int


@dataclass(frozen=True)
class PlanFile:
    """Description of one plan file, stored in the JSON beside it.

    path: current location, not stored. profiles: optimization profiles by index, see
    `build_request.Profile`; an execution context selects one by `set_optimization_profile_async`.
    aliases: present -> past, two tensors that must be bound to the same address. sources: bundle
    files it was built from -> their SHA-256. size: bytes of the plan file, sha256: its hash.
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
        """Return all fields but the path as a JSON object."""
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
        """Path of the JSON beside the plan file."""
        return self.path.with_suffix(NOTE_SUFFIX)


def set_folder(root: Path, library: str, compute_capability: str) -> Path:
    """Return the folder of the plan files for a library and compute capability."""
    return root / FOLDER / f"{library}-sm{compute_capability.replace('.', '')}"


def file_key(
    sources: Mapping[str, str],
    shapes: Sequence[Profile],
    workspace_bytes: int | None,
    library: tuple[str, str],
    compute_capability: str,
) -> str:
    """Return the SHA-256, as hex, of everything that affects a plan file.

    sources: file -> SHA-256. library: name and version.
    """
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
    """Return the command line that builds a bundle's plan files for a library and GPU.

    Options that equal the bundle's plan are left out.
    """
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
    """Write the JSON of a plan file.

    Must be called after the plan file is complete, because a file without JSON is ignored.
    """
    partial = plan_file.note_path.with_suffix(".partial")
    partial.write_text(json.dumps(plan_file.to_json(), indent=2) + "\n", encoding="utf-8")
    partial.replace(plan_file.note_path)


def read_note(path: Path) -> PlanFile:
    """Read the JSON at `path` and return its plan file.

    Raises BuildError if the JSON cannot be read or has another format or schema version.
    """
    advice = f"delete {path.parent} and run `eagle3 build` again"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        head = (data.pop("format"), data.pop("schema_version"))
        if head != (FORMAT, SCHEMA_VERSION):
            raise BuildError(
                f"{path} has format {head[0]!r} version {head[1]!r}, expected {FORMAT!r} version"
                f" {SCHEMA_VERSION}: {advice}"
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
    """Return all plan files in the bundle at `root`, sorted by folder and engine.

    Raises BuildError if the JSON of one cannot be read.
    """
    notes = sorted((root / FOLDER).glob(f"*/*{NOTE_SUFFIX}"))
    return [read_note(path) for path in notes]


def foreign_files(folder: Path) -> list[str]:
    """Return the files in a folder of plan files that no build wrote, relative to the folder."""
    own = (PLAN_SUFFIX, NOTE_SUFFIX, ".partial", ".cache", ".lock")
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in paths if path.suffix not in own]


def usable_plan_files(
    bundle: Bundle, library: str, library_version: str, compute_capability: str
) -> dict[str, PlanFile]:
    """Return engine -> plan file for all engines of a bundle, for this library on this GPU.

    Raises BuildError, with the command that builds the plan files, if one is missing, was built for
    another GPU, by another library version or for other sizes, or is stale (built from other graphs
    than the bundle's).
    """
    folder = set_folder(bundle.root, library, compute_capability)
    here = f"{library} {library_version} on a GPU of compute capability {compute_capability}"
    found = {path.stem: read_note(path) for path in sorted(folder.glob(f"*{NOTE_SUFFIX}"))}
    asked = next(iter(found.values())).request if found else BuildRequest()
    advice = rebuild_command(bundle, asked, library, compute_capability)
    missing = [name for name in bundle.manifest.engines if name not in found]
    if missing:
        raise BuildError(
            f"{bundle.root} has no plan files of {', '.join(missing)} for {here}"
            f"{_others(bundle.root)}: run `{advice}`"
        )
    for name in bundle.manifest.engines:
        made = (found[name].library, found[name].compute_capability)
        reason = why_not(bundle, found[name], library_version, asked)
        if made != (library, compute_capability):
            reason = f"was built for {made[0]} on compute capability {made[1]}"
        if reason is not None:
            raise BuildError(
                f"{found[name].path} {reason}, but this machine has {here}: run `{advice}`"
            )
    return {name: found[name] for name in bundle.manifest.engines}


def why_not(
    bundle: Bundle, plan_file: PlanFile, library_version: str, request: BuildRequest
) -> str | None:
    """Return why a plan file is not usable, as a predicate for an error message, or None.

    request: the request of the other plan files, which must be the same.
    """
    stale = stale_sources(bundle, plan_file)
    if stale:
        return f"is stale: it was built from another {', '.join(stale)}"
    if plan_file.library_version != library_version:
        return f"was built by {plan_file.library} {plan_file.library_version}"
    if plan_file.request != request:
        return "was built for other sizes than the other plan files"
    size = plan_file.path.stat().st_size if plan_file.path.is_file() else 0
    if size != plan_file.size:
        return f"has {size} bytes, expected {plan_file.size} from {plan_file.note_path.name}"
    return None


def stale_sources(bundle: Bundle, plan_file: PlanFile) -> list[str]:
    """Return the source files of a plan file that have changed in the bundle or are gone."""
    hashes = {name: info.sha256 for name, info in bundle.manifest.files.items()}
    return [name for name, sha256 in plan_file.sources.items() if hashes.get(name) != sha256]


def _others(root: Path) -> str:
    """Return the part of an error message that lists the sets of plan files in a bundle."""
    kinds = sorted(
        {f"{f.library} on compute capability {f.compute_capability}" for f in plan_files(root)}
    )
    return f" (it has plan files for {', '.join(kinds)})" if kinds else ""
