"""What plan files are built for: a request, and the ranges of shapes that follow from it.

Two profiles an engine: `verify` (index 0) for plain decoding, verification and drafting, `prefill`
(index 1) for chunks of a prompt. Both are ranges: a profile of one row alone beside a range would
double the weights in the file.
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
"""By index."""

SHAPE_INPUTS = {"top_k": "K"}
"""Inputs whose *values* size an output; TensorRT reads them on the host. Input -> symbol."""

Range = tuple[int, int, int]
"""Least, best, most."""
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class BuildRequest:
    """What `build_bundle` builds; its fields are those of a `Plan`. Raises BuildError.

    What is left open (None, or no widths) is the bundle's plan's, see `resolved`; what a file was
    really built for stands in its `PlanFile.request`.
    """

    backend: str | None = None
    """`tensorrt` or `tensorrt-rtx`; open in the plan too: whichever is installed."""
    compute_capability: str | None = None
    """Of the GPU, as "8.9"; open in the plan too: of this machine's."""
    batch: int | None = None
    """Sequences in one call, at most."""
    verify_widths: tuple[int, ...] = ()
    """Rows of a call that a runtime records, ascending; the last is the profile's most. Open in the
    plan too: any up to the plan's max_draft_tokens and the root."""
    prefill_chunk: int | None = None
    """Prompt tokens in one call."""
    workspace_bytes: int | None = None
    """Scratch memory; open in the plan too: as much as TensorRT likes."""

    def __post_init__(self) -> None:
        for name in ("batch", "prefill_chunk", "workspace_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BuildError(f"{name} is {value}: give at least 1")
        widths = self.verify_widths
        if any(a >= b for a, b in zip((0, *widths), widths, strict=False)):
            raise BuildError(f"verify_widths is {list(widths)}: each must be above the last")

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "verify_widths": list(self.verify_widths)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BuildRequest:
        """Reads `to_json`'s object. Raises TypeError for unknown fields."""
        return cls(**{**data, "verify_widths": tuple(data["verify_widths"])})


# What a graph was exported with: a build cannot change it.
_FIXED = ("lowering", "dtype", "max_seq_len", "max_draft_tokens")


def request_from_plan(plan: Plan) -> BuildRequest:
    """What a plan asks of a build; fields that it has not stay open."""
    known = plan.to_json()
    known["verify_widths"] = tuple(known.get("verify_widths", ()))
    known["backend"] = plan.backend if plan.backend.startswith("tensorrt") else None
    names = (each.name for each in fields(BuildRequest))
    return BuildRequest(**{name: known[name] for name in names if name in known})


def request_for_bundle(plan: Plan, bundle_plan: Plan) -> BuildRequest:
    """What another plan asks of a build of a bundle.

    Raises BuildError where it contradicts what the bundle was exported with.
    """
    for name in _FIXED:
        asked, found = getattr(plan, name), getattr(bundle_plan, name)
        if asked != found:
            raise BuildError(
                f"the plan's {name} is {asked}, the bundle was exported with {found}: export it"
                f" again with --{name.replace('_', '-')} {asked}, or build with another plan"
            )
    return request_from_plan(plan)


def resolved(request: BuildRequest, plan: Plan) -> BuildRequest:
    """`request`, what it leaves open being the plan's."""
    own = request_from_plan(plan)
    is_open = [each.name for each in fields(request) if getattr(request, each.name) in (None, ())]
    filled = replace(request, **{name: getattr(own, name) for name in is_open})
    return replace(filled, batch=filled.batch or 1)


@dataclass(frozen=True)
class Profile:
    """Ranges of one optimization profile: input -> its least, best and most shape.

    The entry of a SHAPE_INPUTS input holds values instead.
    """

    name: str
    ranges: Mapping[str, Shapes]


def profiles(manifest: Manifest, engine: str, request: BuildRequest) -> tuple[Profile, Profile]:
    """The profiles of an engine, in the order of PROFILES.

    Raises BuildError for widths that do not cover the plan's trees, and for a graph with a
    dimension that no profile knows.
    """
    plan, info = manifest.plan, manifest.engines[engine]
    request = resolved(request, plan)
    cover = plan.max_draft_tokens + 1
    most = request.verify_widths[-1] if request.verify_widths else cover
    if not cover <= most <= plan.max_seq_len:
        raise BuildError(
            f"verify_widths end at {most}; the bundle's trees need {cover} rows, and its context"
            f" has {plan.max_seq_len}: let them end between the two"
        )
    batch, chunk = request.batch or 1, request.prefill_chunk or plan.prefill_chunk
    if chunk > plan.max_seq_len:
        raise BuildError(
            f"prefill_chunk is {chunk}, the bundle's context has {plan.max_seq_len}: take less"
        )
    verify = _verify_ranges(manifest, engine, most, request.verify_widths)
    prefill = {"N": (1, chunk, chunk), "M": (1, 1, 1), "W": (1, chunk, chunk), "K": verify["K"]}
    for symbols in (verify, prefill):
        symbols["B"] = (1, batch, batch)
    return _profile(VERIFY, engine, info, verify), _profile(PREFILL, engine, info, prefill)


def _verify_ranges(
    manifest: Manifest, engine: str, most: int, widths: tuple[int, ...]
) -> dict[str, Range]:
    """Symbol -> range of decoding calls: N rows, M rows with logits, W rows of a tree mask, K."""
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
    """Rows of the call made most often: the target (no role) sees a tree, padded to a width; a
    draft's step sees its frontier; what reads features sees the rows that a round commits.
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
            f"engine {engine}: input {spec.name} has the dimension {unknown[0]!r}, which no profile"
            f" knows ({', '.join(symbols)}): export the bundle again with this version"
        )

    def at(index: int) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else symbols[dim][index] for dim in dims)

    return at(0), at(1), at(2)
