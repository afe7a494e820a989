"""The whole data stage: stopped and begun again, one process and two, with and without answers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from click.testing import CliRunner, Result

from eagle3.cli import main
from eagle3.export.targets.target import load_target
from eagle3.runtime.errors import DataError
from eagle3.runtime.ort.batch_engine import BatchAnswer, BatchEngine, BatchRequest
from eagle3.runtime.terminal.options import _spread
from eagle3.train.batches.features import LiveFeatures, open_features
from eagle3.train.batches.token_dataset import (
    Conversation,
    TokenDataset,
    open_dataset,
    write_dataset,
)
from eagle3.train.data import answers
from eagle3.train.data import make_data as data_module
from eagle3.train.data.make_data import make_data
from eagle3.train.jobs import journal as journal_module
from eagle3.train.requests.data_request import DataRequest, DataSummary

# Not t10 to t19: the tokenizer finds its end token, t1, in them.
PROMPTS = [f"t{50 + i} t{20 + i % 7}" for i in range(10)]
EOS = 1

Asked = Callable[..., DataRequest]


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", *({"prompt": prompt} for prompt in PROMPTS))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def same(one: TokenDataset, other: TokenDataset) -> None:
    for name in ("offsets", "tokens", "written"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def made(request: DataRequest) -> TokenDataset:
    make_data(request)
    return open_dataset(request.output)


def written_ids(data: TokenDataset) -> list[list[int]]:
    return [
        data.tokens[data.span(i)][data.written[data.span(i)]].tolist() for i in range(len(data))
    ]


class Stopping(BatchEngine):
    """Ctrl-C after four answers."""

    def generate(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        for number, answer in enumerate(super().generate(requests)):
            if number == 4:
                raise KeyboardInterrupt
            yield answer


# The whole way


def test_prompts_become_conversations_in_their_order(asked: Asked) -> None:
    request = asked()
    said: list[str] = []
    summary = make_data(request, said.append)
    data = open_dataset(request.output)
    assert len(data) == len(PROMPTS) and "10 prompts to answer" in said
    rows = answers.finished(request.output)
    by_prompt = {row["prompt"]: row["answer_ids"] for row in rows.values()}
    assert written_ids(data) == [by_prompt[prompt] for prompt in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        first = [3, *(int(word[1:]) for word in prompt.split()), EOS, 4]
        assert data.tokens[data.span(index)][: len(first)].tolist() == first
    kept = json.loads((request.output / "dataset.json").read_text())
    assert kept["schema_version"] == 1 and kept["target"] == request.target
    assert kept["vocab_size"] == 64 and kept["counts"] == summary.counts
    assert kept["counts"]["answered"] == kept["counts"]["read"] == 10
    assert kept["counts"]["tokens"] == len(data.tokens)
    assert kept["counts"]["written_tokens"] == int(data.written.sum())
    assert kept["recipe"]["temperatures"] == [0.0, 0.7, 1.0] and "torch" in kept["versions"]
    assert "10 conversations" in summary.lines()[0]


def test_the_target_is_exported_once(asked: Asked, talker: Path, tmp_path: Path) -> None:
    request = replace(asked(), output=tmp_path / "fresh", limit=2)
    data = made(request)
    before = (request.output / "target" / "manifest.json").stat()
    longer = made(replace(request, limit=None))
    assert (request.output / "target" / "manifest.json").stat() == before
    assert written_ids(longer)[:2] == written_ids(data)
    same(longer, made(asked()))


def test_a_stopped_run_makes_the_same_data(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(asked("whole"))
    request = asked("stopped")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data_module, "BatchEngine", Stopping)
        make_data(request)
    journal = request.output / "conversations.jsonl"
    assert len(answers.finished(request.output)) == 4
    kept = journal.read_bytes()
    journal.write_bytes(kept[:-7])  # as if killed within the last line
    same(made(request), whole)
    assert len(answers.finished(request.output)) == 10
    assert journal.read_bytes().startswith(kept[:-7].rpartition(b"\n")[0])
    size = journal.stat().st_size
    same(made(request), whole)
    assert journal.stat().st_size == size, "a finished run does nothing again"


def test_other_order_and_rows_make_the_same_conversations(asked: Asked, tmp_path: Path) -> None:
    first = made(asked("a"))
    write(tmp_path / "turned.jsonl", *({"prompt": prompt} for prompt in PROMPTS[::-1]))
    second = made(asked("b", prompts=(tmp_path / "turned.jsonl",), rows=7))
    assert written_ids(second) == written_ids(first)[::-1]


def test_a_full_disk_leaves_what_can_be_gone_on_with(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "write_whole", full)
        with pytest.raises(DataError, match=r"conversations\.jsonl cannot be written: No space"):
            make_data(request)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(DataError, match=r"tokens\.npy cannot be written: No space"):
            make_data(request)
    assert len(answers.finished(request.output)) == 10
    assert len(made(request)) == 10


# What is left out


def test_what_cannot_be_used_is_counted(asked: Asked, tmp_path: Path) -> None:
    rows = [{"prompt": " "}, {}, {"prompt": PROMPTS[0] + " "}, {"prompt": "t7 " * 90}]
    path = write(tmp_path / "more.jsonl", {"turns": ["t60 t61"]}, *rows)
    path.write_bytes(path.read_bytes() + b"{\n\xff\n")
    bench = write(tmp_path / "bench.jsonl", {"turns": ["a", PROMPTS[3].upper()]})
    request = asked(prompts=(tmp_path / "prompts.jsonl", path), evaluation=(bench,))
    said: list[str] = []
    counts = make_data(request, said.append).counts
    assert counts["broken"] == {
        "prompt is empty": 1,
        "prompt is missing": 1,
        "not JSON": 1,
        "not UTF-8": 1,
    }
    assert (counts["read"], counts["duplicates"], counts["too_long"]) == (17, 1, 1)
    assert (counts["evaluation"], counts["answered"], counts["conversations"]) == (1, 10, 10)
    prompts = {row["prompt"] for row in answers.finished(request.output).values()}
    assert PROMPTS[3] not in prompts and "t60 t61" in prompts
    assert "1 prompts are too long for --max-len 96" in said
    assert any(f"{path}, line 2: prompt is empty" in line for line in said)


def test_nothing_left_is_an_error(asked: Asked, tmp_path: Path) -> None:
    bench = write(tmp_path / "bench.jsonl", *({"prompt": prompt} for prompt in PROMPTS))
    with pytest.raises(DataError, match="no conversation is left"):
        make_data(asked(evaluation=(bench,)))


def test_a_target_without_template(llama: Any, tmp_path: Path, asked: Asked) -> None:
    tokenizer = tiny.tiny_tokenizer(64, chat_template=None)
    folder = tiny.save_target(tmp_path / "plain", llama, tokenizer)
    with pytest.raises(DataError, match="has no chat template: add --raw"):
        make_data(asked(target=str(folder)))
    data = made(asked("raw", target=str(folder), raw=True, limit=3))
    firsts = [data.tokens[data.span(i)][:2].tolist() for i in range(3)]
    assert firsts == [[int(word[1:]) for word in prompt.split()] for prompt in PROMPTS[:3]]


def test_a_folder_of_another_target(asked: Asked, llama_folder: Path) -> None:
    made(asked(limit=1))
    with pytest.raises(DataError, match="was begun with"):
        make_data(asked(target=str(llama_folder)))
    with pytest.raises(DataError, match="was begun with"):
        make_data(asked(raw=True))


# Answers that are there already


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads the target fails."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(data_module, "load_target", refused)
    monkeypatch.setattr(data_module, "export_target", refused)


def test_given_answers_need_no_weights(unloaded: None, asked: Asked, tmp_path: Path) -> None:
    talk = ["t5", "t40 t41", "t6", "t42"]
    roles = ["user", "assistant"] * 2
    messages = [{"role": r, "content": text} for r, text in zip(roles, talk, strict=True)]
    path = write(
        tmp_path / "given.jsonl",
        {"prompt": "t7", "answer": "t43", "answer_ids": [43], "ended": False},
        {"messages": messages, "license": "MIT"},
        {"prompt": "t8", "answer": "t44", "answer_ids": [45, EOS]},
    )
    request = asked(prompts=(path,))
    for _ in range(2):
        data = made(request)
    assert written_ids(data) == [[43], [40, 41, EOS, 42, EOS]]
    assert data.tokens[data.span(1)].tolist() == [3, 5, 1, 4, 40, 41, 1, 3, 6, 1, 4, 42, 1]
    counts = json.loads((request.output / "dataset.json").read_text())["counts"]
    assert counts["given"] == 2 and counts["answered"] == 0
    assert sum(counts["refused"].values()) == 1
    rows = list(answers.finished(request.output).values())
    assert len(rows) == 2 and rows[1]["license"] == "MIT" and len(rows[1]["before"]) == 2


def test_an_open_conversation_is_answered(asked: Asked, tmp_path: Path) -> None:
    said = [("system", "t9"), ("user", "t5"), ("assistant", "t40"), ("user", "t6")]
    messages = [{"role": role, "content": text} for role, text in said]
    data = made(asked(prompts=(write(tmp_path / "open.jsonl", {"messages": messages}),)))
    start = [2, 9, 1, 3, 5, 1, 4, 40, 1, 3, 6, 1, 4]
    assert data.tokens[: len(start)].tolist() == start and len(data.tokens) > len(start)
    assert data.written[: len(start)].tolist() == [i in (7, 8) for i in range(len(start))]
    assert data.written[len(start) :].all()


def test_long_conversations(asked: Asked) -> None:
    short, long = made(asked("a")), made(asked("b", long_share=1.0, long_tokens=60))
    assert len(long) < len(short) and long.lengths.max() <= 60
    assert sum(written_ids(long), []) == sum(written_ids(short), [])
    same(long, made(asked("b", long_share=1.0, long_tokens=60)))


# Prompts that the target makes up


def test_synthesized_prompts_are_answered_too(asked: Asked, tmp_path: Path) -> None:
    request = asked(synthesize=3, limit=2)
    summary = make_data(request)
    assert summary.counts["synthesized"] == 3 and summary.counts["answered"] == 5
    rows = answers.finished(request.output).values()
    assert sum(row["source"] == "synthesized" for row in rows) == 3
    alone = make_data(asked("alone", prompts=(), synthesize=3))
    assert alone.counts["conversations"] == 3
    same(open_dataset(request.output), made(request))


def test_a_synthesized_evaluation_prompt_is_refused(asked: Asked, tmp_path: Path) -> None:
    request = asked(prompts=(), synthesize=3)
    make_data(request)
    prompts = [row["prompt"] for row in answers.finished(request.output).values()]
    bench = write(tmp_path / "bench.jsonl", {"prompt": prompts[0]})
    counts = make_data(replace(request, evaluation=(bench,))).counts
    assert (counts["synthesized"], counts["evaluation"]) == (2, 1)


# Features, processes


def test_features_are_the_targets(asked: Asked) -> None:
    request = asked(features=True, limit=4)
    data = made(request)
    stored = open_features(request.output, data)
    assert stored is not None and stored.layers == (2, 4, 5, 8)
    live = LiveFeatures(load_target(request.target, "float32").model, stored.layers, False)
    for index in range(len(data)):
        (expected,) = live.rows([data.tokens[data.span(index)]])
        torch_equal(stored.rows(data, index), expected)
    other = made(replace(request, aux_layer_ids=(1, 3, 6)))
    again = open_features(request.output, other)
    assert again is not None and again.layers == (1, 3, 6, 8)


def torch_equal(one: Any, other: Any) -> None:
    import torch

    torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)  # bfloat16, batched otherwise


def test_a_damaged_index_is_made_again(asked: Asked) -> None:
    request = asked(features=True)
    kept = made(request)
    index = request.output / "features" / "index.json"
    index.write_text("{")
    same(made(request), kept)
    assert open_features(request.output, kept) is not None
    shutil.rmtree(index.parent)
    index.parent.write_text("a file where the folder was")
    with pytest.raises(DataError, match="features cannot be created"):
        make_data(request)


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_arrays_that_do_not_belong_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int
) -> None:
    """Killed between them; the other order has as many tokens."""
    first = [Conversation((3, 4, 5), (False, True, True)), Conversation((6, 7), (False, True))]
    write_dataset(tmp_path, first)
    replace_, done = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == finished:
            raise KeyboardInterrupt
        done.append(path)
        return replace_(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write_dataset(tmp_path, first[::-1])
    with pytest.raises(DataError, match="offsets.npy is missing"):
        open_dataset(tmp_path)
    assert write_dataset(tmp_path, first[::-1]).lengths.tolist() == [2, 3]


def test_layers_that_are_not_there(asked: Asked) -> None:
    with pytest.raises(DataError, match="the target has no layer 9: .* from 0 to 8"):
        make_data(asked(features=True, aux_layer_ids=(1, 2, 9)))


@pytest.mark.slow
def test_two_processes_make_the_same_data(asked: Asked, tmp_path: Path) -> None:
    whole = made(asked("one", features=True, synthesize=3))
    torchrun(asked("two", features=True, synthesize=3), "--features", "--synthesize", "3")
    two = open_dataset(tmp_path / "two")
    same(two, whole)
    stored = [open_features(tmp_path / name, whole) for name in ("one", "two")]
    assert stored[0] is not None and stored[1] is not None
    for index in range(len(whole)):
        torch_equal(stored[0].rows(whole, index), stored[1].rows(whole, index))
    names = {path.name for path in (tmp_path / "two").glob("*.jsonl")}
    assert names >= {"conversations.jsonl", "conversations.1.jsonl"}


@pytest.mark.slow
def test_another_number_of_processes_goes_on(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(asked("whole"))
    torchrun(asked("other", limit=7), "--limit", "7")
    lines = {p.name: p.read_bytes().count(b"\n") for p in (tmp_path / "other").glob("conv*")}
    assert lines == {"conversations.jsonl": 4, "conversations.1.jsonl": 3}
    same(made(asked("other")), whole)
    assert (tmp_path / "other" / "conversations.jsonl").read_bytes().count(b"\n") == 7


def torchrun(request: DataRequest, *words: str) -> None:
    """The command in two processes, on this machine's CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]  # else it asks for this machine's name
    command += ["--nproc-per-node", "2", "-m", "eagle3.cli", "train", "data"]
    command += ["--target", request.target, "--prompts", str(request.prompts[0])]
    command += ["-o", str(request.output), "--max-len", str(request.max_len)]
    command += ["--max-new-tokens", str(request.max_new_tokens), "--rows", "3", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    try:
        printed, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # ends its processes too
        raise
    assert process.returncode == 0, printed.decode()


# What is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be .*, got 0"),
        ({"max_len": 16}, "max_len must be .*, got 16"),
        ({"long_share": 1.5}, "long_share must be .*, got 1.5"),
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"temperatures": (float("nan"),)}, "temperatures"),
        ({"synthesize": -1}, "synthesize must be .*, got -1"),
        ({"prompts": ()}, "give --prompts or --synthesize"),
        ({"raw": True, "synthesize": 1}, "--raw disables the chat template"),
        ({"bf16": True}, "add --features"),
        ({"aux_layer_ids": (1, 2, 3)}, "add --features"),
    ],
)
def test_what_is_out_of_range_is_said(options: dict[str, Any], message: str) -> None:
    given = {"target": "t", "prompts": (Path("p"),), "output": Path("o")}
    with pytest.raises(DataError, match=message):
        DataRequest(**{**given, **options})


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["train", "data", *map(str, words)])


def test_the_command_passes_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[DataRequest] = []
    counts = {
        **{name: {} for name in ("broken", "refused")},
        **dict.fromkeys(["conversations", "tokens", "written_tokens", "answered", "given"], 1),
        **dict.fromkeys(["synthesized", "duplicates", "evaluation", "too_long", "over_limit"], 0),
    }

    def fake(request: DataRequest, report: Any) -> DataSummary:
        asked.append(request)
        return DataSummary(request.output, counts)

    monkeypatch.setattr(data_module, "make_data", fake)
    result = call("--prompts", "a", "b", "--target", "t", "-o", "d", "--evaluation", "e", "f")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("d: 1 conversations")
    files = {"prompts": (Path("a"), Path("b")), "evaluation": (Path("e"), Path("f"))}
    assert asked.pop() == DataRequest(target="t", output=Path("d"), **files)
    words = "--rows 2 --max-new-tokens 3 --max-len 40 --temperatures 0.5,1 --seed 4 --synthesize 5"
    words += " --long-share 0.2 --long-tokens 6 --features --aux-layers 1,2,3 --bf16 --threads 7"
    result = call("--target", "t", "-o", "d", "--limit", 8, "--json", *words.split())
    assert json.loads(result.stdout)["counts"] == counts
    assert asked.pop() == DataRequest(
        "t", (), Path("d"), (), 2, 3, 40, (0.5, 1.0), 4, 5, 0.2, 6, True, (1, 2, 3), True, 7, 8
    )


def test_wrong_use_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("--target", "t").exit_code == 2
    assert call("--target", "t", "-o", "d", "extra").exit_code == 2
    assert call("--target", "t", "-o", "d", "--temperatures", "hot").exit_code == 2
    result = call("--target", "t", "-o", tmp_path / "d", "--prompts", tmp_path / "none.jsonl")
    assert result.exit_code == 1 and "none.jsonl cannot be read" in result.stderr
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    result = call("--target", "t", "-o", tmp_path / "d", "--synthesize", 1)
    assert result.exit_code == 1
    assert "train needs torch and transformers: pip install 'eagle3[train]'" in result.stderr


def test_repeatable_options_take_several_values() -> None:
    words = ["--x", "a", "b", "-o", "c", "d", "--x=e", "f", "--x"]
    spread = ["--x", "a", "--x", "b", "-o", "c", "d", "--x=e", "f", "--x"]
    assert _spread(words, {"--x"}) == spread
