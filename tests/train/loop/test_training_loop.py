"""Training runs: resumed and distributed ones end with the weights of a plain one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from training_data import conversations, data_folder

from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.targets.target import load_target
from eagle3.runtime.errors import DataError, TrainingError
from eagle3.train.batches.features import LiveFeatures, open_features, write_features
from eagle3.train.batches.token_dataset import Conversation, open_dataset, write_dataset
from eagle3.train.jobs.lock import locked
from eagle3.train.loop import training_loop as loop_module
from eagle3.train.loop.curves import read_curves
from eagle3.train.loop.train_head import train_head
from eagle3.train.requests.recipe import Recipe, TrainRequest

RECIPE = {"epochs": 2, "batch_tokens": 64, "ttt_steps": 3, "draft_vocab_size": 40, "holdout": 0.1}
FACTS = TargetSizes(hidden_size=32, vocab_size=64, num_layers=8)


def store_features(data: Path, target: Path) -> None:
    """Those of layers 2, 4, 5 and the last, 8."""
    live = LiveFeatures(load_target(str(target), "float32").model, (2, 4, 5, 8), False)
    write_features(data, open_dataset(data), live, 32)


class Killed(Exception):
    """Stands for SIGKILL: nothing of ours catches it."""


@pytest.fixture()
def data(tmp_path: Path, llama_folder: Path) -> Path:
    data_folder(tmp_path / "data", llama_folder)
    return tmp_path / "data"


def train(data: Path, output: Path, every: int = 3, **recipe: Any) -> dict[str, torch.Tensor]:
    """Trains and returns the head's weights."""
    request = TrainRequest(data, output, Recipe(**{**RECIPE, **recipe}), checkpoint_every=every)
    return load_file(train_head(request) / "model.safetensors")


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next run dies when it has made `step` steps."""
    whole = loop_module.Loop._step

    def dying(self: Any, batch: Any) -> Any:
        if self.step == step:
            raise Killed
        return whole(self, batch)

    monkeypatch.setattr(loop_module.Loop, "_step", dying)


@pytest.mark.parametrize("method", ["eagle3", "eagle1"])
@pytest.mark.parametrize("step", [0, 2, 3, 7])
def test_a_killed_run_ends_with_the_same_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, method: str
) -> None:
    plain = train(data, tmp_path / "plain", method=method)
    with monkeypatch.context() as patch:
        killed_at(patch, step)
        with pytest.raises(Killed):
            train(data, tmp_path / "killed", method=method)
    resumed = train(data, tmp_path / "killed", method=method)
    assert plain.keys() == resumed.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, resumed[name]), name
    curves = [read_curves(tmp_path / x / "curves.csv") for x in ("plain", "killed")]
    shown = [[(r["step"], r["loss"], r["tokens"], r["held_loss"]) for r in rows] for rows in curves]
    assert shown[0] == shown[1]


def test_training_lowers_the_loss_and_changes_every_weight(data: Path, tmp_path: Path) -> None:
    one = train(data, tmp_path / "one", max_steps=1, learning_rate=1e-12)
    many = train(data, tmp_path / "many", epochs=12, learning_rate=3e-3)
    for name, weight in many.items():
        if name not in ("d2t", "t2d"):
            assert not torch.equal(weight, one[name]), name
    losses = [
        float(r["held_loss"]) for r in read_curves(tmp_path / "many/curves.csv") if r["held_loss"]
    ]
    assert losses[-1] < losses[0]


def test_the_curves_are_drawn(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "head", max_steps=3)
    assert (tmp_path / "head" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_stored_features_are_the_live_ones(data: Path, llama_folder: Path) -> None:
    """The target runs in batches of other shapes, so a value may round to its bfloat16 neighbor."""
    store_features(data, llama_folder)
    dataset = open_dataset(data)
    stored = open_features(data, dataset)
    assert stored is not None
    live = LiveFeatures(load_target(str(llama_folder), "float32").model, stored.layers, False)
    for index in range(len(dataset.lengths)):
        (expected,) = live.rows([dataset.tokens[dataset.span(index)]])
        found = stored.rows(dataset, index)
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=1e-4)


def test_stored_features_train_as_live_ones_do(
    data: Path, tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same numbers, so that no rounding of the target's calls comes into it.

    Adam makes a whole step of a gradient's sign: one that is nearly zero turns with the last bit of
    a feature, and then weights of two right runs differ by the learning rate.
    """
    store_features(data, llama_folder)
    dataset = open_dataset(data)
    stored = open_features(data, dataset)
    assert stored is not None
    by_tokens = {
        dataset.tokens[dataset.span(index)].tobytes(): stored.rows(dataset, index)
        for index in range(len(dataset.lengths))
    }

    def rows(live: LiveFeatures, ids: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        starts = [stored.layers.index(layer) * stored.hidden_size for layer in live.layers]
        columns = np.concatenate([np.arange(s, s + stored.hidden_size) for s in starts])
        return [by_tokens[each.tobytes()][:, columns] for each in ids]

    from_store = train(data, tmp_path / "stored", max_steps=4)
    shutil.move(data / "features", tmp_path / "features")
    monkeypatch.setattr(LiveFeatures, "rows", rows)
    live = train(data, tmp_path / "live", max_steps=4)
    assert from_store.keys() == live.keys()
    for name, weight in from_store.items():
        assert torch.equal(weight, live[name]), name

    by_tokens = {ids: each.flip(0) for ids, each in by_tokens.items()}  # rows of other tokens
    wrong = train(data, tmp_path / "wrong", max_steps=4)
    assert not all(torch.equal(weight, wrong[name]) for name, weight in live.items())


def test_features_of_other_tokens_are_refused(
    data: Path, tmp_path: Path, llama_folder: Path
) -> None:
    store_features(data, llama_folder)
    data_folder(data, llama_folder, seed=1)
    with pytest.raises(DataError, match="other tokens"):
        train(data, tmp_path / "head")


def test_a_layer_that_was_not_kept_is_named(data: Path, tmp_path: Path, llama_folder: Path) -> None:
    store_features(data, llama_folder)
    with pytest.raises(DataError, match=r"\[3\]"):
        train(data, tmp_path / "head", aux_layer_ids=(2, 3, 5))


@pytest.mark.parametrize(
    "recipe", [{}, {"fusion": False}, {"norm_output": True}, {"method": "eagle1"}]
)
def test_the_head_is_read_by_export(data: Path, tmp_path: Path, recipe: dict[str, Any]) -> None:
    train(data, tmp_path / "head", max_steps=1, **recipe)
    head = read_head(tmp_path / "head", FACTS)
    assert head.config.method == recipe.get("method", "eagle3")
    assert head.config.norm_output == recipe.get("norm_output", False)
    wanted = (2, 4, 5) if recipe.get("fusion", True) and "method" not in recipe else (8,)
    assert head.config.aux_layer_ids == wanted


def test_another_recipe_in_the_same_folder_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, 4)
        with pytest.raises(Killed):
            train(data, tmp_path / "head")
    with pytest.raises(TrainingError, match=r"recipe \{'learning_rate': 0.001\}, not"):
        train(data, tmp_path / "head", learning_rate=0.1)


def test_another_loss_mask_does_not_go_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, 4)
        with pytest.raises(Killed):
            train(data, tmp_path / "head")
    mask = np.load(data / "written.npy")
    np.save(data / "written.npy", ~mask)
    with pytest.raises(TrainingError, match="run with written"):
        train(data, tmp_path / "head")


def test_two_runs_in_one_folder_are_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    with locked(tmp_path / "head"), pytest.raises(DataError, match="another run is using"):
        train(data, tmp_path / "head")
    train(data, tmp_path / "head", max_steps=1)


def test_a_finished_head_is_not_trained_over(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "head", max_steps=1)
    with pytest.raises(TrainingError, match="--force"):
        train(data, tmp_path / "head", max_steps=1)


def test_a_full_disk_keeps_the_earlier_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(data, tmp_path / "plain")
    save = loop_module.save_checkpoint

    def full(folder: Path, step: int, *rest: Any) -> None:
        if step < 6:
            return save(folder, step, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", _no_space)
            return save(folder, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "save_checkpoint", full)
        with pytest.raises(TrainingError, match="No space left"):
            train(data, tmp_path / "head")
    resumed = train(data, tmp_path / "head")
    assert all(torch.equal(plain[name], resumed[name]) for name in plain)


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_forced_run_that_is_killed_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(data, tmp_path / "head")
    request = TrainRequest(
        data, tmp_path / "head", Recipe(**RECIPE), force=True, checkpoint_every=3
    )
    with monkeypatch.context() as patch:
        killed_at(patch, 4)
        with pytest.raises(Killed):
            train_head(request)
    resumed = train(data, tmp_path / "head")
    assert all(torch.equal(plain[name], resumed[name]) for name in plain)


def test_another_model_is_not_written_over(data: Path, llama: Any, tmp_path: Path) -> None:
    target = tiny.save_target(tmp_path / "target", llama)
    before = (target / "config.json").read_bytes()
    with pytest.raises(TrainingError, match="did not make"):
        train(data, target)
    assert (target / "config.json").read_bytes() == before


def test_another_target_does_not_go_on(
    data: Path, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny.save_target(tmp_path / "other", tiny.tiny_model("llama", seed=9))
    same = tiny.save_target(tmp_path / "same", llama)
    with monkeypatch.context() as patch:
        killed_at(patch, 4)
        with pytest.raises(Killed):
            train(data, tmp_path / "head")
    request = TrainRequest(data, tmp_path / "head", Recipe(**RECIPE), target=str(other))
    with pytest.raises(TrainingError, match="run with target"):
        train_head(request)
    train_head(replace(request, target=str(same)))  # elsewhere, with the same weights


def test_a_target_of_other_sizes_is_refused(data: Path, llama_folder: Path, tmp_path: Path) -> None:
    small = tiny.save_target(tmp_path / "small", tiny.tiny_model("llama", vocab_size=40))
    request = TrainRequest(data, tmp_path / "head", Recipe(**RECIPE), target=str(small))
    with pytest.raises(DataError, match="the target has 40 tokens"):
        train_head(request)
    store_features(data, llama_folder)
    wide = tiny.save_target(tmp_path / "wide", tiny.tiny_model("llama", hidden_size=64))
    with pytest.raises(DataError, match="width 32, but the target has hidden size 64"):
        train_head(replace(request, target=str(wide)))


def test_nothing_to_learn_is_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="none of 22 conversations"):
        train(data, tmp_path / "head", max_len=3)
    short = Conversation((3, 4), (False, True))
    write_dataset(data, [short, *conversations(3)])
    said: list[str] = []
    request = TrainRequest(data, tmp_path / "one", Recipe(**{**RECIPE, "holdout": 0.0}))
    train_head(request, report=said.append)
    assert "1 conversations have no token to learn" in said


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", None])
def test_a_damaged_shard_is_named(
    data: Path, tmp_path: Path, llama_folder: Path, damage: bytes | None
) -> None:
    store_features(data, llama_folder)
    shard = data / "features" / "00000.npy"
    shard.write_bytes(shard.read_bytes()[:-64] if damage is None else damage)
    with pytest.raises(DataError, match=r"00000\.npy cannot be read"):
        train(data, tmp_path / "head")


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ({"ttt_steps": 0}, "ttt_steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"fusion": False, "aux_layer_ids": (1, 2)}, "--no-fusion"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"data_share": 0.0}, "data_share"),
        ({"method": "eagle1", "norm_output": True}, "EAGLE-1"),
        ({"method": "eagle2"}, "eagle3, eagle1"),
    ],
)
def test_a_recipe_is_checked(fault: dict[str, Any], match: str) -> None:
    with pytest.raises(TrainingError, match=match):
        Recipe(**fault)


def test_a_damaged_checkpoint_is_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, 4)
        with pytest.raises(Killed):
            train(data, tmp_path / "head")
    (shard,) = (tmp_path / "head" / "checkpoints" / "step-00000003").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(
        TrainingError, match=r"step-00000003 does not fit this run: .*; delete"
    ) as e:
        train(data, tmp_path / "head")
    assert "Traceback" not in str(e.value) and "\n" not in str(e.value)


def test_curves_that_cannot_be_read_or_drawn(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    out.mkdir()
    (out / "curves.csv").write_text("garbage\n1,2\n")
    (out / "curves.png").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"curves.png cannot be written: No space left"):
        train(data, out, max_steps=1)
    assert [row["step"] for row in read_curves(out / "curves.csv")] == ["1", "1"]


def test_how_often_is_at_least_once() -> None:
    for name in ("checkpoint_every", "log_every"):
        with pytest.raises(TrainingError, match=f"{name} must be at least 1, got 0"):
            TrainRequest(Path("data"), Path("head"), Recipe(), **{name: 0})


def test_steps_grow_over_the_ramp() -> None:
    recipe = Recipe(ttt_steps=4, ttt_ramp=0.8)
    assert [recipe.steps_at(p) for p in (0, 0.1, 0.2, 0.4, 0.61, 0.79, 0.8, 1)] == [
        1,
        1,
        2,
        3,
        4,
        4,
        4,
        4,
    ]
    assert Recipe(ttt_steps=4).steps_at(0) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "eagle1"])
def test_two_processes_train_as_one_does(data: Path, tmp_path: Path, method: str) -> None:
    recipe = {"method": method, "noise": 0.1}
    one = train(data, tmp_path / "one", **recipe)
    script = tmp_path / "two.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from test_training_loop import train\n"
        f"train(Path({str(data)!r}), Path({str(tmp_path / 'two')!r}), **{recipe!r})\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr", "127.0.0.1"]
    tests = str(Path(__file__).parents[2])
    run = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    two = load_file(tmp_path / "two" / "model.safetensors")
    for name, weight in one.items():
        np.testing.assert_allclose(two[name].float(), weight.float(), atol=2e-3, err_msg=name)
    shards = list((tmp_path / "two" / "checkpoints").glob("*/*.distcp"))
    assert len({path.name for path in shards}) == 2
