"""The command `eagle3 build`. TensorRT is imported inside the command, so `--help` is fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.plans.backends import TENSORRT_BACKENDS
from eagle3.runtime.errors import BuildError, EngineMissing
from eagle3.runtime.terminal.options import (
    BATCH_HELP,
    COMPUTE_CAPABILITY_HELP,
    PLAN_HELP,
    PREFILL_CHUNK_HELP,
    given_fields,
    json_option,
    note,
    parsed,
    print_result,
)

if TYPE_CHECKING:
    from eagle3.plans.plan import Plan
    from eagle3.plans.tensorrt.build_request import BuildRequest
    from eagle3.plans.tensorrt.plan_files import PlanFile


def _widths(value: str) -> tuple[int, ...]:
    return tuple(int(part) for part in value.split(","))


@click.command()
@click.argument("bundle")
@click.option(
    "--backend",
    type=click.Choice(TENSORRT_BACKENDS),
    help="TensorRT library to build with.  [default: the plan's, otherwise the installed one]",
)
@click.option("--compute-capability", metavar="X.Y", help=COMPUTE_CAPABILITY_HELP)
@click.option("--batch", type=int, help=f"{BATCH_HELP}  [default: the plan's]")
@click.option(
    "--verify-widths",
    callback=parsed(_widths, "row counts, for example 1,8,64"),
    metavar="N,...",
    help="Row counts of the target calls that will be captured as CUDA graphs, ascending."
    "  [default: the plan's, otherwise any]",
)
@click.option("--prefill-chunk", type=int, help=f"{PREFILL_CHUNK_HELP}  [default: the plan's]")
@click.option(
    "--workspace-bytes",
    type=int,
    help="Maximum scratch memory for TensorRT, in bytes.  [default: the plan's, otherwise"
    " unlimited]",
)
@click.option(
    "--plan",
    "preset",
    metavar="NAME|FILE",
    help=f"{PLAN_HELP} The other options override its values.  [default: the bundle's own plan]",
)
@click.option("--force", is_flag=True, help="Rebuild plan files even if they are up to date.")
@json_option
def build(bundle: str, force: bool, as_json: bool, **flags: Any) -> None:
    """Compile the graphs of BUNDLE into TensorRT plan files.

    The plan files are stored inside the bundle. The bundle must have been exported with --lowering
    portable, and with --dtype float16 or bfloat16 if its attention is to be fused.
    """
    from eagle3.plans.tensorrt.build_request import BuildRequest
    from eagle3.plans.tensorrt.plan_file_text import plan_file_json, plan_file_lines

    given = {k: v for k, v in given_fields(BuildRequest, flags).items() if v is not None}
    request = replace(_preset_request(bundle, flags["preset"]), **given)
    files = _stage().build_bundle(bundle, request, report=note, force=force)
    data = {"plan_files": [plan_file_json(each) for each in files]}
    print_result(data, plan_file_lines(files), as_json)


def _preset_request(bundle: str, preset: str | None) -> BuildRequest:
    """Return the request that a preset implies; an empty one without a preset."""
    from eagle3.plans.preset import load_preset
    from eagle3.plans.tensorrt.build_request import BuildRequest, request_for_bundle
    from eagle3.runtime.bundle.folder import Bundle

    if preset is None:
        return BuildRequest()
    return request_for_bundle(load_preset(preset).plan, Bundle.open(bundle).manifest.plan)


def why_not_here(plan: Plan) -> str | None:
    """Return the reason why this machine cannot build plan files for `plan`, or None if it can.

    The reason is a missing TensorRT library, or a GPU that the library cannot build for. Call this
    before an export, which takes minutes.
    """
    from eagle3.plans.tensorrt.library import find_library, target_capability

    try:
        target_capability(find_library(plan.backend), plan.compute_capability)
    except (BuildError, EngineMissing) as error:
        return str(error)
    return None


def build_exported(root: Path) -> list[PlanFile]:
    """Build the plan files of a bundle that was just exported, as its own plan requests.

    Raises the errors of `build_bundle`, with a message that says that the bundle itself is
    finished.
    """
    from eagle3.plans.tensorrt.build_request import BuildRequest

    try:
        files: list[PlanFile] = _stage().build_bundle(root, BuildRequest(), report=note)
    except (BuildError, EngineMissing) as error:
        raise type(error)(
            f"{root} is exported and checked, but has no plan files: {error}; solve this, then run"
            f" `eagle3 build {root}`"
        ) from error
    return files


def _stage() -> Any:
    """Return the builder's module, which needs packages that a light installation lacks."""
    try:
        from eagle3.plans.tensorrt import plan_builder as tensorrt_build
    except ImportError as error:
        raise EngineMissing(
            "building plan files needs onnx and polygraphy: pip install 'eagle3[tensorrt-rtx]'"
            f" ({error})"
        ) from error
    return tensorrt_build
