"""Acceptance length and speed of a bundle on prompt files, against plain decoding in the same run.

    python bench/acceptance.py BUNDLE FILES... [--first 5] [--max-new-tokens 128]
        [--drafter NAME] [--tree K,D,N ...] [--context TOKENS] [--temperature T --acceptance RULE]

FILES: jsonl with `turns` (the first is used) or `prompt`. Plain and speculative runs alternate,
prompt by prompt, so that a busy machine slows both. One line per file and tree: tau (committed
tokens per target call, the target's own included), speed against plain, the share of the time
outside engines, and how many texts are token-equal to plain decoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import eagle3


@dataclass
class Sum:
    """The accumulated results of one way to decode."""

    results: list[eagle3.Result] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        return sum(r.stats.decode_ms for r in self.results) / sum(
            len(r.token_ids) - 1 for r in self.results
        )

    @property
    def rounds(self) -> int:
        return sum(r.stats.rounds for r in self.results)

    @property
    def tau(self) -> float:
        return sum(r.stats.rounds * r.stats.acceptance_length for r in self.results) / self.rounds

    @property
    def overhead(self) -> float:
        engine, whole = (
            sum(getattr(r.stats, name) for r in self.results) for name in ("engine_ms", "decode_ms")
        )
        return 1 - engine / whole


def prompts_of(path: Path, first: int) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[:first]]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def long_prompts(engine: eagle3.Engine, prompts: Sequence[str], context: int) -> list[str]:
    """Return the prompts concatenated and cut to about `context` tokens, each starting at another
    prompt.
    """
    longer = []
    for start in range(len(prompts)):
        text = "\n\n".join([*prompts[start:], *prompts[:start]] * (context // 50 + 1))
        ids = engine.tokenizer.encode(text[: context * 8], add_special_tokens=False).ids
        longer.append(engine.tokenizer.decode(ids[: context - 40]))
    return longer


@click.command(help=__doc__.splitlines()[0])
@click.argument("bundle", type=click.Path(exists=True))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--first", default=5, show_default=True, help="Prompts of each file.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--drafter", help="One of the bundle's; default: its first.")
@click.option("--tree", "trees", multiple=True, help="draft_top_k,draft_depth,num_draft_tokens.")
@click.option("--context", type=int, help="Make each prompt about this many tokens long.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--acceptance", default="coupled", show_default=True)
@click.option("--threads", type=int)
def main(
    bundle: str,
    files: Sequence[Path],
    first: int,
    drafter: str | None,
    trees: Sequence[str],
    context: int | None,
    threads: int | None,
    **options: Any,
) -> None:
    engine = eagle3.load(bundle, threads=threads)
    engine.generate("Hello", max_new_tokens=8, drafter="none")
    for path in files:
        prompts = prompts_of(path, first)
        if context is not None:
            prompts = long_prompts(engine, prompts, context)
        plain, drafted = Sum(), {tree: Sum() for tree in trees or ("plan",)}
        for prompt in prompts:
            plain.results.append(engine.generate(prompt, drafter="none", **options))
            for tree, into in drafted.items():
                more = {**sizes(tree), **options}
                into.results.append(engine.generate(prompt, drafter=drafter, **more))
        for tree, each in drafted.items():
            click.echo(line(path.stem, tree, plain, each))


def sizes(tree: str) -> dict[str, int]:
    """Return the three draft sizes of K,D,N, or none for the bundle's own plan."""
    if tree == "plan":
        return {}
    names = ("draft_top_k", "draft_depth", "num_draft_tokens")
    return dict(zip(names, map(int, tree.split(",")), strict=True))


def line(name: str, tree: str, plain: Sum, drafted: Sum) -> str:
    pairs = zip(plain.results, drafted.results, strict=True)
    equal = sum(a.token_ids == b.token_ids for a, b in pairs)
    return (
        f"{name:10} tree {tree:8} tau {drafted.tau:.3f} speed "
        f"{plain.ms_per_token / drafted.ms_per_token:.3f}x "
        f"(plain {1000 / plain.ms_per_token:.1f} tok/s) outside engines {drafted.overhead:.1%} "
        f"token-equal {equal}/{len(plain.results)}"
    )


if __name__ == "__main__":
    main()
