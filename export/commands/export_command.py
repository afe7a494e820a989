"""The command `eagle3 export`: turn its options into an `ExportRequest` or an `AddRequest`.

torch is imported inside the command, so that `--help` works without it.
"""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.plans.backends import PADDED_BACKENDS, TENSORRT_BACKENDS
from eagle3.plans.commands.build_command import build_exported, why_not_here
from eagle3.plans.plan import BACKENDS, DRAFT_WEIGHTS, DTYPES, LOWERINGS, TARGET_WEIGHTS, Plan
from eagle3.plans.tree_paths import DYNAMIC, TREE_CHOICES, read_paths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import ExportError
from eagle3.runtime.terminal.options import (
    AUX_LAYERS_HELP,
    COMPUTE_CAPABILITY_HELP,
    DRAFT_DEPTH_HELP,
    DRAFT_TOP_K_HELP,
    DRAFT_WEIGHTS_HELP,
    MAX_SEQ_LEN_HELP,
    NUM_DRAFT_TOKENS_HELP,
    PLAN_HELP,
    PREFILL_CHUNK_HELP,
    PROMPT_FILE_HELP,
    TARGET_HELP,
    TARGET_WEIGHTS_HELP,
    TRUST_REMOTE_CODE_HELP,
    given_fields,
    import_stage,
    layer_numbers,
    note,
    parsed,
)

if TYPE_CHECKING:
    from eagle3.export.add_draft import AddRequest
    from eagle3.export.exporter import ExportRequest
    from eagle3.runtime.bundle.folder import Bundle

_DEFAULT = click.core.ParameterSource.DEFAULT
_PLAN = Plan()
_OF_INT8 = {"calibration": "--calibration", "accept_quality": "--accept-quality"}


@click.command()
@click.option("--target", required=True, metavar="MODEL", help=TARGET_HELP)
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="[NAME=]SOURCE",
    help="Draft: an EAGLE-1, EAGLE-2 or EAGLE-3 head, or a small causal LM with the target's"
    " vocabulary, given as Hugging Face id, folder or (LM only) .gguf file; or none for plain"
    " decoding. Repeatable; the first one is the default drafter.",
)
@click.option(
    "--add-draft",
    metavar="[NAME=]SOURCE",
    help="Draft to add to the existing bundle at --output, without exporting the target again.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the bundle.",
)
@click.option(
    "--plan",
    "preset",
    metavar="NAME|FILE",
    help=f"{PLAN_HELP} The options below override its values.  [default: no preset]",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default=_PLAN.backend,
    help="Backend that will run the engines. For tensorrt and tensorrt-rtx, the plan files are"
    " built too. With --dtype bfloat16, the default is ort-cuda.",
)
@click.option("--compute-capability", metavar="X.Y", help=COMPUTE_CAPABILITY_HELP)
@click.option(
    "--lowering",
    type=click.Choice(LOWERINGS),
    default=_PLAN.lowering,
    help="Attention operator in the graphs: ort is ONNX Runtime's own, portable is the ONNX"
    " standard's, which all backends except ort-cpu require and select by default.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=_PLAN.dtype,
    help="Data type of the activations, of the KV caches, and of weights stored as same.",
)
@click.option(
    "--weights",
    "target_weights",
    type=click.Choice(TARGET_WEIGHTS),
    default=_PLAN.target_weights,
    help=TARGET_WEIGHTS_HELP,
)
@click.option(
    "--draft-weights",
    type=click.Choice(DRAFT_WEIGHTS),
    default=_PLAN.draft_weights,
    help=DRAFT_WEIGHTS_HELP,
)
@click.option("--max-seq-len", default=_PLAN.max_seq_len, help=MAX_SEQ_LEN_HELP)
@click.option("--prefill-chunk", default=_PLAN.prefill_chunk, help=PREFILL_CHUNK_HELP)
@click.option(
    "--max-draft-tokens",
    default=_PLAN.max_draft_tokens,
    help="Largest draft tree that a request may use, in tokens, root excluded.",
)
@click.option("--draft-top-k", default=_PLAN.tree.draft_top_k, help=DRAFT_TOP_K_HELP)
@click.option("--draft-depth", default=_PLAN.tree.draft_depth, help=DRAFT_DEPTH_HELP)
@click.option("--num-draft-tokens", default=_PLAN.tree.num_draft_tokens, help=NUM_DRAFT_TOKENS_HELP)
@click.option(
    "--tree", metavar="NAME|FILE", help=f"Draft tree: {TREE_CHOICES}.  [default: {DYNAMIC}]"
)
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    callback=parsed(layer_numbers, "layer numbers, for example 2,15,27"),
    metavar="L,M,H",
    help=f"{AUX_LAYERS_HELP}  [default: those in the head's config]",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value to assume where a head's files are ambiguous, for example d2t=absolute."
    " Repeatable; an unknown KEY prints all keys.",
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Prompts on which --weights int8 rounds the weights: {PROMPT_FILE_HELP}."
    "  [default: a built-in text]",
)
@click.option(
    "--accept-quality",
    is_flag=True,
    help="Export an int8 target even if it is far from the original. The measured difference is"
    " stored in the bundle in any case.",
)
@click.option("--trust-remote-code", is_flag=True, help=TRUST_REMOTE_CODE_HELP)
@click.option(
    "--force",
    is_flag=True,
    help="Replace an existing bundle or, with --add-draft, an existing draft of the same name.",
)
@click.pass_context
def export(ctx: click.Context, /, **_: Any) -> None:
    """Export a target and its drafts, and check them against PyTorch.

    The result is a bundle, the folder that the other commands read. Give either --draft, to write a
    new bundle, or --add-draft, to extend an existing one. The draft tree options set the default
    tree of the exported drafts, which a request can override.
    """
    drafts, added = ctx.params["drafts"], ctx.params["add_draft"]
    if bool(drafts) == (added is not None):
        raise click.UsageError("give either --draft (a head, an LM or none) or --add-draft")
    if added is not None:
        _refuse_bundle_options(ctx)
    add = import_stage("eagle3.export.add_draft", "export", ExportError)
    stage = import_stage("eagle3.export.exporter", "export", ExportError)
    from eagle3.runtime.bundle.describe import export_lines

    if added is None:
        request = _export_request(ctx)
        obstacle = _obstacle(request.plan)
        bundle, check = stage.export_bundle(request, report=note)
    else:
        bundle, check = add.add_draft(_add_request(ctx), report=note)
        obstacle = _obstacle(bundle.manifest.plan)
    click.echo("\n".join(export_lines(bundle)))
    for warning in check.warnings:
        click.echo(f"warning: {warning}")
    _build(bundle, obstacle)


def _obstacle(plan: Plan) -> str | None:
    """Return and report the reason why this machine cannot build plan files for `plan`.

    Returns None if it can, or if the plan's backend needs no plan files.
    """
    obstacle = why_not_here(plan) if plan.backend in TENSORRT_BACKENDS else None
    if obstacle is not None:
        note(f"no plan files will be built on this machine: {obstacle}")
    return obstacle


def _build(bundle: Bundle, obstacle: str | None) -> None:
    """Build the plan files of a TensorRT bundle, or print how to build them on the device."""
    from eagle3.plans.tensorrt.plan_file_text import plan_file_lines

    if bundle.manifest.plan.backend not in TENSORRT_BACKENDS:
        return
    if obstacle is None:
        click.echo("\n".join(plan_file_lines(build_exported(bundle.root))))
    else:
        click.echo(f"warning: no plan files yet: run `eagle3 build {bundle.root}` on the device")


def _export_request(ctx: click.Context) -> ExportRequest:
    from eagle3.export.drafts.draft_source import DraftSource
    from eagle3.export.exporter import ExportRequest

    given = given_fields(ExportRequest, ctx.params)
    drafts = given["drafts"]
    if "none" in drafts and len(drafts) > 1:
        raise click.UsageError("--draft none cannot be combined with other drafts")
    sources = tuple(DraftSource.parse(each) for each in drafts if each != "none")
    plan, command = _plan(ctx), _command(ctx)
    for name, option in _OF_INT8.items():
        if name in _typed(ctx) and plan.target_weights != "int8":
            raise click.UsageError(f"{option} applies to int8 targets only: add --weights int8")
    return ExportRequest(**{**given, "drafts": sources, "plan": plan, "command": command})


def _add_request(ctx: click.Context) -> AddRequest:
    from eagle3.export.add_draft import AddRequest
    from eagle3.export.drafts.draft_source import DraftSource

    given = given_fields(AddRequest, ctx.params)
    tree = _default_tree(ctx, TreePlan(**given_fields(TreePlan, ctx.params)))
    draft, command = DraftSource.parse(ctx.params["add_draft"]), _command(ctx)
    return AddRequest(**{**given, "draft": draft, "tree": tree, "command": command})


def _refuse_bundle_options(ctx: click.Context) -> None:
    """Raise UsageError if --add-draft is combined with an option that the bundle already sets."""
    of_bundle = {each.name for each in fields(Plan)} - {"draft_weights", "tree"} | {"preset"}
    of_bundle |= set(_OF_INT8)
    for option in ctx.command.params:
        if option.name in of_bundle & _typed(ctx).keys():
            name = option.opts[-1]
            raise click.UsageError(f"{name} is set by the bundle: leave it out with --add-draft")


def _plan(ctx: click.Context) -> Plan:
    """Return the plan of the options, or the preset's plan with the given options replaced."""
    flags, preset = ctx.params, ctx.params["preset"]
    if preset is None:
        tree = _default_tree(ctx, TreePlan(**given_fields(TreePlan, flags)))
        return Plan(**{**given_fields(Plan, flags), **_implied(ctx), "tree": tree})
    from eagle3.plans.preset import load_preset

    plan, typed = load_preset(preset).plan, _typed(ctx)
    tree = _default_tree(ctx, replace(plan.tree, **given_fields(TreePlan, typed)))
    return replace(plan, **{**given_fields(Plan, typed), "tree": tree})


def _implied(ctx: click.Context) -> dict[str, Any]:
    """Return values for options that were not given but follow from options that were."""
    typed = _typed(ctx)
    implied = {}
    if typed.get("dtype") == "bfloat16":  # unsupported by ONNX Runtime's CPU provider
        implied["backend"] = "ort-cuda"
    if typed.get("backend", implied.get("backend")) in PADDED_BACKENDS:
        implied["lowering"] = "portable"
    return {name: value for name, value in implied.items() if name not in typed}


def _typed(ctx: click.Context) -> dict[str, Any]:
    return {k: v for k, v in ctx.params.items() if ctx.get_parameter_source(k) is not _DEFAULT}


def _default_tree(ctx: click.Context, dynamic: TreePlan) -> TreePlan:
    """Return the tree that --tree selects; `dynamic` if it is not given.

    A static tree is complete, unless a tree size on the command line cuts it.
    """
    name = ctx.params["tree"]
    if name is None:
        return dynamic
    if name == DYNAMIC:
        return replace(dynamic, static=None)
    return TreePlan.of_paths(read_paths(name), **given_fields(TreePlan, _typed(ctx)))


def _command(ctx: click.Context) -> str:
    """Return the command line for the manifest, without --force.

    Absolute paths are cut to their last component, so that a bundle does not name folders of the
    machine that exported it. To repeat the command, put the full paths back.
    """
    words = ["eagle3", "export"]
    for option in ctx.command.params:
        value = ctx.params[option.name or ""]
        typed = ctx.get_parameter_source(option.name or "") is not _DEFAULT
        if not typed or option.name == "force":
            continue
        for each in value if option.multiple else (value,):
            words += [option.opts[-1], *_word(option.name, each)]
    return shlex.join(words)


def _word(option: str | None, value: Any) -> list[str]:
    """Return an option's value as it is written on the command line; nothing for a flag."""
    if value is True:
        return []
    if isinstance(value, tuple):
        return [",".join(map(str, value))]
    paths = ("target", "drafts", "add_draft", "output", "preset", "tree", "calibration")
    return [_without_folders(str(value)) if option in paths else str(value)]


def _without_folders(text: str) -> str:
    """Return the last component of an absolute path, also after "NAME="."""
    name, equals, path = text.rpartition("=")
    if Path(text).is_absolute():
        return Path(text).name
    return f"{name}{equals}{Path(path).name}" if Path(path).is_absolute() else text
