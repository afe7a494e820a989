"""Several drafts over one target: told apart, named, added later, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
import torch
from safetensors.torch import load_file

import eagle3
from eagle3.export import add_draft as add
from eagle3.export import exporter as build
from eagle3.export.add_draft import AddRequest, add_draft
from eagle3.export.drafts import model_draft as draft_model
from eagle3.export.drafts.draft_source import DraftSource, is_causal_lm
from eagle3.export.graphs.weights import StoredGraph
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.bundle_facts import bundle_facts
from eagle3.runtime.bundle.describe import cache_bytes, description_lines
from eagle3.runtime.bundle.folder import Bundle, write_manifest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.errors import BundleError, CheckpointError, ExportError, SelfCheckFailed

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


@pytest.fixture
def copy(several: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(several.root, tmp_path / "bundle"))


def adding(folder: Path, draft: str, output: Path, **options: Any) -> AddRequest:
    fields = {"tree": CHAIN, "draft_weights": "same", **options}
    return AddRequest(str(folder / "target"), DraftSource.parse(draft), output, **fields)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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


def test_the_graph_that_grows_a_tree_reads_its_own_layers_too(several: Bundle) -> None:
    """And memory is reckoned for what the first head reads, not for all that the target
    puts out.
    """
    for name in ("outer", "mine"):
        features = several.manifest.engines[f"{name}.draft_tree"].inputs[0]
        assert features.shape == ("B", "N", len(LAYERS[name]) * tiny.HIDDEN)
        eagle3.load(several.root, threads=1).generate("t3", drafter=name, max_new_tokens=20)
    _, first = bundle_facts(several)
    assert first is not None and first.feature_size == len(LAYERS["outer"]) * tiny.HIDDEN
    assert several.manifest.target.feature_size == 3 * tiny.HIDDEN


def test_words_and_caches_name_every_draft(several: Bundle) -> None:
    text = "\n".join(description_lines(several))
    for part in ("mine: EAGLE-3 head", "eagle: EAGLE-1/2 head", "tree", "outer: first draft token"):
        assert part in text
    assert set(cache_bytes(several)) == {"target", *(f"{name}.draft" for name in LAYERS)}


def test_two_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    given = [str(folder / "mine"), str(folder / "outer")]
    with pytest.raises(ExportError, match="drafter eagle3 already exists.*mine=PATH"):
        tiny.export_tiny(folder / "target", given, tmp_path / "out")
    with pytest.raises(ExportError, match="--aux-layers applies to one head, got 2"):
        tiny.export_tiny(folder / "target", given, tmp_path / "out", aux_layer_ids=(1, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["none", "A", "a b", "1st", "a.b", "target", "tokenizer", "a" * 65]
)
def test_names_that_no_draft_can_have(name: str) -> None:
    with pytest.raises(ExportError, match="cannot be named"):
        DraftSource.parse(f"{name}=x")


def test_what_is_a_name_and_what_a_path(tmp_path: Path) -> None:
    assert DraftSource.parse("mine=org/head") == DraftSource("org/head", "mine")
    assert DraftSource.parse("./a=b") == DraftSource("./a=b")
    (tmp_path / "a=b").mkdir()
    assert DraftSource.parse(str(tmp_path / "a=b")) == DraftSource(str(tmp_path / "a=b"))


# What `--draft` points at


def test_heads_and_models_are_told_apart(folder: Path, tmp_path: Path, model: Any) -> None:
    assert is_causal_lm(str(folder / "lm")) and is_causal_lm(str(folder / "target"))
    (tmp_path / "model.gguf").touch()
    assert is_causal_lm(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="gone.gguf: no such GGUF file"):
        is_causal_lm(str(tmp_path / "gone.gguf"))
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


# One more for a bundle that is there


def test_adding_leaves_the_target_and_the_others(
    folder: Path, several: Bundle, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the target is not exported again")

    monkeypatch.setattr(build, "trace_target", never)
    before = snapshot(copy)
    bundle, check = add_draft(adding(folder, str(folder / "lm"), copy, command="eagle3 export x"))
    monkeypatch.undo()
    assert set(check.drafts) == {"model"} and check.engines
    after = snapshot(copy)
    assert {name for name in after if after[name] != before.get(name)} == {
        "manifest.json",
        "model.draft.onnx",
        "model.draft.onnx.data",
    }
    assert before.keys() < after.keys()
    assert list(bundle.manifest.drafts) == [*LAYERS, "model"]
    added = bundle.manifest.drafts["model"]
    assert (added.tree, added.command, added.source) == (CHAIN, "eagle3 export x", "lm")
    drafts = {**several.manifest.drafts, "model": added}
    engines = {**several.manifest.engines, "model.draft": bundle.manifest.engines["model.draft"]}
    assert (
        replace(several.manifest, drafts=drafts, engines=engines, files=bundle.manifest.files)
        == bundle.manifest
    )
    assert [p.name for p in copy.parent.iterdir()] == ["bundle"]
    moved = copy.rename(copy.parent / "else where")
    bundle = Bundle.open(moved)
    bundle.verify_hashes()
    engine = eagle3.load(moved, threads=1)
    expected = engine.generate([5, 6, 7], drafter="none", **OPTIONS).token_ids
    for name in engine.drafters:
        assert engine.generate([5, 6, 7], drafter=name, **OPTIONS).token_ids == expected


def test_a_head_that_is_added_is_the_one_of_a_whole_export(
    folder: Path, several: Bundle, copy: Path
) -> None:
    """Also what it shares with the target. It replaces one of its name, in its place."""
    tree = several.manifest.plan.tree
    bundle, _ = add_draft(adding(folder, str(folder / "eagle"), copy, tree=tree, force=True))
    assert list(bundle.manifest.drafts) == list(LAYERS)
    assert bundle.manifest == several.manifest


def refused(request: AddRequest, error: type[Exception], says: str) -> None:
    """Nothing of the bundle changes, and nothing stands beside it."""
    before = snapshot(request.output.parent)
    with pytest.raises(error, match=says):
        add_draft(request)
    assert snapshot(request.output.parent) == before


def test_plan_files_of_what_stays_stay(folder: Path, copy: Path) -> None:
    """They cost minutes on a GPU; those of the draft that is replaced are of another graph."""
    plans = copy / "plans" / "tensorrt-rtx-sm89"
    plans.mkdir(parents=True)
    for name in ("target.plan", "outer.draft.plan", "mine.draft.plan", "timing.cache"):
        (plans / name).write_text(name)
    add_draft(adding(folder, f"mine={folder / 'lm'}", copy, force=True))
    kept = {path.name: path.read_text() for path in plans.iterdir()}
    assert kept == {name: name for name in ("target.plan", "outer.draft.plan", "timing.cache")}


def test_a_sibling_of_the_target(folder: Path, copy: Path, tmp_path: Path, model: Any) -> None:
    """Of its sizes and its embedding, which tell nothing: the self-check does."""
    sibling = deepcopy(model)
    sibling.model.layers[1].mlp.up_proj.weight.data.add_(0.1)
    target = str(tiny.save_target(tmp_path / "targets" / "tuned", sibling))
    request = replace(adding(folder, str(folder / "lm"), copy), target=target)
    refused(request, SelfCheckFailed, "tuned is a sibling of what .* was exported from, target")


def test_a_model_with_one_altered_weight(
    folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check compares it with PyTorch, row by row of a tree."""
    save = build.save

    def altered(graph: Any, path: Path, *more: Any) -> Any:
        names = [name for name in graph.graph.initializers if "down_proj" in name]
        value = graph.graph.initializers[names[0]]
        value.const_value = ir.tensor(value.const_value.numpy() * 1.05)
        return save(graph, path, *more)

    monkeypatch.setattr(build, "save", altered)
    says = r"the exported model disagrees with PyTorch: relative error step_0"
    refused(adding(folder, str(folder / "lm"), copy), SelfCheckFailed, says)


def test_layers_that_the_target_does_not_put_out(folder: Path, copy: Path) -> None:
    """The bundle must be exported again, with both."""
    says = r"fuses hidden_states \[2\], but the target of .* only \[0, 1, 3\].* again with --draft"
    refused(adding(folder, str(folder / "other"), copy), ExportError, says)


def test_a_name_that_is_taken(folder: Path, copy: Path) -> None:
    says = "drafter mine already exists.*--force"
    refused(adding(folder, f"mine={folder / 'lm'}", copy), ExportError, says)


def test_another_target(folder: Path, copy: Path, tmp_path: Path, model: Any) -> None:
    deep = tiny.tiny_model("llama", num_layers=4)
    other = tiny.tiny_model("llama", num_layers=NUM_LAYERS, seed=8)
    for name, lm, says in (("deep", deep, "num_layers is 3, not 4"), ("other", other, "embed")):
        target = str(tiny.save_target(tmp_path / "targets" / name, lm))
        request = replace(adding(folder, str(folder / "lm"), copy), target=target)
        refused(request, ExportError, f"was not exported from.*{says}.*manifest, target")


def test_a_file_that_was_altered(folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.runtime.bundle.folder.MAX_SMALL_BYTES", 0)
    monkeypatch.setattr(add, "write_draft", lambda *_: {})
    data = copy / "outer.draft.onnx.data"
    data.write_bytes(bytes(len(data.read_bytes())))
    refused(
        adding(folder, str(folder / "lm"), copy), BundleError, "outer.draft.onnx.data is not the"
    )


def test_what_is_no_bundle(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "thesis.tex").write_text("years of work")
    refused(adding(folder, str(folder / "lm"), tmp_path / "file"), ExportError, "thesis.tex")
    with pytest.raises(BundleError, match="does not exist"):
        add_draft(adding(folder, str(folder / "lm"), tmp_path / "gone"))


def test_an_interrupted_addition(folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "check_bundle", interrupt)
    before = snapshot(copy.parent)
    with pytest.raises(KeyboardInterrupt):
        add_draft(adding(folder, str(folder / "lm"), copy))
    assert snapshot(copy.parent) == before


def test_a_draft_that_another_export_added_meanwhile_stays(
    folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(place: Path, *rest: Any) -> Any:
        monkeypatch.undo()
        other = replace(Bundle.open(copy).manifest, command="eagle3 export --add-draft other")
        write_manifest(copy, other)
        return add.compare(place, *rest)

    monkeypatch.setattr(add, "compare", meanwhile)
    with pytest.raises(ExportError, match="changed by another export meanwhile"):
        add_draft(adding(folder, str(folder / "lm"), copy))
    assert Bundle.open(copy).manifest.command == "eagle3 export --add-draft other"
    assert not list(copy.parent.glob(".bundle*"))


def test_an_int8_model_keeps_the_embedding_of_the_target(folder: Path, tmp_path: Path) -> None:
    """Its matrices are int8, the lm_head too, where it is the embedding in the target."""
    tied = tiny.tiny_model("llama", num_layers=1, scale=0.1, tie_word_embeddings=True)
    target = tiny.save_target(tmp_path / "target", tied)
    plan = tiny.tiny_plan(draft_weights="int8")
    bundle = tiny.export_tiny(target, target, tmp_path / "out", plan)
    graph = StoredGraph.load(bundle.path("model.draft.onnx"))
    weights = {n: v.const_value for n, v in graph.graph.graph.initializers.items()}
    shared = {n for n, t in graph.weights.items() if t.location == "target.onnx.data"}
    floats = {n for n, t in weights.items() if t.dtype == ir.DataType.FLOAT}
    large = {n for n in floats if weights[n].nbytes >= 1024 and not n.endswith(".scale")}
    assert large == shared and len(shared) == 1
    int8 = [t for t in weights.values() if t.dtype == ir.DataType.INT8]
    assert (tiny.HIDDEN, 64) in [tuple(t.shape) for t in int8], "the lm_head"
    checks = bundle.manifest.drafts["model"].checks
    assert 0 < max(checks["relative_errors"].values()) < checks["tolerance"]
    assert checks["first_position_acceptance"] > 0.5
    engine = eagle3.load(bundle.root, threads=1)
    expected = engine.generate([5, 6], drafter="none", **OPTIONS).token_ids
    assert engine.generate([5, 6], **OPTIONS).token_ids == expected
    assert np.isfinite(engine.generate([5, 6], **OPTIONS).stats.acceptance_length)
