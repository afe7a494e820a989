"""Several drafts over one target: told apart, named, added later, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

import eagle3
from eagle3.export import draft_model
from eagle3.export.drafts import DraftSource, is_causal_lm
from eagle3.plans.plan import TreePlan
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.describe import cache_bytes, description_lines
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.errors import CheckpointError, ExportError

NUM_LAYERS = 3
CHAIN = TreePlan(1, 2, 2)
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "logit_bias": {1: -100.0}}
# name -> fused layers of the heads in `several`: one reads columns that are apart.
LAYERS = {"outer": (0, 3), "mine": (1, 3), "eagle": (3,)}


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny.tiny_model("llama", num_layers=NUM_LAYERS, scale=2.0)
    tiny.jitter_vectors(model)
    return model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, its heads by name, and a small LM."""
    folder = tmp_path_factory.mktemp("drafts")
    tiny.save_target(folder / "target", model)
    for name, layers in {**LAYERS, "other": (2,)}.items():
        if name == "eagle":
            tiny.save_eagle1_head(folder / name, model)
        else:
            tiny.save_head(folder / name, model, draft_vocab_size=40, aux_layer_ids=layers)
    lm = tiny.tiny_model("llama", num_layers=1, scale=2.0, seed=4)
    tiny.save_target(folder / "lm", lm)
    return folder


@pytest.fixture(scope="module")
def several(folder: Path) -> Bundle:
    """Heads that read different layers."""
    given = [f"outer={folder / 'outer'}", f"mine={folder / 'mine'}", str(folder / "eagle")]
    return tiny.export_tiny(folder / "target", given, folder / "several")


# Several in one export


def test_the_target_puts_out_what_any_head_fuses(several: Bundle) -> None:
    manifest = several.manifest
    assert manifest.target.aux_layer_ids == (0, 1, 3)
    assert {name: info.aux_layer_ids for name, info in manifest.drafts.items()} == LAYERS
    methods = [info.method for info in manifest.drafts.values()]
    assert methods == ["eagle3", "eagle3", "eagle"]
    assert list(manifest.drafts) == list(LAYERS), "in the order given, the default first"
    files = {name.partition(".")[0] for name in manifest.files}
    assert files == {*LAYERS, "target", "tokenizer", "chat_template"}


@pytest.mark.parametrize("name", LAYERS)
def test_each_head_reads_its_own_layers(several: Bundle, model: Any, name: str) -> None:
    engine, prompt = eagle3.load(several.root, threads=1), list(range(5, 15))
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    expected = torch.cat([out.hidden_states[i] for i in LAYERS[name]], -1)[0].numpy()
    features = engine.target.prefill(np.array(prompt), 0, False).features
    drafter = engine.drafter(name)
    assert isinstance(drafter, EagleDrafter)
    drafter.observe(np.array(prompt), features)
    np.testing.assert_allclose(drafter._engine.feature_slots(len(prompt)), expected, atol=1e-4)
    plain = engine.generate(prompt, drafter="none", **OPTIONS).token_ids
    assert engine.generate(prompt, drafter=name, **OPTIONS).token_ids == plain


def test_words_and_caches_name_every_draft(several: Bundle) -> None:
    text = "\n".join(description_lines(several))
    for part in ("mine: EAGLE-3 head", "eagle: EAGLE-1/2 head", "tree", "outer: first draft token"):
        assert part in text
    assert set(cache_bytes(several)) == {"target", *(f"{name}.draft" for name in LAYERS)}


def test_two_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    given = [str(folder / "mine"), str(folder / "outer")]
    with pytest.raises(ExportError, match="a drafter eagle3 already.*mine=PATH"):
        tiny.export_tiny(folder / "target", given, tmp_path / "out")
    with pytest.raises(ExportError, match="--aux-layers is of one head, here are 2"):
        tiny.export_tiny(folder / "target", given, tmp_path / "out", aux_layer_ids=(1, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["none", "A", "a b", "1st", "a.b"])
def test_names_that_no_draft_can_have(name: str) -> None:
    with pytest.raises(ExportError, match="cannot be called"):
        DraftSource.parse(f"{name}=x")


def test_what_is_a_name_and_what_a_path(tmp_path: Path) -> None:
    assert DraftSource.parse("mine=org/head") == DraftSource("org/head", "mine")
    assert DraftSource.parse("./a=b") == DraftSource("./a=b")
    (tmp_path / "a=b").mkdir()
    assert DraftSource.parse(str(tmp_path / "a=b")) == DraftSource(str(tmp_path / "a=b"))


# What `--draft` points at


def test_heads_and_models_are_told_apart(folder: Path, tmp_path: Path, model: Any) -> None:
    assert is_causal_lm(str(folder / "lm")) and is_causal_lm(str(folder / "target"))
    assert is_causal_lm("anywhere/model.gguf")
    assert not any(is_causal_lm(str(folder / name)) for name in LAYERS)
    config = json.loads((folder / "eagle" / "config.json").read_text())
    named = {**config, "architectures": ["LlamaForCausalLM"]}  # as the published ones are
    (folder / "eagle" / "config.json").write_text(json.dumps(named))
    assert not is_causal_lm(str(folder / "eagle"))
    for name, source in (("head", "eagle"), ("model", "lm")):  # as .bin files
        pickled = tmp_path / name
        shutil.copytree(folder / source, pickled)
        weights = load_file(pickled / "model.safetensors")
        torch.save(weights, pickled / "pytorch_model.bin")
        (pickled / "model.safetensors").unlink()
        assert is_causal_lm(str(pickled)) == (name == "model")


def test_what_cannot_be_read_is_left_to_the_reader_of_heads(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder / "lm", tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert not is_causal_lm(str(broken))
    with pytest.raises(CheckpointError, match="model.safetensors"):
        tiny.export_tiny(folder / "target", broken, tmp_path / "out")


# A model of another vocabulary or length


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"t7": 9, "t9": 7}, r"2 ids differ: id 7 is 't9' there and 't7' in the target; id 9"),
        ({"t63": None}, r"vocabulary of 63 .* of 64, 1 ids differ: id 63 is no token there"),
        ({"extra": 64}, "id 64 is 'extra' there and no token in the target"),
    ],
)
def test_tokens_are_compared_one_by_one(change: dict[str, int | None], says: str) -> None:
    own: dict[str, Any] = {f"t{i}": i for i in range(64)} | change
    own = {token: i for token, i in own.items() if i is not None}
    with pytest.raises(CheckpointError, match=f"draft small: .*{says}"):
        draft_model.check_vocabulary("small", own, {f"t{i}": i for i in range(64)})


def test_a_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    lm = Path(shutil.copytree(folder / "lm", tmp_path / "lm"))
    tokenizer = json.loads((lm / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["t5"], vocab["t6"] = 6, 5
    (lm / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="2 ids differ: id 5 is 't6' there"):
        tiny.export_tiny(folder / "target", lm, tmp_path / "out")


def test_a_model_that_knows_fewer_positions_is_refused(folder: Path, tmp_path: Path) -> None:
    lm = Path(shutil.copytree(folder / "lm", tmp_path / "lm"))
    config = json.loads((lm / "config.json").read_text())
    (lm / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    with pytest.raises(ExportError, match=r"lm, read as a causal LM: max_seq_len 128 .* 100"):
        tiny.export_tiny(folder / "target", lm, tmp_path / "out")
