"""Makes a small LM that drafts for a target: its first layers, with its embeddings, norm and head.

The layers are copied as they are; such a model guesses little. With --answers, texts that the
target wrote, it is trained for a few minutes to say what the target would say next.

    python bench/small_model.py TARGET small --layers 8 --answers answers.jsonl --minutes 10
    eagle3 export --target TARGET --draft small -o bundle
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from eagle3.export.targets.target import Target, load_target
from eagle3.runtime.errors import ExportError

_LEARNING_RATE = 3e-4
_REPORT_EVERY = 50  # steps


@click.command()
@click.argument("target")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--layers", default=8, show_default=True, help="How many of the target's, from 0.")
@click.option(
    "--answers",
    type=click.Path(exists=True, path_type=Path),
    help="JSON lines with `prompt` and the `answer_ids` that the target wrote, as `eagle3 train"
    " data` keeps them; with it the layers are trained.",
)
@click.option("--minutes", default=10.0, show_default=True, help="Of training.")
@click.option("--max-tokens", default=512, show_default=True, help="Of a text in training.")
def main(
    target: str, output: Path, layers: int, answers: Path | None, minutes: float, max_tokens: int
) -> None:
    """Write the small LM of TARGET into the folder OUTPUT."""
    teacher = load_target(target, "float32")
    student = first_layers(teacher, layers)
    if answers is not None:
        texts = read_texts(answers, teacher.tokenizer)
        distill(student, teacher.model, texts, minutes, max_tokens)
    student.save_pretrained(output)
    teacher.tokenizer.save_pretrained(output)
    click.echo(f"{output}: {layers} of {teacher.kv.num_layers} layers")


def first_layers(teacher: Target, count: int) -> Any:
    """Return a model with the teacher's first layers and everything around them. Raises
    ExportError.
    """
    if not 1 <= count <= teacher.kv.num_layers:
        raise ExportError(
            f"layers is {count}, the target has {teacher.kv.num_layers}: give 1 to that many"
        )
    values = {**teacher.config.to_dict(), "num_hidden_layers": count}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:count]
    config = type(teacher.config).from_dict(values)
    student = type(teacher.model)(config)
    own = student.state_dict()
    whole = {k: v.clone() for k, v in teacher.model.state_dict().items() if k in own}
    student.load_state_dict(whole, strict=True)
    student.generation_config = teacher.model.generation_config
    return student


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and of the target's answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


def read_texts(path: Path, tokenizer: Any) -> list[Text]:
    """Return `prompt`, rendered by the chat template, and `answer_ids` of every line."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = [{"role": "user", "content": row["prompt"]}]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
        texts.append(Text(ids, row["answer_ids"]))
    return texts


def distill(
    student: Any, teacher: Any, texts: Sequence[Text], minutes: float, max_tokens: int
) -> None:
    """Train with cross-entropy against the teacher's distribution over the answers, one text per
    step.

    Embeddings, norm and head stay unchanged.
    """
    student.train().requires_grad_(False)
    trained = [p.requires_grad_(True) for p in student.base_model.layers.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.0)
    start = time.monotonic()
    for step, text in enumerate(_endless(texts)):
        share = (time.monotonic() - start) / (60 * minutes)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * (1 - share)
        ids = torch.tensor([[*text.prompt_ids, *text.answer_ids][:max_tokens]])
        answered = slice(min(len(text.prompt_ids), max_tokens - 1) - 1, ids.shape[1] - 1)
        with torch.no_grad():
            p = teacher(input_ids=ids, use_cache=False).logits[0, answered].softmax(-1)
        log_q = student(input_ids=ids, use_cache=False).logits[0, answered].log_softmax(-1)
        loss = -(p * log_q).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % _REPORT_EVERY == 0:
            agree = float((p.argmax(-1) == log_q.argmax(-1)).float().mean())
            click.echo(f"step {step}: loss {loss.item():.3f}, agreement {agree:.1%}", err=True)
    student.eval()


def _endless(texts: Sequence[Text]) -> Iterator[Text]:
    """Yield all texts in random order, repeatedly."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for index in torch.randperm(len(texts), generator=generator).tolist():
            yield texts[index]


if __name__ == "__main__":
    main()
