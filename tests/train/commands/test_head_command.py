"""Test that the training commands pass on their options and report a mistake in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from training_data import data_folder

from eagle3.cli import main
from eagle3.train.requests.recipe import Recipe

SMALL = ["--epochs", "1", "--max-steps", "2", "--batch-tokens", "64", "--draft-vocab-size", "40"]


@pytest.fixture()
def data(tmp_path: Path, llama_folder: Path) -> Path:
    data_folder(tmp_path / "data", llama_folder)
    return tmp_path / "data"


def eagle3(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_head_then_eval(data: Path, tmp_path: Path, llama_folder: Path) -> None:
    options = [*SMALL, "--holdout", 0.2]
    trained = eagle3("train", "head", "--data", data, "-o", tmp_path / "head", *options)
    assert trained.exit_code == 0, trained.output
    assert str(tmp_path / "head") in trained.stdout
    prompts = tmp_path / "held.txt"
    prompts.write_text("t3 t4\nt5 t6\n")
    more = tmp_path / "more.txt"
    more.write_text("t7\n")
    options = ["--max-new-tokens", 8, "--max-seq-len", 64, "--json"]
    command = ["train", "eval", "--target", llama_folder, "--draft", tmp_path / "head"]
    result = eagle3(*command, "--prompts", prompts, more, "--data", data, *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(task["task"], task["prompts"]) for task in report["tasks"]] == [
        ("held", 2),
        ("more", 1),
    ]
    assert report["mean_tau"] >= 1
    assert len(report["teacher_forced_agreement"]) == Recipe().ttt_steps


def test_every_option_of_the_recipe_reaches_it(data: Path, tmp_path: Path) -> None:
    options = ["--method", "eagle3", "--no-fusion", "--norm-output", "--ttt-steps", 2]
    options += ["--learning-rate", 0.01, "--seed", 5, "--data-share", 0.5]
    done = eagle3("train", "head", "--data", data, "-o", tmp_path / "head", *SMALL, *options)
    assert done.exit_code == 0, done.output
    recipe = json.loads((tmp_path / "head" / "training.json").read_text())["recipe"]
    wanted = Recipe(
        fusion=False,
        norm_output=True,
        ttt_steps=2,
        learning_rate=0.01,
        seed=5,
        data_share=0.5,
        epochs=1,
        max_steps=2,
        batch_tokens=64,
        draft_vocab_size=40,
    )
    assert recipe == json.loads(json.dumps(wanted.to_json()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nowhere"], "tokens.npy is missing"),
        (["--data", "DATA", "--ttt-steps", "0"], "ttt_steps must be at least 1, got 0"),
        (["--data", "DATA", "--target", "/nowhere/model"], "no such folder"),
        (["--data", "DATA", "--aux-layers", "1,2,99"], "99"),
    ],
)
def test_mistakes_are_one_line(data: Path, tmp_path: Path, words: list[str], message: str) -> None:
    given = [str(data) if word == "DATA" else word for word in words]
    result = eagle3("train", "head", "-o", tmp_path / "head", *SMALL, *given)
    assert result.exit_code == 1
    assert message in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) <= 2
