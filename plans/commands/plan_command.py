"""The commands `eagle3 plan ...`. Modules that read a model are imported inside the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runtime.errors import PlanError
from eagle3.runtime.terminal.options import (
    BATCH_HELP,
    MAX_SEQ_LEN_HELP,
    PLAN_HELP,
    TRUST_REMOTE_CODE_HELP,
    import_stage,
    json_option,
    note,
    parsed,
    print_result,
)

if TYPE_CHECKING:
    from eagle3.plans.facts import DraftFacts, TargetFacts
    from eagle3.plans.plan import Plan


def _taus(value: str) -> tuple[float, ...]:
    return tuple(float(part) for part in value.split(","))


@click.group("plan")
def plan_group() -> None:
    """List device presets, and estimate memory and latency of a model."""


@plan_group.command("list")
@json_option
def list_presets(as_json: bool) -> None:
    """List the presets, with each device's memory and backend."""
    from eagle3.plans.preset import load_preset, preset_names

    presets = [load_preset(name) for name in preset_names()]
    lines = [f"{each.name:18}{each.summary}" for each in presets]
    print_result({each.name: each.to_json() for each in presets}, lines, as_json)


@plan_group.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Print a plan with the reason for each choice.

    NAME is the name of a preset or the path of a .toml file.
    """
    from eagle3.plans.preset import load_preset

    preset = load_preset(name)
    print_result(preset.to_json(), preset.text.splitlines(), as_json)


@plan_group.command(short_help="Estimate whether MODEL fits a device, and its latency.")
@click.argument("model")
@click.option("--plan", "preset_name", required=True, metavar="NAME|FILE", help=PLAN_HELP)
@click.option(
    "--draft",
    metavar="HEAD",
    help="EAGLE head: Hugging Face id or folder. Leave it out if MODEL is a bundle, which has its"
    " own.  [default: plain decoding]",
)
@click.option("--max-seq-len", type=int, help=f"{MAX_SEQ_LEN_HELP}  [default: the plan's]")
@click.option("--batch", type=int, help=f"{BATCH_HELP}  [default: the plan's]")
@click.option(
    "--context",
    type=int,
    help="Tokens in the KV cache when the estimated round starts.  [default: 512, or half of"
    " --max-seq-len if that is less]",
)
@click.option(
    "--tau",
    "taus",
    callback=parsed(_taus, "numbers, for example 2.5,4"),
    metavar="N,...",
    help="Acceptance lengths (tokens per round) to estimate the speedup for.  [default: 1 to the"
    " depth of the tree plus 1]",
)
@click.option("--trust-remote-code", is_flag=True, help=TRUST_REMOTE_CODE_HELP)
@json_option
def check(
    model: str,
    preset_name: str,
    draft: str | None,
    max_seq_len: int | None,
    batch: int | None,
    context: int | None,
    taus: tuple[float, ...] | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Estimate whether MODEL fits a device, and the lowest latency of a round.

    MODEL is a Hugging Face id, a folder, a .gguf file or a bundle. No weights are read. Exits with
    status 1 if the model does not fit.
    """
    from eagle3.plans.plan_report import plan_report
    from eagle3.plans.preset import load_preset

    preset = load_preset(preset_name)
    plan = _overridden(preset.plan, max_seq_len=max_seq_len, batch=batch)
    target, head = _facts(model, draft, plan, trust_remote_code)
    report = plan_report(target, head, replace(preset, plan=plan), context, taus or ())
    for reason in plan.unbuilt:
        note(f"warning: this plan cannot be built yet: {reason}")
    print_result(report.to_json(), report.lines(), as_json)


def _overridden(plan: Plan, **given: Any) -> Plan:
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def _facts(
    model: str, draft: str | None, plan: Plan, trust_remote_code: bool
) -> tuple[TargetFacts, DraftFacts | None]:
    """Return the sizes of a model: from the manifest if it is a bundle, otherwise from its config.

    Reading a config needs transformers.
    """
    from eagle3.runtime.bundle.folder import MANIFEST_NAME

    if (Path(model) / MANIFEST_NAME).is_file():
        return _bundle_facts(model, draft, plan)
    facts = import_stage("eagle3.export.targets.checkpoint_facts", "export", PlanError)
    target = facts.target_facts(model, trust_remote_code=trust_remote_code)
    return target, None if draft is None else facts.draft_facts(draft, target)


def _bundle_facts(
    model: str, draft: str | None, plan: Plan
) -> tuple[TargetFacts, DraftFacts | None]:
    from eagle3.runtime.bundle.bundle_facts import bundle_facts, differences
    from eagle3.runtime.bundle.folder import Bundle

    if draft is not None:
        raise PlanError(f"{model} is a bundle and has its own draft: leave --draft out")
    bundle = Bundle.open(model)
    for difference in differences(bundle, plan):
        note(f"note: {difference}")
    return bundle_facts(bundle)
