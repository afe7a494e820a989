"""What a draft costs grown in one call (`draft_tree`) and grown a level a call, in the same run.

    python bench/draft_growth.py BUNDLE FILES... [--first 5] [--max-new-tokens 128] [--repeat 2]
        [--context TOKENS] [--threads N]

FILES: prompts, as in bench/acceptance.py. Both ways alternate, prompt by prompt, so that a busy
machine slows both. Prints milliseconds a round and a proposal, medians over rounds, by the clock
and (with --threads 1, on a busy machine) of this process alone, and how many texts are equal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from acceptance import long_prompts, prompts_of
from numpy.typing import NDArray

import eagle3


def _now() -> NDArray[np.float64]:
    """Return milliseconds of wall-clock time, and of this process on all cores."""
    return np.array([time.perf_counter(), time.process_time()]) * 1e3


@dataclass
class Way:
    """One way to grow a tree, with the time of each proposal and each round."""

    growth: Any
    proposals: list[NDArray[np.float64]] = field(default_factory=list)
    rounds: list[NDArray[np.float64]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def run(self, engine: eagle3.Engine, prompt: str, max_new_tokens: int) -> None:
        """Decode greedily and append to the lists."""
        drafter: Any = engine.drafter(engine.default_drafter)
        drafter._growth = self.growth
        propose = type(drafter).propose

        def timed(request: Any) -> Any:
            start = _now()
            tree = propose(drafter, request)
            self.proposals.append(_now() - start)
            return tree

        drafter.propose = timed
        # Naming the drafter disables the fallback to plain decoding.
        options: Any = {"drafter": drafter.name, "max_new_tokens": max_new_tokens}
        tokens: list[int] = []
        last = None
        for chunk in engine.stream(prompt, **options):
            now = _now()
            if last is not None:
                self.rounds.append(now - last)
            last = now
            tokens += chunk.token_ids
        del drafter.propose
        self.texts.append(tokens)

    def medians(self) -> NDArray[np.float64]:
        """Return [2,2]: proposal and round, in wall-clock and in process time."""
        return np.array([np.median(x, axis=0) for x in (self.proposals, self.rounds)])


@click.command()
@click.argument("bundle")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--first", default=5)
@click.option("--max-new-tokens", default=128)
@click.option("--repeat", default=2)
@click.option("--context", default=0, help="Prompts of about this many tokens.")
@click.option("--threads", default=None, type=int)
def main(
    bundle: str,
    files: tuple[Path, ...],
    first: int,
    max_new_tokens: int,
    repeat: int,
    context: int,
    threads: int | None,
) -> None:
    engine = eagle3.load(bundle, threads=threads)
    growth = engine.drafter(engine.default_drafter)._growth  # type: ignore[attr-defined]
    if growth is None:
        raise click.ClickException(f"{bundle} has no engine draft_tree: export it again")
    prompts = [prompt for file in files for prompt in prompts_of(file, first)]
    if context:
        prompts = long_prompts(engine, prompts, context)
    for way in (warm := (Way(growth), Way(None))):
        way.run(engine, prompts[0], 16)
    del warm
    whole, stepwise = Way(growth), Way(None)
    for number in range(repeat):
        for i, prompt in enumerate(prompts):
            ways = (whole, stepwise) if (i + number) % 2 else (stepwise, whole)
            for way in ways:
                way.run(engine, prompt, max_new_tokens)
    for name, each in (
        ("one call", whole.medians()),
        ("a level a call", stepwise.medians()),
        ("ratio", whole.medians() / stepwise.medians()),
    ):
        numbers = [f"{clock:8.3f} ({own:.3f} own)" for clock, own in each]
        click.echo(f"{name:>15}: proposal {numbers[0]}, round {numbers[1]}")
    equal = sum(a == b for a, b in zip(whole.texts, stepwise.texts, strict=True))
    click.echo(f"          texts: {equal} of {len(whole.texts)} equal")


if __name__ == "__main__":
    main()
