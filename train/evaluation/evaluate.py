"""`eagle3 train eval`: measure the acceptance length of a head by decoding with it.

The teacher-forced agreement is reported in addition, never instead: it cannot detect a head that is
wired differently at inference than in training.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from eagle3.export.draft_graphs.head_modules import build_head, embedding_table
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.export.heads.checkpoint_files import head_folder
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.targets.target import load_target
from eagle3.runtime.engine import Engine, load
from eagle3.runtime.errors import DataError, PromptTooLong
from eagle3.runtime.text.prompt_files import load_prompts
from eagle3.train.batches.batch_order import split
from eagle3.train.batches.batch_source import BatchSource
from eagle3.train.batches.features import LiveFeatures, fingerprint, open_features
from eagle3.train.batches.token_dataset import open_dataset
from eagle3.train.data.target_files import plan_for
from eagle3.train.evaluation.measure import Evaluation, TaskResult
from eagle3.train.loop.window import Window
from eagle3.train.losses.objective import Eagle3Objective
from eagle3.train.requests.eval_request import EvalRequest
from eagle3.train.requests.recipe import Recipe

Report = Callable[[str], None]


def evaluate(request: EvalRequest, report: Report = lambda _: None) -> Evaluation:
    """Export the head, decode every prompt with it, and return the sums for each prompt file.

    report: receives progress lines. Raises DataError if there is no prompt file, and passes on the
    errors of the export, the engine and the prompt files.
    """
    if not request.prompts:
        raise DataError("there is no prompt file to decode: give --prompts")
    files = {path: load_prompts(path)[: request.num_prompts] for path in request.prompts}
    agreement = held_out_agreement(request, report) if request.data is not None else ()
    with _bundle(request, report) as folder:
        engine = load(folder, threads=request.threads)
        tasks = []
        for path, prompts in files.items():
            tasks.append(_task(engine, path.stem, prompts, request))
            report(f"{path.stem}: tau {tasks[-1].tau:.3f}")
    return Evaluation(tuple(tasks), agreement)


def _task(engine: Engine, name: str, prompts: Sequence[str], request: EvalRequest) -> TaskResult:
    task, limit, tree = TaskResult(name), request.max_new_tokens, request.tree
    for prompt in prompts:
        try:
            drafted = engine.generate(
                prompt,
                max_new_tokens=limit,
                draft_top_k=tree.draft_top_k,
                draft_depth=tree.draft_depth,
                num_draft_tokens=tree.num_draft_tokens,
            )
        except PromptTooLong:
            task.too_long += 1
            continue
        task.add(drafted.stats)
        if request.compare:
            plain = engine.generate(prompt, max_new_tokens=limit, drafter="none")
            task.plain_ms = (task.plain_ms or 0.0) + plain.stats.decode_ms
            task.differing += plain.token_ids != drafted.token_ids
    return task


@contextmanager
def _bundle(request: EvalRequest, report: Report) -> Iterator[Path]:
    """Yield the folder of the head's bundle.

    Without `request.bundle`, the bundle is exported to a temporary folder. Otherwise the bundle in
    that folder is reused if it was exported from the same head, target and plan, and exported again
    if not. Raises DataError if the folder was not created by this command.
    """
    plan = plan_for(request.max_seq_len, draft_weights=request.draft_weights)
    draft = (DraftSource(str(request.draft)),)
    if request.bundle is None:
        with tempfile.TemporaryDirectory(prefix="eagle3-eval-") as scratch:
            output = Path(scratch) / "bundle"
            export_bundle(ExportRequest(request.target, draft, output, plan), report)
            yield output
        return
    output, identity = request.bundle, _identity(request)
    # Next to the bundle, not in it: a manifest lists all files of its bundle.
    note = output.with_name(output.name + ".eval")
    ours = note.is_file()
    if not ours and output.exists():
        raise DataError(
            f"{output} was not created by this command: use another folder, or remove --bundle"
        )
    if not ours or note.read_text(encoding="utf-8") != identity or not output.is_dir():
        note.unlink(missing_ok=True)
        order = ExportRequest(request.target, draft, output, plan, force=ours)
        export_bundle(order, report)
        note.write_text(identity, encoding="utf-8")
    yield output


def _identity(request: EvalRequest) -> str:
    """Return a text that identifies a bundle of `train eval`.

    It consists of a hash of the head's files, and the target, the draft's weights, the context
    length and the version of eagle3.
    """
    digest = hashlib.sha256()
    for path in sorted(head_folder(request.draft).iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin"):
            digest.update(path.name.encode() + path.read_bytes())
    built = (request.target, request.draft_weights, request.max_seq_len, version("eagle3"))
    return f"{digest.hexdigest()} {built}\n"


def held_out_agreement(request: EvalRequest, report: Report = lambda _: None) -> tuple[float, ...]:
    """Return the teacher-forced agreement of each draft step on held-out conversations.

    The head's training.json determines which conversations of the data folder were held out. For a
    head that was trained on other data, all conversations are used, and this is reported. For an
    EAGLE-1 head the result is empty, and this is reported. Raises DataError if the data does not
    fit the target.
    """
    assert request.data is not None
    data = open_dataset(request.data)
    recipe, indices = _held_out(request.draft, len(data), fingerprint(data), report)
    target = load_target(request.target, "float32")
    last = int(target.config.num_hidden_layers)
    facts = TargetSizes(int(target.config.hidden_size), target.vocab_size, last)
    head = read_head(request.draft, facts)
    if head.config.method != "eagle3":
        report("--data is ignored: the teacher-forced agreement is measured for EAGLE-3 heads only")
        return ()
    data.check_vocabulary(target.vocab_size)
    features = open_features(request.data, data) or LiveFeatures(
        target.model, sorted({*head.config.aux_layer_ids, last}), False
    )
    source = BatchSource(
        data,
        features,
        head.config.aux_layer_ids,
        last,
        head.config.target_width,
        recipe.max_len,
        torch.device("cpu"),
    )
    rows = target.model.get_output_embeddings().weight[torch.from_numpy(head.target_ids)]
    embedding = embedding_table(head, target.model.get_input_embeddings().weight)
    module = build_head(head, torch.float32)
    objective = Eagle3Objective(module, embedding, rows, torch.float32)
    window = Window(recipe.num_steps)
    with torch.no_grad():
        for batch in source.batches(indices, recipe.batch_tokens):
            window.add(objective(source.batch(batch), recipe.num_steps))
    return window.agreement


def _held_out(draft: Path, count: int, data: str, report: Report) -> tuple[Recipe, list[int]]:
    """Return the recipe that a head was trained with, and the conversations held out from it.

    Without a training.json, returns a recipe of five steps and all conversations; for a head of
    other data, its recipe and all conversations.
    """
    path = draft / "training.json"
    unknown = (
        f"{draft} was not trained on this version of the data: the teacher-forced agreement covers "
        "all conversations, including those that the head may have seen"
    )
    if not path.is_file():
        report(unknown)
        return Recipe(ttt_steps=5), list(range(count))
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        fields = {**run["recipe"]}
        if fields["aux_layer_ids"] is not None:
            fields["aux_layer_ids"] = tuple(fields["aux_layer_ids"])
        recipe = Recipe(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if run.get("data") != data:
        report(unknown)
        return recipe, list(range(count))
    return recipe, split(count, recipe.holdout, recipe.data_share, recipe.seed).held_out.tolist()
