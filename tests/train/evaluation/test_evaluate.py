"""`train eval`: numbers come from decoding, and add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from training_data import data_folder

import eagle3
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import DataError
from eagle3.runtime.stats import Stats
from eagle3.train.evaluation.evaluate import evaluate, held_out_agreement
from eagle3.train.evaluation.measure import Evaluation, TaskResult
from eagle3.train.loop.train_head import train_head
from eagle3.train.requests.eval_request import EvalRequest
from eagle3.train.requests.recipe import Recipe, TrainRequest

TREE = TreePlan(2, 3, 5)
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def request_(
    shallow: Any, shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> EvalRequest:
    """A random head's, on two tasks; its bundle is made once."""
    folder = tmp_path_factory.mktemp("eval")
    for name, words in (("one", ["t3 t4", "t5"]), ("two", ["t6 t7 t8"])):
        lines = [json.dumps({"turns": [text, "t9"]}) for text in words]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return EvalRequest(
        str(shallow_folder),
        tiny.save_head(folder / "head", shallow, draft_vocab_size=40, aux_layer_ids=LAYERS),
        (folder / "one.jsonl", folder / "two.jsonl"),
        tree=TREE,
        max_new_tokens=24,
        max_seq_len=128,
        bundle=folder / "bundle",
        threads=1,
    )


def test_tau_is_what_decoding_gives(request_: EvalRequest) -> None:
    result = evaluate(replace(request_, compare=True))
    engine = eagle3.load(request_.bundle, threads=1)
    options = {"draft_top_k": 2, "draft_depth": 3, "num_draft_tokens": 5}
    alone = engine.generate("t6 t7 t8", max_new_tokens=24, **options)
    two = result.tasks[1]
    assert [task.name for task in result.tasks] == ["one", "two"]
    assert [task.prompts for task in result.tasks] == [2, 1]
    assert two.tau == pytest.approx(alone.stats.acceptance_length)
    assert two.rounds == alone.stats.rounds
    assert all(task.differing == 0 for task in result.tasks)
    assert result.mean_tau == pytest.approx(sum(t.tau for t in result.tasks) / 2)
    text = "\n".join(result.lines())
    assert "one" in text and f"{two.tau:.3f}" in text and "token-equal" in text
    assert json.loads(json.dumps(result.to_json()))["tasks"][1]["task"] == "two"


def test_requests_add_up() -> None:
    task = TaskResult("all")
    task.add(
        Stats(
            rounds=4,
            acceptance_length=3.0,
            accepted_by_position=(1.0, 0.5),
            proposed_by_position=(4, 4),
            decode_ms=1.0,
        )
    )
    task.add(
        Stats(
            rounds=1,
            acceptance_length=1.0,
            accepted_by_position=(0.0,),
            proposed_by_position=(1,),
            decode_ms=1.0,
        )
    )
    assert task.tau == pytest.approx(13 / 5)
    assert task.acceptance == pytest.approx((4 / 5, 2 / 4))
    assert Evaluation((task,)).to_json()["mean_tau"] == pytest.approx(2.6)


def test_a_kept_bundle_is_of_this_head(request_: EvalRequest, shallow: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"draft_vocab_size": 40, "aux_layer_ids": LAYERS}
    head = tiny.save_head(tmp_path / "head", shallow, seed=8, **options)
    few = replace(request_, draft=head, bundle=tmp_path / "kept", prompts=request_.prompts[1:])
    evaluate(few)
    before = (tmp_path / "kept" / "manifest.json").stat().st_mtime_ns
    evaluate(few)
    assert (tmp_path / "kept" / "manifest.json").stat().st_mtime_ns == before
    tiny.save_head(head, shallow, seed=9, **options)
    evaluate(few)
    assert (tmp_path / "kept" / "manifest.json").stat().st_mtime_ns != before
    (tmp_path / "foreign").mkdir()
    with pytest.raises(DataError, match="was not created by this command"):
        evaluate(replace(few, bundle=tmp_path / "foreign"))


def test_what_does_not_fit_is_counted(request_: EvalRequest, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("t3 " * 200 + "\nt4\n")
    result = evaluate(replace(request_, prompts=(path,), max_new_tokens=1, compare=True))
    (task,) = result.tasks
    assert (task.prompts, task.too_long, task.speedup) == (1, 1, None)
    assert "1 too long" in "\n".join(result.lines())


def test_no_prompts_are_an_error(request_: EvalRequest) -> None:
    with pytest.raises(DataError, match="--prompts"):
        evaluate(replace(request_, prompts=()))


def test_teacher_forced_agreement_is_of_the_held_out_part(
    request_: EvalRequest, shallow_folder: Path, tmp_path: Path
) -> None:
    data_folder(tmp_path / "data", shallow_folder, count=60)
    recipe = Recipe(
        epochs=6,
        batch_tokens=128,
        ttt_steps=2,
        draft_vocab_size=40,
        holdout=0.2,
        learning_rate=3e-3,
        aux_layer_ids=LAYERS,
    )
    head = train_head(TrainRequest(tmp_path / "data", tmp_path / "head", recipe))
    curves = (head / "curves.csv").read_text().splitlines()
    columns, last = curves[0].split(","), curves[-1].split(",")
    logged = [float(last[columns.index(f"held_agree_{i}")]) for i in range(2)]
    changed: dict[str, Any] = {"draft": head, "data": tmp_path / "data", "bundle": None}
    result = evaluate(replace(request_, **changed, prompts=request_.prompts[1:]))
    assert result.agreement == pytest.approx(logged, abs=0.02)  # the saved head is float16
    assert result.to_json()["teacher_forced_agreement"]


def test_a_head_of_other_data_says_so(
    request_: EvalRequest, shallow_folder: Path, tmp_path: Path
) -> None:
    """What it has seen of them is not known: they are not held out."""
    data, said = tmp_path / "data", list[str]()
    data_folder(data, shallow_folder)
    recipe = Recipe(max_steps=1, batch_tokens=64, draft_vocab_size=40, holdout=0.2)
    fused = replace(recipe, aux_layer_ids=LAYERS)
    head = train_head(TrainRequest(data, tmp_path / "head", fused))
    request = replace(request_, data=data, draft=head)
    assert len(held_out_agreement(request, said.append)) == recipe.ttt_steps and not said
    data_folder(data, shallow_folder, count=30)
    for draft in (head, request_.draft):
        assert held_out_agreement(replace(request, draft=draft), said.append)
        assert "may have seen" in said.pop() and not said
    eagle1 = train_head(TrainRequest(data, tmp_path / "eagle1", replace(recipe, method="eagle1")))
    assert held_out_agreement(replace(request, draft=eagle1), said.append) == ()
    assert "--data is ignored" in said.pop()


def test_no_prompt_of_a_file_is_an_error(request_: EvalRequest) -> None:
    for count in (0, -1):
        with pytest.raises(DataError, match=f"num_prompts must be at least 1, got {count}"):
            replace(request_, num_prompts=count)


def test_the_tree_reaches_the_engine(request_: EvalRequest) -> None:
    chain = evaluate(replace(request_, tree=TreePlan(1, 2, 2), prompts=request_.prompts[:1]))
    assert len(chain.tasks[0].acceptance) == 2
