"""A whole export with `--weights int8`: what is stored, what is checked, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
from transformers import GPT2Config, GPT2LMHeadModel

import eagle3
from eagle3.export.add_draft import AddRequest, add_draft
from eagle3.export.checks import quality
from eagle3.export.checks.product_check import check_products
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.graphs.weights import StoredGraph
from eagle3.export.int8.int8_reference import ModelWeights, stored_int8
from eagle3.export.targets.target import Target, load_target
from eagle3.runtime.bundle.describe import description_lines
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import EngineError, ExportError, SelfCheckFailed
from eagle3.runtime.ort import session
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import Clock
from eagle3.runtime.trees.tree import Tree

pytestmark = pytest.mark.slow

PLAN = tiny.tiny_plan(target_weights="int8")
NUM_LAYERS = 2
PROMPT = np.random.default_rng(3).integers(2, 64, 37).tolist()
OPTIONS: Mapping[str, Any] = {"max_new_tokens": 40, "logit_bias": {1: -100.0}}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Bundle]:
    """The folder of a target, and its int8 bundle with a head."""
    folder = tmp_path_factory.mktemp("int8")
    tied = request.param
    model = tiny.tiny_model("llama", num_layers=NUM_LAYERS, scale=1.0, tie_word_embeddings=tied)
    target = tiny.save_target(folder / "target", model)
    head = tiny.save_head(folder / "head", model, aux_layer_ids=(0, 1, 2))
    return target, tiny.export_tiny(target, head, folder / "bundle", PLAN)


def graph_of(bundle: Bundle, engine: str) -> StoredGraph:
    return StoredGraph.load(bundle.path(bundle.manifest.engines[engine].file))


def test_the_manifest_contains_the_measured_quality(exported: tuple[Path, Bundle]) -> None:
    bundle = exported[1]
    check = bundle.manifest.self_check
    assert bundle.manifest.plan.target_weights == "int8"
    assert set(check["relative_errors"]) == {"inputs", "products", "features"}
    assert max(check["relative_errors"].values()) < check["tolerance"] == 1e-4
    found = check["quality"]
    assert 0 < found["mean_kl"] < found["kl_99"] and found["mean_kl"] < quality.MAX_MEAN_KL
    assert 0.5 < found["top_1"] <= 1 and found["tokens"] > 100
    assert found["perplexity"] != found["original_perplexity"]
    assert check["not_quantized"] == []
    text = "\n".join(description_lines(bundle))
    assert "int8 target against the original" in text and "matrices not in int8: none" in text
    assert "float32, target weights int8, ort lowering" in text


def test_no_matrix_is_stored_in_another_form(exported: tuple[Path, Bundle]) -> None:
    """Neither in the target nor, where a draft reads the target's embedding, in the draft."""
    bundle = exported[1]
    stored = graph_of(bundle, "target")
    initializers = stored.graph.graph.initializers
    matrices = {n: v for n, v in initializers.items() if len(v.shape) == 2}
    assert {n for n, v in matrices.items() if v.dtype == ir.DataType.FLOAT} <= {
        "hadamard_32",
        "hadamard_64",
    }
    tables = [n for n, v in matrices.items() if sorted(v.shape) == [tiny.HIDDEN, 64]]
    is_tied = "model.lm_head.weight.int8" in tables
    assert sum("lm_head" in n or "embed" in n for n in tables) == (1 if is_tied else 2)
    for name in ("eagle3.draft", "eagle3.draft_tree"):
        own = graph_of(bundle, name)
        table = own.graph.graph.initializers["embed.weight.int8"].const_value
        assert isinstance(table, ir.ExternalTensor) and table.location == "target.onnx.data"
        assert "embed.weight" not in own.graph.graph.initializers


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4, "acceptance": "coupled"}])
def test_a_head_changes_no_token(exported: tuple[Path, Bundle], options: Any) -> None:
    engine = eagle3.load(exported[1].root, threads=1)
    plain = engine.generate(PROMPT, drafter="none", **OPTIONS, **options)
    drafted = engine.generate(PROMPT, drafter="eagle3", **OPTIONS, **options)
    assert len(set(plain.token_ids)) > 4
    assert drafted.token_ids == plain.token_ids


def logits_of(bundle: Bundle) -> np.ndarray:
    engine = TargetEngine(bundle, 1, Clock())
    engine.prefill(np.asarray(PROMPT[:16]), 0, want_logits=False)
    tree = Tree(np.arange(5, 11), np.asarray([-1, 0, 0, 1, 1, 2], np.int32))
    out = engine.verify(tree, 16, want_logits=True)
    assert out.logits is not None
    return out.logits.copy()


def test_weights_converted_to_uint8_give_the_same_bits(
    exported: tuple[Path, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form for CPUs without VNNI, which ONNX Runtime can use on any x86 CPU."""
    monkeypatch.setattr(session, "int8_form", lambda: "int8")
    expected = logits_of(exported[1])
    monkeypatch.setattr(session, "int8_form", lambda: "uint8")
    np.testing.assert_array_equal(logits_of(exported[1]), expected)


def swapped(bundle: Bundle, folder: Path, first: str, second: str) -> Bundle:
    """The bundle with the values and scales of two weights exchanged."""
    stored, data = (
        graph_of(bundle, "target"),
        bytearray(bundle.path("target.onnx.data").read_bytes()),
    )
    for suffix in (".int8", ".scale"):
        one, two = (stored.weights.get(name + suffix) for name in (first, second))
        if one is None or two is None:
            continue  # a small one is in the graph
        places = [slice(t.offset, t.offset + t.length) for t in (one, two)]
        parts = [bytes(data[place]) for place in places]
        data[places[0]], data[places[1]] = parts[1], parts[0]
    return tiny.edited_bundle(bundle, folder, {"target.onnx.data": bytes(data)})


def loaded(exported: tuple[Path, Bundle]) -> Target:
    return load_target(str(exported[0]), "float32")


def test_a_graph_that_is_wired_wrongly_is_found(
    exported: tuple[Path, Bundle], tmp_path: Path
) -> None:
    bundle, tree = exported[1], Tree(np.arange(5, 9), np.asarray([-1, 0, 0, 1], np.int32))
    right = check_products(bundle, loaded(exported), np.asarray(PROMPT), tree)
    assert max(right.values()) < 1e-4
    name = "model.model.layers.{}.mlp.down_proj.weight.T"
    wrong = swapped(bundle, tmp_path / "swapped", name.format(0), name.format(1))
    found = check_products(wrong, loaded(exported), np.asarray(PROMPT), tree)
    assert found["weights"] == float("inf")


def test_a_layer_that_computes_something_else_is_found(
    exported: tuple[Path, Bundle],
) -> None:
    """Another epsilon of the norms: no weight shows it."""
    target = loaded(exported)
    for norm in target.model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.variance_epsilon = 0.1  # type: ignore[assignment]
    tree = Tree(np.arange(5, 9), np.asarray([-1, 0, 0, 1], np.int32))
    found = check_products(exported[1], target, np.asarray(PROMPT), tree)
    assert found["inputs"] > 1e-3 and "weights" not in found


def test_low_quality_is_refused_unless_it_is_accepted(
    exported: tuple[Path, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "MAX_MEAN_KL", 1e-9)
    folder = tmp_path / "bundle"
    with pytest.raises(ExportError, match=r"mean KL divergence .* --accept-quality"):
        tiny.export_tiny(exported[0], None, folder, PLAN)
    assert not folder.exists()
    bundle = tiny.export_tiny(exported[0], None, folder, PLAN, accept_quality=True)
    assert bundle.manifest.self_check["quality"]["mean_kl"] > 1e-9


def test_a_draft_is_added_to_the_same_target_only(
    exported: tuple[Path, Bundle], tmp_path: Path
) -> None:
    target, bundle = exported
    own = tiny.export_tiny(target, None, tmp_path / "bundle", PLAN)
    order = AddRequest(
        target=str(target),
        draft=DraftSource.parse(str(target)),  # an LM; a head needs features
        output=own.root,
        tree=PLAN.tree,
        draft_weights="same",
    )
    add_draft(order)
    engine = eagle3.load(own.root, threads=1)
    texts = [
        engine.generate(PROMPT, drafter=name, **OPTIONS).token_ids for name in ("none", "model")
    ]
    assert texts[0] == texts[1]
    other = tiny.save_target(
        tmp_path / "other",
        tiny.tiny_model("llama", num_layers=NUM_LAYERS, seed=9, tie_word_embeddings=True),
    )
    with pytest.raises((ExportError, SelfCheckFailed), match="not exported from|disagrees"):
        add_draft(replace(order, target=str(other), force=True))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = tiny.tiny_model("llama", num_layers=1)
    model.model.layers[0].mlp.up_proj.weight.data[3, 2] = float("nan")
    target = tiny.save_target(tmp_path / "target", model)
    with pytest.raises(ExportError, match=r"up_proj.weight has values that are not finite"):
        tiny.export_tiny(target, None, tmp_path / "bundle", PLAN)


def test_a_nan_in_any_chunk_of_the_prompt_is_an_error(
    exported: tuple[Path, Bundle], tmp_path: Path
) -> None:
    """A product of integers would hide it."""
    target, bundle = exported
    weights = ModelWeights(loaded(exported).model)
    stored = graph_of(bundle, "target")
    name = next(n for n in stored.graph.graph.initializers if "embed" in n or "lm_head" in n)
    assert stored_int8(stored.graph, weights)
    scale = name.removesuffix(".int8").removesuffix(".scale") + ".scale"
    tables = [n for n in stored.graph.graph.initializers if n.endswith("embed_tokens.weight.scale")]
    value = stored.graph.graph.initializers[tables[0] if tables else scale]
    scales = value.const_value.numpy().copy()  # type: ignore[union-attr]
    scales[7] = np.nan
    value.const_value = ir.tensor(scales, name=value.name)
    ir.save(stored.graph, tmp_path / "target.onnx")
    edited = tiny.edited_bundle(
        bundle, tmp_path / "bundle", {"target.onnx": (tmp_path / "target.onnx").read_bytes()}
    )
    engine = eagle3.load(edited.root, threads=1)
    fine = [i for i in PROMPT if i != 7]
    if tables:  # a tied table also makes the logit of the token NaN
        engine.generate(fine, drafter="none", max_new_tokens=2, logit_bias={1: -100.0, 7: -100.0})
    for place in (0, len(fine)):
        with pytest.raises(EngineError, match="logits are NaN"):
            engine.generate([*fine[:place], 7, *fine[place:]], drafter="none", max_new_tokens=2)


def test_weights_of_gpt2_are_transposed_in_the_model(tmp_path: Path) -> None:
    """Its products are Conv1D, with weights [K,N], some of them square."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    target = tiny.save_target(tmp_path / "target", GPT2LMHeadModel(config).eval())
    check = tiny.export_tiny(target, None, tmp_path / "bundle", PLAN).manifest.self_check
    assert max(check["relative_errors"].values()) < 1e-4 and check["not_quantized"] == []
