"""EAGLE-1/2 heads of the official layout: read, exported, and decoded with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
import torch
from plain_head import TOLERANCE, PlainEagle1Head, causal_attention, check_draft_tree
from safetensors.torch import load_file, save_file
from torch import Tensor

import eagle3
from eagle3.export.checks.reference import relative_error
from eagle3.export.checks.self_check import INT8_TOLERANCE
from eagle3.export.draft_graphs.head_modules import build_eagle1_head
from eagle3.export.graphs.joined_products import JOINED
from eagle3.export.heads.head_config import Head, TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.targets.target import lm_head_weight, load_target
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.describe import description_lines
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import CheckpointError, UnsupportedModel
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.stats import Clock

NUM_LAYERS = 2
FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=NUM_LAYERS)
PROMPT = list(range(5, 30))  # longer than a prefill chunk
NO_EOS: dict[str, Any] = {"max_new_tokens": 40, "logit_bias": {1: -100.0}}


def model_of(*, tied: bool = False) -> Any:
    # Tied embeddings, large beside what the layers add, would only repeat their input.
    model = tiny.tiny_model(
        "llama", num_layers=NUM_LAYERS, scale=0.1 if tied else 2.0, tie_word_embeddings=tied
    )
    tiny.jitter_vectors(model)
    return model


@dataclass(frozen=True)
class Case:
    """A target, its head's folder, and their bundle."""

    model: Any
    head: Path
    bundle: Bundle

    def initializers(self, engine: str = "eagle.draft") -> dict[str, Any]:
        model = ir.load(self.bundle.path(self.bundle.manifest.engines[engine].file))
        return {name: v.const_value for name, v in model.graph.initializers.items()}


def export(folder: Path, model: Any, plan: Any = None, **config: Any) -> Case:
    head = tiny.save_eagle1_head(folder / "head", model, **config)
    target = tiny.save_target(folder / "target", model)
    return Case(model, head, tiny.export_tiny(target, head, folder / "bundle", plan))


@pytest.fixture(scope="module", params=["ort", "portable"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    plan = tiny.tiny_plan(lowering=request.param)
    return export(tmp_path_factory.mktemp("eagle1"), model_of(), plan)


@pytest.fixture(scope="module")
def tied_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """lm_head is the embedding; no bias in fc, biases in q, k and v."""
    config = {"bias": False, "qkv_bias": True}
    return export(tmp_path_factory.mktemp("tied"), model_of(tied=True), **config)


def features_of(model: Any, tokens: list[int]) -> np.ndarray:
    """The target's final hidden after its last norm, [T,d]."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return out.hidden_states[NUM_LAYERS][0].numpy()  # type: ignore[no-any-return]


# Engines


def check_tree(case: Case) -> None:
    plain = PlainEagle1Head(case.head, case.model)
    features = features_of(case.model, PROMPT[:14])
    check_draft_tree(DraftEngine(case.bundle, 1, Clock()), plain, np.arange(64), features)


def test_every_node_of_a_draft_tree_has_its_paths_logits(case: Case) -> None:
    check_tree(case)


def test_a_tied_lm_head_and_other_biases(tied_case: Case) -> None:
    check_tree(tied_case)


@pytest.mark.parametrize(
    "config",
    [{}, {"bias": False}, {"qkv_bias": True}, {"attention_bias": True}, {"head_dim": 16}],
    ids=str,
)
def test_the_layer_follows_its_config(tmp_path: Path, config: dict[str, Any]) -> None:
    model = model_of()
    folder = tiny.save_eagle1_head(tmp_path / "head", model, **config)
    lm_head = model.lm_head.weight
    module = build_eagle1_head(read_head(folder, FACTS), lm_head, torch.float32)
    tokens = torch.tensor([PROMPT])
    features = torch.from_numpy(features_of(model, PROMPT))
    embedding = model.get_input_embeddings().weight[tokens]
    positions = torch.arange(len(PROMPT))[None]
    out = module(embedding, module.fuse(features[None]), positions, causal_attention)
    expected = PlainEagle1Head(folder, model).logits(features, PROMPT, [])
    assert relative_error(module.logits(out)[0, -1].numpy(), expected) < TOLERANCE


# Bundles


def test_the_bundle_says_what_it_holds(case: Case) -> None:
    manifest = case.bundle.manifest
    assert manifest.draft is not None
    assert set(manifest.engines) == {"target", "eagle.draft", "eagle.draft_tree"}
    assert (manifest.draft.method, manifest.draft.draft_vocab_size) == ("eagle", 64)
    assert manifest.target.aux_layer_ids == (NUM_LAYERS,)
    assert np.array_equal(case.bundle.target_ids("eagle"), np.arange(64))
    assert set(manifest.draft.checks["relative_errors"]) == {f"step_{i}" for i in range(4)}
    text = "\n".join(description_lines(case.bundle))
    assert "EAGLE-1/2 head (eagle1-official) from head, 1 layer, draft vocabulary 64" in text
    assert "fc bias = True (from: dialect default)" in text
    assert "first draft token accepted" in text


def test_weights_of_the_target_are_not_stored_twice(case: Case, tied_case: Case) -> None:
    for each, count in ((case, 2), (tied_case, 1)):
        weights = each.initializers().items()
        external = {n: t for n, t in weights if isinstance(t, ir.ExternalTensor)}
        shared = {n: t for n, t in external.items() if t.location == "target.onnx.data"}
        assert len(shared) == count
        assert {t.nbytes for t in shared.values()} == {4 * 64 * tiny.HIDDEN}
        own = {n for n, t in external.items() if t.nbytes == 4 * 64 * tiny.HIDDEN} - {*shared}
        layer = "head.layers.0.self_attn"
        joined = JOINED.join(f"{layer}.{each}_proj.weight.T" for each in "qkv")
        assert own <= {"head.fc.weight.T", joined}  # matrices of the same size


def test_an_int8_head_has_an_lm_head_of_its_own(tmp_path: Path) -> None:
    plan = tiny.tiny_plan(draft_weights="int8")
    case = export(tmp_path, model_of(tied=True), plan, intermediate_size=64)
    assert case.bundle.manifest.draft is not None
    checks = case.bundle.manifest.draft.checks
    assert 0 < max(checks["relative_errors"].values()) < INT8_TOLERANCE == checks["tolerance"]
    stored = {n: t for n, t in case.initializers().items() if t.nbytes >= 1024 and "scale" not in n}
    floats = [n for n, t in stored.items() if t.dtype == ir.DataType.FLOAT]
    assert floats == ["embed.weight"] and stored["embed.weight"].location == "target.onnx.data"
    assert (tiny.HIDDEN, 64) in [tuple(t.shape) for t in stored.values()]
    engine = eagle3.load(case.bundle.root, threads=1)
    plain = engine.generate(PROMPT, drafter="none", **NO_EOS)
    assert engine.generate(PROMPT, draft_top_k=2, **NO_EOS).token_ids == plain.token_ids


@pytest.mark.parametrize("tree", [(1, 4, 4), (3, 3, 6), (4, 5, 30), "eagle1"])
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.8, "seed": 3, "acceptance": "coupled"}])
def test_the_text_is_that_of_plain_decoding(case: Case, tree: Any, rule: dict[str, Any]) -> None:
    engine = eagle3.load(case.bundle.root, threads=1)
    assert engine.default_drafter == "eagle"
    asked = tree if isinstance(tree, str) else TreePlan(*tree)
    plain = engine.generate(PROMPT, drafter="none", **NO_EOS, **rule)
    drafted = engine.generate(PROMPT, drafter="eagle", tree=asked, **NO_EOS, **rule)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.plain_rounds < 3  # the last ones have no room for a tree


def test_a_head_that_knows_the_target_is_accepted(tmp_path: Path) -> None:
    """A target whose layers add nothing, and a head that repeats the embedding it is given."""
    model = tiny.tiny_model("llama", num_layers=NUM_LAYERS, scale=2.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # What the last norm does to every row, then: embedding / its root mean square.
        embedding = model.get_input_embeddings().weight
        embedding.div_(embedding.pow(2).mean(-1, keepdim=True).sqrt())
    target = tiny.save_target(tmp_path / "target", model)
    head = tiny.save_eagle1_head(tmp_path / "head", model, bias=False)
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"] = torch.eye(tiny.HIDDEN, 2 * tiny.HIDDEN)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].zero_()
    save_file(weights, head / "model.safetensors")
    engine = eagle3.load(tiny.export_tiny(target, head, tmp_path / "bundle").root, threads=1)
    stats = engine.generate(PROMPT, draft_top_k=1, draft_depth=3, **NO_EOS).stats
    assert stats.acceptance_length > 3.5 and stats.accepted_by_position[0] == 1.0


# Checkpoints


class Checkpoint:
    """A head's folder that a test may damage before it is read."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = tiny.save_eagle1_head(folder, model)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = load_file(folder / "model.safetensors")

    def read(self, layers: Any = None) -> Head:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, self.folder / "model.safetensors")
        return read_head(self.folder, FACTS, layers)

    def refusal(self, layers: Any = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.read(layers)
        return str(caught.value)


@pytest.fixture
def head(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "head", tiny.tiny_model("llama", num_layers=NUM_LAYERS))


def test_it_is_recognised_and_its_defaults_are_recorded(head: Checkpoint) -> None:
    config = head.read().config
    assert (config.method, config.aux_layer_ids) == ("eagle1", (NUM_LAYERS,))
    assert config.fc_bias and config.conventions["fc bias"].source == "dialect default"
    assert "target's" in config.conventions["embedding"].value
    assert config.conventions["lm_head"].value == "the target's"
    del head.weights["embed_tokens.weight"]
    config = head.read().config
    assert config.conventions["embedding"].value == "the target's" and not config.own_embedding


def test_its_layer_counts_outputs_too(head: Checkpoint) -> None:
    """The output of the last layer is stored as L - 1, and means hidden_states[L]."""
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [NUM_LAYERS - 1]}
    assert head.read().config.aux_layer_ids == (NUM_LAYERS,)
    assert head.read(layers=(NUM_LAYERS,)).config.aux_layer_ids == (NUM_LAYERS,)
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [NUM_LAYERS]}
    assert f"[{NUM_LAYERS + 1}]" in head.refusal()
    message = head.refusal(layers=(0, 1, 2))
    assert "[0, 1, 2]" in message and f"hidden_states[{NUM_LAYERS}]" in message


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"],
)
def test_a_missing_tensor_is_named(head: Checkpoint, name: str) -> None:
    del head.weights[name]
    message = head.refusal()
    assert f"missing ['{name}']" in message and "dialect eagle1-official" in message


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.0.input_layernorm.weight", "d2t"])
def test_an_unexpected_tensor_is_named(head: Checkpoint, name: str) -> None:
    head.weights[name] = torch.ones(tiny.HIDDEN)
    assert f"unexpected ['{name}']" in head.refusal()


def test_biases_are_those_of_the_config(head: Checkpoint) -> None:
    bias = head.weights.pop("fc.bias")
    assert "missing ['fc.bias']" in head.refusal()
    head.config["bias"] = False
    assert not head.read().config.fc_bias
    head.weights["fc.bias"] = bias
    assert "unexpected ['fc.bias']" in head.refusal()
    head.config["bias"] = "no"
    assert "bias 'no'; allowed: true, false" in head.refusal()
    head.config |= {"bias": True, "qkv_bias": True}
    attn = "layers.0.self_attn"
    for name, width in {"q": 32, "k": 16, "v": 16}.items():
        assert f"{attn}.{name}_proj.bias" in head.refusal()
        head.weights[f"{attn}.{name}_proj.bias"] = torch.ones(width)
    assert head.read().config.qkv_bias
    head.config["attention_bias"] = True
    assert f"missing ['{attn}.o_proj.bias']" in head.refusal()


def test_an_eagle3_head_in_its_clothes_is_refused_with_both_shapes(head: Checkpoint) -> None:
    """Trap 9: without its fc its tau would be exactly 1."""
    head.weights["fc.weight"] = torch.zeros(tiny.HIDDEN, 3 * tiny.HIDDEN)
    message = head.refusal()
    assert "fc.weight is [32, 96]" in message and "[32, 64]" in message


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("norm_output", True, "norm_output"),
        ("norm_before_residual", True, "norm_before_residual"),
        ("draft_vocab_size", 40, "draft_vocab_size is 40"),
        ("vocab_size", 60, "vocab_size 60 is not the target's 64"),
        ("eagle_aux_hidden_state_layer_ids", [2], "--aux-layers"),
    ],
)
def test_what_such_a_head_cannot_have_is_refused(
    head: Checkpoint, key: str, value: Any, says: str
) -> None:
    head.config[key] = value
    assert says in head.refusal()


def test_a_bin_file_as_published(head: Checkpoint) -> None:
    expected = head.read()
    (head.folder / "model.safetensors").unlink()
    torch.save(head.weights, head.folder / "pytorch_model.bin")
    found = read_head(head.folder, FACTS)
    assert all(torch.equal(found.weights[n], t) for n, t in expected.weights.items())


def test_a_target_whose_logits_are_more_than_its_lm_head_is_refused(tmp_path: Path) -> None:
    model = tiny.tiny_model("granite", num_layers=NUM_LAYERS, logits_scaling=4.0)
    target = load_target(str(tiny.save_target(tmp_path / "target", model)), "float32")
    with pytest.raises(UnsupportedModel, match="GraniteForCausalLM: its logits are not lm_head"):
        lm_head_weight(target)
