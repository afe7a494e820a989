"""Acceptance length and speed of a bundle on prompt files, against plain decoding in the same run.

    python bench/acceptance.py BUNDLE FILES... [--first 5] [--max-new-tokens 128] \
        [--tree K,D,N ...] [--threads T]

FILES: jsonl with `turns` (the first is used) or `prompt`. Prints one line per tree and file: tau
(committed tokens per target call, the target's own included), rounds, ratio of speeds, and whether
every text is token-equal to plain decoding.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

import eagle3


def prompts_of(path: Path, first: int) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[:first]]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


@click.command(help=__doc__.splitlines()[0])
@click.argument("bundle", type=click.Path(exists=True))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--first", default=5, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--tree", "trees", multiple=True, default=["4,4,10"], show_default=True)
@click.option("--threads", type=int)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--acceptance", default="coupled", show_default=True)
def main(bundle, files, first, max_new_tokens, trees, threads, temperature, acceptance):
    engine = eagle3.load(bundle, threads=threads)
    options = dict(max_new_tokens=max_new_tokens, temperature=temperature, acceptance=acceptance)
    for path in files:
        prompts = prompts_of(path, first)
        plain = [engine.generate(p, drafter="none", **options) for p in prompts]
        for tree in trees:
            top_k, depth, nodes = map(int, tree.split(","))
            sizes = dict(draft_top_k=top_k, draft_depth=depth, num_draft_tokens=nodes)
            drafted = [engine.generate(p, **sizes, **options) for p in prompts]
            print(_line(path.stem, tree, plain, drafted), flush=True)


def _line(name, tree, plain, drafted) -> str:
    rounds = sum(r.stats.rounds for r in drafted)
    committed = sum(r.stats.rounds * r.stats.acceptance_length for r in drafted)
    per_token = [
        sum(r.stats.decode_ms for r in results) / sum(len(r.token_ids) - 1 for r in results)
        for results in (plain, drafted)
    ]
    overhead = 1 - sum(r.stats.engine_ms for r in drafted) / sum(r.stats.decode_ms for r in drafted)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    return (
        f"{name:10} tree {tree:8} tau {committed / rounds:.3f} rounds {rounds} "
        f"speed {per_token[0] / per_token[1]:.3f}x (plain {1000 / per_token[0]:.1f} tok/s) "
        f"python {overhead:.1%} equal {equal}/{len(plain)}"
    )


if __name__ == "__main__":
    main()
