"""Description of plan files as JSON and as text, for `eagle3 build` and `eagle3 inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3.plans.tensorrt.build_request import Profile
from eagle3.plans.tensorrt.plan_files import PlanFile, plan_files, stale_sources
from eagle3.runtime.bundle.describe import aligned, as_text
from eagle3.runtime.bundle.folder import Bundle


def plan_files_json(bundle: Bundle) -> list[dict[str, Any]]:
    """Return `plan_file_json` of every plan file in a bundle. Raises BuildError."""
    return [plan_file_json(each, bundle) for each in plan_files(bundle.root)]


def plan_files_text(bundle: Bundle) -> list[str]:
    """Return one line of text per plan file in a bundle. Raises BuildError."""
    return [_plan_file_text(each, bundle) for each in plan_files(bundle.root)]


def plan_file_lines(files: Sequence[PlanFile]) -> list[str]:
    """Return the lines that `eagle3 build` prints: one per plan file."""
    return aligned([("plan file", _plan_file_text(each)) for each in files])


def plan_file_json(plan_file: PlanFile, bundle: Bundle | None = None) -> dict[str, Any]:
    """Return a plan file's JSON with its path, and with a bundle, whether it is stale.

    A plan file is stale if it was built from other graphs or weights than the bundle's.
    """
    stale = {} if bundle is None else {"stale": bool(stale_sources(bundle, plan_file))}
    return {"path": str(plan_file.path), **stale, **plan_file.to_json()}


def _plan_file_text(plan_file: PlanFile, bundle: Bundle | None = None) -> str:
    counts, rows = plan_file.counts, ", ".join(map(_rows_text, plan_file.profiles))
    layers = (
        f"; {counts.cache_updates} cache updates in place, {counts.fused_attentions} of"
        f" {counts.attentions} attention layers fused"
    )
    stale = "" if bundle is None else ", ".join(stale_sources(bundle, plan_file))
    return (
        f"{plan_file.engine}: {as_text(plan_file.size)} for compute capability"
        f" {plan_file.compute_capability} ({plan_file.library} {plan_file.library_version}, built"
        f" in {plan_file.build_seconds:.1f} s); {rows}{layers if counts.attentions else ''}"
        f"{f'; STALE, built from another {stale}: build it again' if stale else ''}"
    )


def _rows_text(profile: Profile) -> str:
    """Return the name of a profile and the range of rows of its calls.

    Rows are the second dimension of any input with more than one, [B, rows, ...].
    """
    ranges = [each for each in profile.ranges.values() if len(each[0]) > 1]
    rows = f" {ranges[0][0][1]}-{ranges[0][2][1]} rows" if ranges else ""
    return f"{profile.name}{rows}"
