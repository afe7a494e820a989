"""`eagle3 export`: parses and calls; torch is imported within the command."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.plans.backends import PADDED_BACKENDS, TENSORRT_BACKENDS
from eagle3.plans.commands.build_command import build_exported, why_not_here
from eagle3.plans.plan import BACKENDS, DRAFT_WEIGHTS, DTYPES, LOWERINGS, Plan
from eagle3.plans.tree_paths import DYNAMIC, TREE_CHOICES, read_paths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import ExportError
from eagle3.runtime.terminal.options import given_fields, import_stage, layer_numbers, note, parsed

if TYPE_CHECKING:
    from eagle3.export.add_draft import AddRequest
    from eagle3.export.exporter import ExportRequest
    from eagle3.runtime.bundle.folder import Bundle

_DEFAULT = click.core.ParameterSource.DEFAULT
_PLAN = Plan()


@click.command()
@click.option("--target", required=True, help="Hugging Face id, folder, or .gguf file.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="[NAME=]SOURCE",
    help="Folder or id of an EAGLE-1, -2 or -3 head, or a small causal LM (also a .gguf file) of"
    " the same vocabulary, or 'none'. Repeatable: the first is the default drafter.",
)
@click.option(
    "--add-draft",
    metavar="[NAME=]SOURCE",
    help="A draft for the bundle that stands at --output; its target is not exported again.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder.")
@click.option(
    "--plan",
    "preset",
    metavar="NAME|FILE",
    help="See `eagle3 plan list`, or a .toml file; the options below override it.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default=_PLAN.backend,
    help="What will run the engines; for TensorRT the plan files are built too.",
)
@click.option(
    "--compute-capability", metavar="X.Y", help="Of the GPU that TensorRT builds for, as 8.9."
)
@click.option("--lowering", type=click.Choice(LOWERINGS), default=_PLAN.lowering)
@click.option("--dtype", type=click.Choice(DTYPES), default=_PLAN.dtype, help="Of the target.")
@click.option(
    "--draft-weights",
    type=click.Choice(DRAFT_WEIGHTS),
    default=_PLAN.draft_weights,
    help="Of these drafts: as --dtype, or int8: faster, accepts a little less; the output stays"
    " exact.",
)
@click.option("--max-seq-len", default=_PLAN.max_seq_len, help="Prompt and answer, in tokens.")
@click.option("--prefill-chunk", default=_PLAN.prefill_chunk, help="Prompt tokens in one call.")
@click.option("--max-draft-tokens", default=_PLAN.max_draft_tokens, help="Of any request's tree.")
@click.option("--draft-top-k", default=_PLAN.tree.draft_top_k, help="Of the drafts' own tree.")
@click.option("--draft-depth", default=_PLAN.tree.draft_depth, help="Of that tree.")
@click.option("--num-draft-tokens", default=_PLAN.tree.num_draft_tokens, help="Of that tree.")
@click.option("--tree", metavar="NAME|FILE", help=f"The default tree: {TREE_CHOICES}.")
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    callback=parsed(layer_numbers, "layer numbers, as in 2,15,27"),
    metavar="L,M,H",
    help="Fused layers as hidden_states indices, where a head's config does not name them.",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="KEY=VALUE",
    help="Decide what a head's files leave open, as in d2t=absolute; repeatable. A wrong KEY lists"
    " them all.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run code from the target's repository.")
@click.option("--force", is_flag=True, help="Replace a bundle, or a draft, that is there.")
@click.pass_context
def export(ctx: click.Context, /, **_: Any) -> None:
    """Compile a target and its drafts into a bundle, and check it against PyTorch."""
    drafts, added = ctx.params["drafts"], ctx.params["add_draft"]
    if bool(drafts) == (added is not None):
        raise click.UsageError("give --draft (a head, an LM or 'none'), or --add-draft")
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
    """What keeps this machine from building a TensorRT plan's files, said at once."""
    obstacle = why_not_here(plan) if plan.backend in TENSORRT_BACKENDS else None
    if obstacle is not None:
        note(f"no plan files will be built here: {obstacle}")
    return obstacle


def _build(bundle: Bundle, obstacle: str | None) -> None:
    """The plan files of a bundle for TensorRT, or how they are had where they can be built."""
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
        raise click.UsageError("--draft none stands alone")
    sources = tuple(DraftSource.parse(each) for each in drafts if each != "none")
    plan, command = _plan(ctx), _command(ctx)
    return ExportRequest(**{**given, "drafts": sources, "plan": plan, "command": command})


def _add_request(ctx: click.Context) -> AddRequest:
    from eagle3.export.add_draft import AddRequest
    from eagle3.export.drafts.draft_source import DraftSource

    given = given_fields(AddRequest, ctx.params)
    tree = _default_tree(ctx, TreePlan(**given_fields(TreePlan, ctx.params)))
    draft, command = DraftSource.parse(ctx.params["add_draft"]), _command(ctx)
    return AddRequest(**{**given, "draft": draft, "tree": tree, "command": command})


def _refuse_bundle_options(ctx: click.Context) -> None:
    """What a bundle was exported with holds for a draft that is added too."""
    of_bundle = {each.name for each in fields(Plan)} - {"draft_weights", "tree"} | {"preset"}
    for option in ctx.command.params:
        if option.name in of_bundle & _typed(ctx).keys():
            name = option.opts[-1]
            raise click.UsageError(f"{name} is the bundle's own: it does not go with --add-draft")


def _plan(ctx: click.Context) -> Plan:
    """What the options say, or the preset and what was typed beside it."""
    flags, preset = ctx.params, ctx.params["preset"]
    if preset is None:
        tree = _default_tree(ctx, TreePlan(**given_fields(TreePlan, flags)))
        return Plan(**{**given_fields(Plan, flags), **_implied(ctx), "tree": tree})
    from eagle3.plans.preset import load_preset

    plan, typed = load_preset(preset).plan, _typed(ctx)
    tree = _default_tree(ctx, replace(plan.tree, **given_fields(TreePlan, typed)))
    return replace(plan, **{**given_fields(Plan, typed), "tree": tree})


def _implied(ctx: click.Context) -> dict[str, Any]:
    """What follows from options that were typed for those that were not."""
    typed = _typed(ctx)
    implied = {}
    if typed.get("dtype") == "bfloat16":  # ONNX Runtime's CPU provider has none
        implied["backend"] = "ort-cuda"
    if typed.get("backend", implied.get("backend")) in PADDED_BACKENDS:
        implied["lowering"] = "portable"
    return {name: value for name, value in implied.items() if name not in typed}


def _typed(ctx: click.Context) -> dict[str, Any]:
    return {k: v for k, v in ctx.params.items() if ctx.get_parameter_source(k) is not _DEFAULT}


def _default_tree(ctx: click.Context, dynamic: TreePlan) -> TreePlan:
    """The static tree that was named, whole unless a size was typed; else the dynamic one."""
    name = ctx.params["tree"]
    if name is None:
        return dynamic
    if name == DYNAMIC:
        return replace(dynamic, static=None)
    return TreePlan.of_paths(read_paths(name), **given_fields(TreePlan, _typed(ctx)))


def _command(ctx: click.Context) -> str:
    """What was typed, less --force, which the manifest keeps.

    An absolute path in it is cut to its last name: put it back to repeat it.
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
    """How an option's value was typed; nothing for a flag."""
    if value is True:
        return []
    if isinstance(value, tuple):
        return [",".join(map(str, value))]
    paths = ("target", "drafts", "add_draft", "output", "preset", "tree")
    return [_without_folders(str(value)) if option in paths else str(value)]


def _without_folders(text: str) -> str:
    """The last name of an absolute path, also behind "NAME="."""
    name, equals, path = text.rpartition("=")
    if Path(text).is_absolute():
        return Path(text).name
    return f"{name}{equals}{Path(path).name}" if Path(path).is_absolute() else text
