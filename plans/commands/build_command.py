"""`eagle3 build`: parses and calls; TensorRT is imported within the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.plans.backends import TENSORRT_BACKENDS
from eagle3.runtime.errors import BuildError, EngineMissing
from eagle3.runtime.terminal.options import given_fields, json_option, note, parsed, print_result

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
    help="The library; default: the plan's, or the one there is.",
)
@click.option(
    "--compute-capability",
    metavar="X.Y",
    help="Of the GPU they are for, as 8.9; default: this machine's.",
)
@click.option("--batch", type=int, help="Sequences in one call; default: the bundle's plan's.")
@click.option(
    "--verify-widths",
    callback=parsed(_widths, "numbers, as in 1,8,64"),
    metavar="N,...",
    help="Rows of the calls that are recorded; default: the plan's, or any.",
)
@click.option("--prefill-chunk", type=int, help="Prompt tokens in one call; default: the plan's.")
@click.option("--workspace-bytes", type=int, help="Scratch memory; default: as TensorRT likes.")
@click.option(
    "--plan",
    "preset",
    metavar="NAME|FILE",
    help="See `eagle3 plan list`, or a .toml file; default: the bundle's. Options override.",
)
@click.option("--force", is_flag=True, help="Build again what is up to date.")
@json_option
def build(bundle: str, force: bool, as_json: bool, **flags: Any) -> None:
    """Compile the graphs of BUNDLE into TensorRT plan files, which are kept inside it.

    Needs a bundle of --lowering portable, and of --dtype float16 or bfloat16 for fused attention.
    """
    from eagle3.plans.tensorrt.build_request import BuildRequest
    from eagle3.plans.tensorrt.plan_file_text import plan_file_json, plan_file_lines

    given = {k: v for k, v in given_fields(BuildRequest, flags).items() if v is not None}
    request = replace(_preset_request(bundle, flags["preset"]), **given)
    files = _stage().build_bundle(bundle, request, report=note, force=force)
    data = {"plan_files": [plan_file_json(each) for each in files]}
    print_result(data, plan_file_lines(files), as_json)


def _preset_request(bundle: str, preset: str | None) -> BuildRequest:
    """What a preset asks of the build; nothing without one."""
    from eagle3.plans.preset import load_preset
    from eagle3.plans.tensorrt.build_request import BuildRequest, request_for_bundle
    from eagle3.runtime.bundle.folder import Bundle

    if preset is None:
        return BuildRequest()
    return request_for_bundle(load_preset(preset).plan, Bundle.open(bundle).manifest.plan)


def why_not_here(plan: Plan) -> str | None:
    """Why this machine cannot build what a plan asks for: no library, or a GPU that is elsewhere.

    To be asked before an export, which takes minutes. None where it can.
    """
    from eagle3.plans.tensorrt.library import find_library, target_capability

    try:
        target_capability(find_library(plan.backend), plan.compute_capability)
    except (BuildError, EngineMissing) as error:
        return str(error)
    return None


def build_exported(root: Path) -> list[PlanFile]:
    """What an export for TensorRT ends with: the build that the bundle's own plan asks for.

    Raises what `build_bundle` raises; the message says that the bundle itself is finished.
    """
    from eagle3.plans.tensorrt.build_request import BuildRequest

    try:
        files: list[PlanFile] = _stage().build_bundle(root, BuildRequest(), report=note)
    except (BuildError, EngineMissing) as error:
        raise type(error)(
            f"{root} is exported and checked, but has no plan files: {error}; then run `eagle3"
            f" build {root}`"
        ) from error
    return files


def _stage() -> Any:
    """The builder, which needs packages that a light install has not."""
    try:
        from eagle3.plans.tensorrt import plan_builder as tensorrt_build
    except ImportError as error:
        raise EngineMissing(
            f"building needs onnx and polygraphy: pip install 'eagle3[tensorrt-rtx]' ({error})"
        ) from error
    return tensorrt_build
