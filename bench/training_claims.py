"""The claims of the paper about training, on one machine: trains, decodes, writes CSV, plots.

    python bench/training_claims.py run --data DIR --target T -o WORK --csv FILE PROMPTS...
    python bench/training_claims.py plot FILE FOLDER

DIR: a folder of `eagle3 train data --features` whose layers hold the top one. PROMPTS: jsonl, a
task each; never trained on. Every head is trained for the same number of epochs on the same
conversations (or a share of them) and measured by real greedy decoding, with a dynamic tree for
tau and with a chain for acceptance by draft position. Finished variants in the CSV are skipped.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from eagle3.plans.tree_plan import TreePlan
from eagle3.train.evaluation.evaluate import EvalRequest, evaluate
from eagle3.train.loop.train_head import train_head
from eagle3.train.requests.recipe import Recipe, TrainRequest

SHARES = (0.125, 0.25, 0.5, 1.0)
TREES = {"tree": TreePlan(4, 4, 10), "chain": TreePlan(1, 5, 5)}
POSITIONS = 5
COLUMNS = ("variant", "share", "shape", "task", "prompts", "rounds", "tau")


@dataclass(frozen=True)
class Variant:
    """A head to train: its recipe, and the fraction of the data that it uses."""

    name: str
    recipe: Recipe
    share: float = 1.0


def variants(base: Recipe, steps: int) -> Iterator[Variant]:
    """Yield the ablation, the fastest first, then the remaining variants of tau against data."""
    eagle1 = replace(base, method="eagle1", ttt_steps=1)
    eagle3 = replace(base, ttt_steps=steps)
    yield Variant("no feature loss", replace(base, fusion=False, ttt_steps=1))
    yield Variant("training-time test", replace(base, fusion=False, ttt_steps=steps))
    yield Variant("fused features", eagle3)
    yield Variant("eagle1", eagle1)
    for share in SHARES[:-1]:
        yield Variant("fused features", eagle3, share)
        yield Variant("eagle1", eagle1, share)


@click.group(help=__doc__.splitlines()[0])
def main() -> None:
    pass


@main.command()
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--target", required=True)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--csv", "table", required=True, type=click.Path(path_type=Path))
@click.option(
    "--unit", default=1.0, show_default=True, help="Share of DIR that counts as all of it."
)
@click.option("--epochs", default=1, show_default=True)
@click.option("--ttt-steps", default=4, show_default=True)
@click.option("--num-prompts", default=5, show_default=True)
@click.option("--max-new-tokens", default=96, show_default=True)
@click.argument("prompts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def run(
    data: Path,
    target: str,
    output: Path,
    table: Path,
    unit: float,
    epochs: int,
    ttt_steps: int,
    prompts: Sequence[Path],
    **decoding: Any,
) -> None:
    base = Recipe(epochs=epochs, batch_tokens=1536, bf16=True, warmup=0.05)
    for each in variants(base, ttt_steps):
        if (each.name, each.share) in _measured(table):
            continue
        folder = output / f"{each.name.replace(' ', '-')}-{each.share:g}"
        click.echo(f"{folder.name}: training", err=True)
        recipe = replace(each.recipe, data_share=each.share * unit)
        if not (folder / "training.json").is_file():
            train_head(TrainRequest(data, folder, recipe, target), _note)
        _measure(each, EvalRequest(target, folder, tuple(prompts), **decoding), table)


def _measured(table: Path) -> set[tuple[str, float]]:
    if not table.is_file():
        return set()
    with table.open(newline="", encoding="utf-8") as file:
        return {(row["variant"], float(row["share"])) for row in csv.DictReader(file)}


def _measure(variant: Variant, request: EvalRequest, table: Path) -> None:
    """Decode (the ablation's heads with both tree shapes) and append a row per shape and task."""
    bundle, rows = request.draft / "bundle", []
    for shape, tree in TREES.items():
        if shape == "chain" and variant.share < 1:
            continue
        for task in evaluate(replace(request, tree=tree, bundle=bundle), _note).tasks:
            numbers = task.to_json()
            shares = numbers.pop("acceptance_by_position")
            row = {"variant": variant.name, "share": variant.share, "shape": shape, **numbers}
            rows.append(row | {f"alpha_{i}": share for i, share in enumerate(shares)})
    shutil.rmtree(bundle)
    new = not table.is_file()
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a", newline="", encoding="utf-8") as file:
        alphas = [f"alpha_{i}" for i in range(POSITIONS)]
        writer = csv.DictWriter(file, [*COLUMNS, *alphas])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _note(text: str) -> None:
    click.echo(text, err=True)


@main.command()
@click.argument("table", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def plot(table: Path, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4))
    whole = [row for row in rows if float(row["share"]) == 1]
    for name in names:
        chain = [r for r in whole if r["variant"] == name and r["shape"] == "chain"]
        alphas = [_weighted(chain, f"alpha_{i}") for i in range(POSITIONS)]
        axes[0].plot(range(POSITIONS), alphas, marker="o", label=name)
        of_name = [r for r in rows if r["variant"] == name and r["shape"] == "tree"]
        shares = sorted({float(r["share"]) for r in of_name})
        if len(shares) > 1:
            taus = [_mean([r for r in of_name if float(r["share"]) == s], "tau") for s in shares]
            axes[2].plot(shares, taus, marker="o", label=name)
    bars = [
        _mean([r for r in whole if r["variant"] == n and r["shape"] == "tree"], "tau")
        for n in names
    ]
    axes[1].bar([n.replace(" ", "\n") for n in names], bars)
    titles = (
        "acceptance by draft position (chain)",
        "tau (tree 4, 4, 10)",
        "tau against share of data",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[1].set_ylim(1, max(bars) * 1.05)
    axes[0].legend()
    axes[2].set_visible(bool(axes[2].lines))
    if axes[2].lines:
        axes[2].legend()
    figure.tight_layout()
    figure.savefig(folder / "claims.png", dpi=110)


def _mean(rows: Sequence[dict[str, str]], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def _weighted(rows: Sequence[dict[str, str]], name: str) -> float:
    """Return the mean over rounds."""
    rounds = sum(float(row["rounds"]) for row in rows)
    return sum(float(row[name] or 0) * float(row["rounds"]) for row in rows) / rounds


if __name__ == "__main__":
    main()
