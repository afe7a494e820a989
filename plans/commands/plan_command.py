"""`eagle3 plan ...`: parses and calls; what reads a model is imported within the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runtime.errors import PlanError
from eagle3.runtime.terminal.options import import_stage, json_option, note, parsed, print_result

if TYPE_CHECKING:
    from eagle3.plans.facts import DraftFacts, TargetFacts
    from eagle3.plans.plan import Plan


def _taus(value: str) -> tuple[float, ...]:
    return tuple(float(part) for part in value.split(","))


@click.group("plan")
def plan_group() -> None:
    """What to build for which device: presets, and whether a model fits one."""


@plan_group.command("list")
@json_option
def list_presets(as_json: bool) -> None:
    """List the presets, with what each device has."""
    from eagle3.plans.preset import load_preset, preset_names

    presets = [load_preset(name) for name in preset_names()]
    lines = [f"{each.name:18}{each.summary}" for each in presets]
    print_result({each.name: each.to_json() for each in presets}, lines, as_json)


@plan_group.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Print the preset NAME, or a .toml file, with the reason for each choice."""
    from eagle3.plans.preset import load_preset

    preset = load_preset(name)
    print_result(preset.to_json(), preset.text.splitlines(), as_json)


@plan_group.command()
@click.argument("model")
@click.option(
    "--plan", "preset_name", required=True, metavar="NAME|FILE", help="A preset, or a .toml file."
)
@click.option("--draft", metavar="HEAD", help="Folder or id of an EAGLE head.")
@click.option("--max-seq-len", type=int, help="In place of the plan's.")
@click.option("--batch", type=int, help="In place of the plan's.")
@click.option("--context", type=int, help="Tokens in the cache; default: 512, or what fits.")
@click.option(
    "--tau",
    "taus",
    callback=parsed(_taus, "numbers, as in 2.5,4"),
    metavar="N,...",
    help="Acceptance lengths to tell the speedup for; default: 1 to all of a tree's depth.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run code from the target's repository.")
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
    """Reckon MODEL through: bytes against the device's memory, and what a round costs at best.

    MODEL is a hub id, a folder, a .gguf file or a bundle; no weights are read. Exit 1 if it does
    not fit.
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
    """Of a bundle from its manifest, of anything else with transformers."""
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
        raise PlanError(f"{model} is a bundle, which has its own draft: leave --draft out")
    bundle = Bundle.open(model)
    for difference in differences(bundle, plan):
        note(f"note: {difference}")
    return bundle_facts(bundle)
