"""Tokens per second of batched plain decoding, against `transformers.generate` in the same run.

    python bench/batch_generate.py --bundle B --target T PROMPTS.jsonl [--first N]
        [--max-new-tokens 128] [--rows 32] [--temperature T] [--threads N]

PROMPTS: jsonl with `prompt` (or `turns`, of which the first is used), each asked as a user's
message. T: what the bundle was exported from; transformers runs it in float32, in file order, in
batches of `--rows` prompts padded on the left. Counted are generated tokens, up to and including
the end token of each row; the time is that of everything behind loading and tokenizing, prefill
and sampling included. Rows of transformers that have ended wait for the longest of their batch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from eagle3.export.targets.target import load_target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.batch_engine import BatchEngine, BatchRequest
from eagle3.runtime.params import SamplingParams
from eagle3.runtime.text.chat_template import ChatTemplate
from eagle3.runtime.text.prompt_encoding import encode_prompt
from eagle3.runtime.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Measured:
    """The answers of one way to decode, by prompt, and their time."""

    token_ids: list[tuple[int, ...]]
    seconds: float
    outside_engine: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    def line(self, name: str) -> str:
        outside = "" if self.outside_engine is None else f", outside {self.outside_engine:.1%}"
        return (
            f"{name:12} {self.rate:7.1f} tok/s ({self.num_tokens} tokens of "
            f"{len(self.token_ids)} prompts in {self.seconds:.1f} s{outside})"
        )


def prompts_of(path: Path, bundle: Bundle, first: int) -> list[list[int]]:
    """Return the token ids of the first prompts of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:first]]
    tokenizer, source = load_tokenizer(bundle), bundle.chat_template()
    manifest = bundle.manifest
    template = None
    if source is not None:
        template = ChatTemplate(source, manifest.tokenizer.special_tokens)
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    size = manifest.target.vocab_size
    return [encode_prompt(text, tokenizer, template, True, size) for text in texts]


def ours(
    bundle: Bundle, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, **sizes: Any
) -> Measured:
    engine = BatchEngine(bundle, **sizes)
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(len(prompts))]
    requests = [
        BatchRequest(str(i), tuple(ids), params[i], tokens) for i, ids in enumerate(prompts)
    ]
    start = time.perf_counter()
    answers = {answer.key: answer.token_ids for answer in engine.generate(requests)}
    seconds = time.perf_counter() - start
    outside = 1 - engine.clock.engine_ns / 1e9 / seconds
    return Measured([answers[request.key] for request in requests], seconds, outside)


def theirs(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, rows: int
) -> Measured:
    """Run `model.generate` on batches. Tokens after the end of a row are not counted."""
    torch.manual_seed(0)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    pad = min(ends, default=0)
    answers: list[tuple[int, ...]] = []
    start = time.perf_counter()
    for at in range(0, len(prompts), rows):
        batch = prompts[at : at + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            pad_token_id=pad,
            top_p=None,
            top_k=None,
            **sampling,
        )
        answers.extend(cut(row, ends) for row in out[:, width:].tolist())
    return Measured(answers, time.perf_counter() - start)


def cut(ids: Sequence[int], ends: set[int]) -> tuple[int, ...]:
    """Return the ids up to and including the first end token."""
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[:stop])


@click.command(help=__doc__.splitlines()[0])
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--bundle", "folder", required=True, type=click.Path(exists=True))
@click.option("--target", help="What the bundle was exported from; left out: no comparison.")
@click.option("--first", default=64, show_default=True, help="Prompts of the file.")
@click.option("--max-new-tokens", "tokens", default=128, show_default=True)
@click.option("--rows", default=32, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--threads", type=int, help="Of both; by default the cores of this process.")
def main(
    file: Path,
    folder: str,
    target: str | None,
    first: int,
    tokens: int,
    rows: int,
    temperature: float,
    threads: int | None,
) -> None:
    bundle = Bundle.open(folder)
    room = bundle.manifest.plan.max_seq_len - tokens
    prompts = [ids for ids in prompts_of(file, bundle, first) if len(ids) <= room]
    threads = threads or len(os.sched_getaffinity(0))
    lengths = sorted(map(len, prompts))
    click.echo(
        f"{len(prompts)} prompts of at most {room} tokens (mean {sum(lengths) / len(lengths):.0f}, "
        f"longest {lengths[-1]}), {tokens} new tokens at most, {rows} rows, {threads} threads"
    )
    here = ours(bundle, prompts, tokens, temperature, rows=rows, threads=threads)
    click.echo(here.line("eagle3"))
    if target is None:
        return
    torch.set_num_threads(threads)
    there = theirs(load_target(target, "float32").model, prompts, tokens, temperature, rows)
    click.echo(there.line("transformers"))
    equal = sum(a == b for a, b in zip(here.token_ids, there.token_ids, strict=True))
    click.echo(f"ratio {here.rate / there.rate:.2f}, token-equal {equal}/{len(prompts)}")


if __name__ == "__main__":
    main()
