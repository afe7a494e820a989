"""`eagle3 train data`: turn prompts into a folder of conversations that the target wrote.

    read prompts          prompt_selection.py
    synthesize prompts    synthesize.py
    render                tasks.py, render.py
    answer                answers.py
    join and pack         join.py, token_dataset.py
    compute features      features.py

Every stage continues where an earlier run stopped. The folder contains:

    begun.json              the target and the option --raw, which must not change
    conversations.jsonl     the journal of answers (`answers.py`)
    synthesized.jsonl       the journal of synthesized prompts (`synthesize.py`)
    target/                 the bundle of the target, if something had to be sampled
    tokens.npy, ...         the packed data (`token_dataset.py`)
    dataset.json            counts, recipe and versions (`data_summary.py`)
    features/               the target's hidden states, with --features (`features.py`)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property

from eagle3.export.targets.target import load_target
from eagle3.runtime.errors import DataError
from eagle3.runtime.ort.batch_engine import BatchEngine
from eagle3.train.batches.features import LiveFeatures, write_features
from eagle3.train.batches.token_dataset import TokenDataset, open_dataset, write_dataset
from eagle3.train.data import answers
from eagle3.train.data.data_summary import counts_of, read_counts, write_summary
from eagle3.train.data.entries import Entry
from eagle3.train.data.join import joined
from eagle3.train.data.prompt_selection import Selection, read_evaluation
from eagle3.train.data.synthesize import synthesize, user_turn
from eagle3.train.data.target_files import TargetTexts, export_target, read_target_texts
from eagle3.train.data.tasks import Tasks, tasks_of, turns_of
from eagle3.train.jobs.journal import write_json
from eagle3.train.jobs.lock import locked, make_folder
from eagle3.train.jobs.processes import Processes, joined_processes
from eagle3.train.requests.data_request import DataRequest, DataSummary
from eagle3.train.requests.recipe import Recipe

Report = Callable[[str], None]


def make_data(request: DataRequest, report: Report = lambda _: None) -> DataSummary:
    """Create the data folder, or continue an interrupted run, and return its summary.

    report: receives progress lines. Raises DataError if prompts cannot be read, if the folder
    belongs to another target, or if the disk is full; ExportError if the target cannot be loaded;
    EngineError if it fails while answering. The finished answers stay in the journal then, and also
    after Ctrl-C.
    """
    with joined_processes() as processes, ExitStack() as held:
        if processes.is_first:
            make_folder(request.output)
            held.enter_context(locked(request.output))
        say = report if processes.is_first else _silent
        return _Run(request, processes, say).make()


def _silent(_: str) -> None:
    """Discard a progress line: only the first process reports."""


class _Run:
    """One process of a run.

    All processes take the same decisions, because all of them read the same files, and none writes
    before `processes.wait()` has returned, that is, before all of them have read.
    """

    def __init__(self, request: DataRequest, processes: Processes, report: Report) -> None:
        self._request, self._processes, self._report = request, processes, report
        self._folder = request.output

    def make(self) -> DataSummary:
        request, processes = self._request, self._processes
        if processes.is_first:
            _begin(request)
        processes.wait()
        selection = self._selection()
        layers = self._layers() if request.features else ()
        entries = selection.entries
        selection.cut(request.limit)
        num_read = len(entries)
        self._make_up(selection)
        tasks = tasks_of(entries, self._texts.renderer, request)
        self._say_refused(tasks)
        self._answer(tasks)
        if processes.is_first:
            counts = {
                **counts_of(selection, tasks),
                "synthesized": len(entries) - num_read,
                **self._pack(tasks),
            }
            write_summary(request, self._texts.vocab_size, counts)
        processes.wait()
        if layers:
            self._write_features(open_dataset(self._folder), layers)
            processes.wait()
        return DataSummary(self._folder, read_counts(self._folder))

    @cached_property
    def _texts(self) -> TargetTexts:
        return read_target_texts(self._request.target, self._request.raw)

    @cached_property
    def _engine(self) -> BatchEngine:
        """The engine of the target, created by all processes at the same point when needed."""
        request, bundle = self._request, self._folder / "target"
        if self._processes.is_first:
            export_target(request.target, bundle, request.max_len, self._report)
        self._processes.wait()
        return BatchEngine(bundle, rows=request.rows, threads=request.threads)

    def _selection(self) -> Selection:
        evaluation = read_evaluation(self._request.evaluation)
        selection = Selection(evaluation)
        selection.add_files(self._request.prompts)
        for line in selection.counts.lines() if self._request.prompts else ():
            self._report(line)
        return selection

    def _layers(self) -> tuple[int, ...]:
        """Return the layers whose features are stored, ascending.

        Raises DataError if the target does not have one of the requested layers, and TrainingError
        if they are not distinct and ascending.
        """
        num_layers, asked = self._texts.num_layers, self._request.aux_layer_ids
        wrong = [i for i in asked or () if not 0 <= i <= num_layers]
        if wrong:
            raise DataError(
                f"the target has no layer {wrong[0]}: use --aux-layers with numbers from 0 to "
                f"{num_layers}"
            )
        fused = Recipe(aux_layer_ids=asked).layers(num_layers)
        return tuple(sorted({*fused, num_layers}))

    def _make_up(self, selection: Selection) -> None:
        request, texts = self._request, self._texts
        if not request.synthesize or texts.template is None:
            return
        turn = user_turn(texts.tokenizer, texts.template, texts.eos_token_ids)
        prompts = synthesize(
            self._folder,
            request.synthesize,
            request.seed,
            turn,
            texts.tokenizer,
            lambda: self._engine,
            self._processes,
            self._report,
        )
        for prompt in prompts:
            selection.add(Entry(prompt, source="synthesized"))

    def _say_refused(self, tasks: Tasks) -> None:
        if tasks.too_long:
            self._report(
                f"{tasks.too_long:,} prompts are too long for --max-len {self._request.max_len}"
            )
        for reason, count in tasks.refused.most_common(5):
            self._report(f"{count:,} conversations left out: {reason}")

    def _answer(self, tasks: Tasks) -> None:
        """Answer what has no answer yet; afterwards every task has a line in a journal."""
        known = answers.finished(self._folder, tasks.tasks)
        self._processes.wait()
        if self._processes.is_first:
            answers.write_given(self._folder, tasks.tasks, known)
        missing = [
            task
            for task in tasks.tasks
            if task.entry.answer is None and not task.is_done(known.get(task.entry.id))
        ]
        if missing:
            self._report(f"{len(missing):,} prompts to answer")
            rank, world = self._processes.rank, self._processes.world
            answers.write_answers(
                self._folder,
                missing[rank::world],
                self._engine,
                self._texts.renderer,
                rank,
                self._report,
            )
        self._processes.wait()

    def _pack(self, tasks: Tasks) -> dict[str, int]:
        """Write the arrays of the data set; return the counts of what they contain."""
        request, renderer = self._request, self._texts.renderer
        known = answers.finished(self._folder, tasks.tasks)
        talks = [
            turns_of(task.entry, answers.answer_of(task, known), renderer) for task in tasks.tasks
        ]
        data = write_dataset(
            self._folder,
            joined(talks, renderer, request.long_share, request.long_tokens, request.seed),
        )
        return {
            "conversations": len(data),
            "tokens": len(data.tokens),
            "written_tokens": int(data.written.sum()),
        }

    def _write_features(self, data: TokenDataset, layers: Sequence[int]) -> None:
        target = load_target(self._request.target, "float32")
        live = LiveFeatures(target.model.to(self._processes.device), layers, self._request.bf16)
        write_features(
            self._folder,
            data,
            live,
            int(target.config.hidden_size),
            rank=self._processes.rank,
            world=self._processes.world,
            report=self._report,
        )


def _begin(request: DataRequest) -> None:
    """Create the folder, or raise DataError unless it was begun with the same target and --raw."""
    path = request.output / "begun.json"
    begun = {"target": request.target, "raw": request.raw}
    try:
        request.output.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else begun
    except (OSError, ValueError) as error:
        raise DataError(f"{request.output} cannot be used: {error}") from error
    if before != begun:
        raise DataError(
            f"{request.output} was begun with {before}, but now the options are {begun}: use "
            "another folder, or the same options"
        )
    write_json(path, begun)
