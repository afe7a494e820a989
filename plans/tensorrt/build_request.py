"""Build requests of plan files, and the optimization profiles that follow from them.

Each engine has two profiles: `verify` (index 0) for plain decoding, verification and drafting, and
`prefill` (index 1) for the chunks of a prompt. Both cover a range of row counts. A separate profile
for exactly one row would double the weights in the plan file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from eagle3.plans.plan import Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.manifest import EngineInfo, Manifest, TensorSpec
from eagle3.runtime.errors import BuildError

VERIFY, PREFILL = "verify", "prefill"
PROFILES = (VERIFY, PREFILL)
"""Names of the profiles by index."""

SHAPE_INPUTS = {"top_k": "K"}
"""Input -> symbol, for inputs whose *values* are the size of an output. TensorRT reads these on the
host."""

Range = tuple[int, int, int]
"""Minimum, optimum and maximum of a dimension."""
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Minimum, optimum and maximum shape of an input."""


@dataclass(frozen=True)
class BuildRequest:
    """Settings of `build_bundle`, named like the fields of a `Plan`.

    `resolved` replaces a field that is None or empty by the value of the bundle's plan. A
    `PlanFile.request` has the settings that the file was built with. Raises BuildError if a field
    is out of range.
    """

    backend: str | None = None
    """`tensorrt` or `tensorrt-rtx`; None in the plan, too: the library that is installed."""
    compute_capability: str | None = None
    """Compute capability of the GPU, such as "8.9"; None in the plan, too: that of this machine."""
    batch: int | None = None
    """Maximum number of sequences in one call."""
    verify_widths: tuple[int, ...] = ()
    """Row counts of the calls that the runtime captures, ascending; the last one is the maximum of
    the `verify` profile. Empty in the plan, too: any number up to the root and max_draft_tokens."""
    prefill_chunk: int | None = None
    """Maximum number of prompt tokens in one call."""
    workspace_bytes: int | None = None
    """Limit of TensorRT's scratch memory in bytes; None in the plan, too: no limit."""

    def __post_init__(self) -> None:
        for name in ("batch", "prefill_chunk", "workspace_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BuildError(f"{name} must be at least 1, got {value}")
        widths = self.verify_widths
        if any(a >= b for a, b in zip((0, *widths), widths, strict=False)):
            raise BuildError(
                "verify_widths must be strictly ascending and start at 1 or more, got"
                f" {list(widths)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {**asdict(self), "verify_widths": list(self.verify_widths)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BuildRequest:
        """Return the request from the object that `to_json` returned.

        Raises TypeError if a field is unknown.
        """
        return cls(**{**data, "verify_widths": tuple(data["verify_widths"])})


# Fields of a plan that are fixed by the export; a build cannot change them.
_FIXED = ("lowering", "dtype", "max_seq_len", "max_draft_tokens")


def request_from_plan(plan: Plan) -> BuildRequest:
    """Return the build request of a plan. Fields that the plan does not set stay None or empty."""
    known = plan.to_json()
    known["verify_widths"] = tuple(known.get("verify_widths", ()))
    known["backend"] = plan.backend if plan.backend.startswith("tensorrt") else None
    names = (each.name for each in fields(BuildRequest))
    return BuildRequest(**{name: known[name] for name in names if name in known})


def request_for_bundle(plan: Plan, bundle_plan: Plan) -> BuildRequest:
    """Return the request to build a bundle with another plan than its own.

    Raises BuildError if the plan contradicts what the bundle was exported with.
    """
    for name in _FIXED:
        asked, found = getattr(plan, name), getattr(bundle_plan, name)
        if asked != found:
            raise BuildError(
                f"the plan's {name} is {asked}, but the bundle was exported with {found}: export it"
                f" again with --{name.replace('_', '-')} {asked}, or build with another plan"
            )
    return request_from_plan(plan)


def resolved(request: BuildRequest, plan: Plan) -> BuildRequest:
    """Return `request` with the fields that are None or empty taken from the bundle's plan."""
    own = request_from_plan(plan)
    is_open = [each.name for each in fields(request) if getattr(request, each.name) in (None, ())]
    filled = replace(request, **{name: getattr(own, name) for name in is_open})
    return replace(filled, batch=filled.batch or 1)


@dataclass(frozen=True)
class Profile:
    """One optimization profile.

    ranges: input -> minimum, optimum and maximum shape; for an input in SHAPE_INPUTS, the values
    instead of the shapes.
    """

    name: str
    ranges: Mapping[str, Shapes]


def profiles(manifest: Manifest, engine: str, request: BuildRequest) -> tuple[Profile, Profile]:
    """Return the profiles of an engine, in the order of PROFILES.

    Raises BuildError if verify_widths do not cover the plan's trees, if a size exceeds max_seq_len,
    or if an input has an unknown symbolic dimension.
    """
    plan, info = manifest.plan, manifest.engines[engine]
    request = resolved(request, plan)
    cover = plan.max_draft_tokens + 1
    most = request.verify_widths[-1] if request.verify_widths else cover
    if not cover <= most <= plan.max_seq_len:
        raise BuildError(
            f"verify_widths must end between {cover}, the rows of the bundle's largest tree, and"
            f" {plan.max_seq_len}, its max_seq_len, but ends at {most}: change the last width"
        )
    batch, chunk = request.batch or 1, request.prefill_chunk or plan.prefill_chunk
    if chunk > plan.max_seq_len:
        raise BuildError(
            f"prefill_chunk must be at most {plan.max_seq_len}, the bundle's max_seq_len, got"
            f" {chunk}"
        )
    verify = _verify_ranges(manifest, engine, most, request.verify_widths)
    prefill = {"N": (1, chunk, chunk), "M": (1, 1, 1), "W": (1, chunk, chunk), "K": verify["K"]}
    for symbols in (verify, prefill):
        symbols["B"] = (1, batch, batch)
    return _profile(VERIFY, engine, info, verify), _profile(PREFILL, engine, info, prefill)


def _verify_ranges(
    manifest: Manifest, engine: str, most: int, widths: tuple[int, ...]
) -> dict[str, Range]:
    """Return symbol -> range for decoding calls.

    N: rows, M: rows with logits, W: columns of the tree mask, K: children per node.
    """
    name, _, role = engine.partition(".")
    plan, draft = manifest.plan, manifest.drafts.get(name)
    tree = plan.tree if draft is None else draft.tree
    window = max(most, plan.max_draft_rows)
    vocab_size = draft.draft_vocab_size if draft is not None else manifest.target.vocab_size
    top_k = min(plan.max_draft_tokens, vocab_size)
    rows = min(_typical_rows(role, tree, widths), most)
    return {
        "N": (1, rows, most),
        "M": (1, rows, most),
        "W": (1, min(max(rows, tree.num_draft_rows), window), window),
        "K": (1, min(tree.top_k_in_use, top_k), top_k),
    }


def _typical_rows(role: str, tree: TreePlan, widths: tuple[int, ...]) -> int:
    """Return the rows of an engine's most frequent call, for which TensorRT optimizes.

    The target (no role) runs a tree, padded to a width. A draft step runs its frontier. Engines
    that read features run the rows that a round commits.
    """
    if not role:
        rows = tree.num_draft_tokens + 1
        return next((width for width in widths if width >= rows), rows)
    if role == "draft":
        return tree.top_k_in_use
    return tree.depth_in_use + 1


def _profile(name: str, engine: str, info: EngineInfo, symbols: Mapping[str, Range]) -> Profile:
    return Profile(name, {spec.name: _shapes(spec, engine, symbols) for spec in info.inputs})


def _shapes(spec: TensorSpec, engine: str, symbols: Mapping[str, Range]) -> Shapes:
    dims = (SHAPE_INPUTS[spec.name],) if spec.name in SHAPE_INPUTS else spec.shape
    unknown = [dim for dim in dims if isinstance(dim, str) and dim not in symbols]
    if unknown:
        raise BuildError(
            f"input {spec.name} of engine {engine} has the unknown dimension {unknown[0]!r},"
            f" expected one of {', '.join(symbols)}: export the bundle again with this version"
        )

    def at(index: int) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else symbols[dim][index] for dim in dims)

    return at(0), at(1), at(2)
