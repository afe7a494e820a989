"""The table of supported architectures, in both lowerings, against unchanged transformers models.

Each row is traced as an export does it and decoded by the runtime with a drafter that knows the
text but hangs wrong branches beside it: trees branch, paths are cut and carried, caches compacted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import onnx_ir as ir
import pytest
import tiny
import torch
from architectures import CONTEXT, ROWS, WINDOW, Row
from drafting import Forking, using

import eagle3
from eagle3.export.checks.product_check import check_products
from eagle3.export.checks.reference import relative_error
from eagle3.export.graphs.experts import dense_experts
from eagle3.export.graphs.joined_products import chooses_experts
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.tracer import save
from eagle3.export.int8.int8_products import quantize_products, unquantized_names
from eagle3.export.int8.int8_reference import Int8Products, ModelWeights, stored_int8
from eagle3.export.int8.rounding import calibration_tokens, rounded_weights
from eagle3.export.targets.target import load_target, trace_target
from eagle3.plans.lint.ort_cuda_lint import lint_ort_cuda
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import EngineInfo, TensorSpec
from eagle3.runtime.errors import UnsupportedModel
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import Clock
from eagle3.runtime.trees.tree import Tree

NUM_NEW = 48
TOLERANCE = 1e-4
MARGIN = 4e-4  # of the largest logit, between the two best tokens: rounding is a hundredth of it
NO_EOS = {1: -100.0}  # transformers' min_new_tokens

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Traced:
    """A row's model in PyTorch, its checkpoint, its graph, and a bundle that runs it."""

    row: Row
    model: Any
    folder: Path
    graph: ir.Model
    bundle: Bundle

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.bundle.manifest.target.aux_layer_ids


Trace = Callable[[str, str], Traced]


@pytest.fixture(scope="session")
def traced(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """traced(row, lowering), made once."""
    models: dict[str, tuple[Any, Path]] = {}
    made: dict[tuple[str, str], Traced] = {}

    def trace(name: str, lowering: str) -> Traced:
        if lowering == "int8":
            if (name, lowering) not in made:
                made[name, lowering] = in_int8(trace(name, "ort"), tmp_path_factory.mktemp(name))
            return made[name, lowering]
        row = ROWS[name]
        if name not in models:
            model = architectures.make_model(row)
            models[name] = (model, tiny.save_target(tmp_path_factory.mktemp(name), model))
        if (name, lowering) not in made:
            base = exported("qwen2", "ort").bundle  # its tokenizer and manifest
            folder = tmp_path_factory.mktemp(f"{name}-{lowering}")
            graph, bundle = _bundle(base, models[name][1], lowering, folder)
            made[name, lowering] = Traced(row, *models[name], graph, bundle)
        return made[name, lowering]

    return trace


def _bundle(base: Bundle, source: Path, lowering: str, folder: Path) -> tuple[ir.Model, Bundle]:
    """`base` with the target of `source`, which puts out features as it would for a head."""
    plan = replace(base.manifest.plan, lowering=lowering, max_draft_tokens=63, max_seq_len=CONTEXT)
    target = load_target(str(source), "float32", max_seq_len=plan.max_seq_len)
    layers = (0, 1, target.kv.num_layers)
    graph = trace_target(target, LOWERINGS[lowering], layers, plan.cache_capacity)
    save(graph, folder / "target.onnx")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    engine = EngineInfo("target.onnx", _specs(graph.graph.inputs), _specs(graph.graph.outputs))
    info = replace(
        base.manifest.target,
        architecture=target.architecture,
        num_layers=target.kv.num_layers,
        num_kv_heads=target.kv.num_kv_heads,
        head_dim=target.kv.head_dim,
        aux_layer_ids=layers,
        feature_size=len(layers) * tiny.HIDDEN,
    )
    fields = {"plan": plan, "target": info, "engines": {"target": engine}}
    return graph, tiny.edited_bundle(base, folder / "bundle", files, **fields)


def in_int8(target: Traced, folder: Path) -> Traced:
    """The same target with int8 weights, rounded on a calibration text."""
    graph, loaded = target.graph.clone(), load_target(str(target.folder), "float32")
    ir.external_data.load_to_model(graph)  # not written again where it is
    found = rounded_weights(loaded, calibration_tokens(loaded))
    weights = ModelWeights(loaded.model)
    quantize_products(graph, lambda name: found.get(weights[name].data_ptr()))
    save(graph, folder / "target.onnx")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    plan = replace(target.bundle.manifest.plan, target_weights="int8")
    bundle = tiny.edited_bundle(target.bundle, folder / "bundle", files, plan=plan)
    return replace(target, graph=graph, bundle=bundle)


def _specs(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            v.name,
            v.dtype.numpy().name,
            tuple(d if isinstance(d, int) else str(d) for d in v.shape),
        )
        for v in values
    )


@pytest.fixture(params=[f"{row}-{lowering}" for row in ROWS for lowering in LOWERINGS])
def target(request: pytest.FixtureRequest, traced: Trace) -> Traced:
    return traced(*request.param.split("-"))


def prompt() -> list[int]:
    """More than two sliding windows."""
    return np.random.default_rng(3).integers(2, 64, 2 * WINDOW + 5).tolist()


def greedy(model: Any, ids: list[int]) -> list[int]:
    """transformers' own greedy text, with its own cache."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


def reference(model: Any, tokens: list[int]) -> Any:
    """transformers' output for one text, without a cache; `logits` [1,T,V], `hidden_states`."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """[T,V]"""
    return reference(model, tokens).logits[0].numpy()


def features_of(target: Traced, tokens: list[int]) -> np.ndarray:
    """[T,F]"""
    hidden = reference(target.model, tokens).hidden_states
    return torch.cat([hidden[i] for i in target.aux_layer_ids], -1)[0].numpy()


class Witness(Forking):
    """Keeps the features that it was told of, those that stand at the end."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text, vocab_size=64)
        self.features: list[np.ndarray] = []
        self.rewound = 0

    def observe(self, tokens: np.ndarray, features: Any) -> None:
        super().observe(tokens, features)
        self.features += [row.copy() for row in features]

    def rewind(self, num_tokens: int) -> None:
        super().rewind(num_tokens)
        self.rewound += num_tokens
        del self.features[len(self.features) - num_tokens :]


def test_greedy_text_with_a_tree_is_that_of_transformers(target: Traced) -> None:
    ids = prompt()
    expected = greedy(target.model, ids)
    assert len(set(expected)) > 8, "a text of few tokens would prove little"
    engine = eagle3.load(target.bundle.root, threads=1)
    drafter = Witness(ids + expected)
    sizes = {"draft_top_k": 4, "draft_depth": 4, "num_draft_tokens": 12}
    with using(engine, drafter):
        found = engine.generate(ids, max_new_tokens=NUM_NEW, logit_bias=NO_EOS, **sizes)
    assert found.token_ids == expected
    assert found.stats.acceptance_length > 1.5 and drafter.rewound > 0, "branches were accepted"
    whole = features_of(target, ids + expected)[: len(drafter.features)]
    assert len(whole) >= len(ids) + NUM_NEW - 1
    assert relative_error(np.stack(drafter.features), whole) < TOLERANCE


def test_with_a_head_the_text_is_that_of_transformers(llama: Any, full_bundle: Bundle) -> None:
    """As a user's bundle does it: a real head, hostile as it is random; also one prompt token."""
    engine = eagle3.load(full_bundle.root, threads=1)
    for ids in ([9], prompt()):
        expected = greedy(llama, ids)
        assert len(set(expected)) > 8
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "logit_bias": NO_EOS}
        sizes = {"draft_top_k": 3, "draft_depth": 4, "num_draft_tokens": 12}
        with_tree = engine.generate(ids, **options, **sizes)
        assert with_tree.token_ids == expected
        assert with_tree.stats.plain_rounds <= 1  # where one token is left to generate
        assert engine.generate(ids, drafter="none", **options).token_ids == expected


def int8_products(target: Traced) -> Int8Products:
    weights = ModelWeights(target.model)
    graph = ir.load(target.bundle.path("target.onnx"))
    return Int8Products(weights, stored_int8(graph, weights))


@pytest.mark.parametrize("name", ROWS)
def test_the_text_of_an_int8_target_is_that_of_the_same_integers_in_pytorch(
    traced: Trace, name: str
) -> None:
    target, ids = traced(name, "int8"), prompt()
    assert unquantized_names(target.graph) == sorted(_routers(target.graph))
    with int8_products(target):
        expected = greedy(target.model, ids)
    engine = eagle3.load(target.bundle.root, threads=1)
    drafter = Witness(ids + expected)
    sizes = {"draft_top_k": 4, "draft_depth": 4, "num_draft_tokens": 12}
    with using(engine, drafter):
        found = engine.generate(ids, max_new_tokens=NUM_NEW, logit_bias=NO_EOS, **sizes)
    assert found.token_ids == expected
    assert found.stats.acceptance_length > 1.5 and drafter.rewound > 0, "branches were accepted"
    plain = engine.generate(ids, max_new_tokens=NUM_NEW, logit_bias=NO_EOS, drafter="none")
    assert plain.token_ids == expected


def _routers(graph: ir.Model) -> list[str]:
    products = [n for n in graph.graph if n.op_type in ("MatMul", "Gemm") and chooses_experts(n)]
    return [str(n.inputs[1].name) for n in products]


@pytest.mark.parametrize("name", ROWS)
def test_an_int8_row_is_the_same_alone_and_among_64(traced: Trace, name: str) -> None:
    target = traced(name, "int8")
    text, tokens = prompt(), np.random.default_rng(6).integers(2, 64, 64).tolist()
    engine = prefilled(target.bundle, text)
    wide = engine.verify(Tree.chain(tokens[0], tokens[1:]), len(text), want_logits=True).logits
    assert wide is not None
    wide = wide.copy()
    for i, token in enumerate(tokens):
        one = engine.verify(Tree.root_only(token), len(text) + i, want_logits=True).logits
        assert one is not None
        np.testing.assert_array_equal(one[0], wide[i])


@pytest.mark.parametrize("name", ROWS)
def test_the_products_of_an_int8_target_are_those_of_its_model(traced: Trace, name: str) -> None:
    target = traced(name, "int8")
    tokens = np.asarray(prompt(), np.int64)
    tree = Tree(tokens[:9], np.asarray([-1, 0, 0, 1, 1, 2, 3, 5, 5], np.int32))
    loaded = replace(load_target(str(target.folder), "float32"), model=target.model)
    errors = check_products(target.bundle, loaded, tokens, tree)
    assert max(errors.values()) < (5e-3 if "experts" in repr(target.model) else TOLERANCE), errors


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_exports_self_check_compares_text_longer_than_the_window(
    exported: Any, lowering: str
) -> None:
    check = exported("gemma3_text", lowering).bundle.manifest.self_check
    assert check["tokens"] > 6 * WINDOW
    assert set(check["relative_errors"]) == {"logits", "prefill_logits", "tree_logits"}
    assert max(check["relative_errors"].values()) < TOLERANCE


def test_a_tree_deeper_than_the_window_sees_each_path_alone(target: Traced) -> None:
    """The committed text and the paths are longer than the window; branches part twice."""
    rng = np.random.default_rng(5)
    text = rng.integers(2, 64, 3 * WINDOW).tolist()
    deep = [*range(-1, WINDOW + 6)]  # a chain deeper than the window
    parents = [*deep, 0, len(deep), len(deep) + 1, WINDOW, WINDOW + 8]
    tree = Tree(rng.integers(2, 64, len(parents)), np.asarray(parents, np.int32))
    engine = prefilled(target.bundle, text)
    out = engine.verify(tree, len(text), want_logits=True)
    assert out.logits is not None
    leaves = [node for node in range(tree.num_nodes) if not tree.children(node)]
    assert len(leaves) >= 3
    for leaf in leaves:
        path = [0, *tree.path(leaf)]
        expected = logits_of(target.model, [*text, *tree.tokens[path]])[len(text) :]
        assert relative_error(out.logits[path], expected) < TOLERANCE
        assert np.array_equal(out.next_token[path], expected.argmax(-1))


def prefilled(bundle: Bundle, tokens: list[int]) -> TargetEngine:
    engine = TargetEngine(bundle, 1, Clock())
    for past in range(0, len(tokens), engine.prefill_chunk):
        chunk = np.asarray(tokens[past : past + engine.prefill_chunk], np.int64)
        engine.prefill(chunk, past, want_logits=False)
    return engine


@pytest.mark.parametrize("name", ROWS)
def test_what_is_special_about_a_row_matters(name: str) -> None:
    """Without it the logits differ by far more than the tolerance; and no token is a near-tie."""
    row, ids = ROWS[name], prompt()
    model = architectures.make_model(row)
    text = ids + greedy(model, ids)
    logits = logits_of(model, text)[len(ids) - 1 : -1]
    best = np.sort(np.delete(logits, list(NO_EOS), 1), -1)
    assert (best[:, -1] - best[:, -2]).min() > MARGIN * np.abs(logits).max()
    for off in row.off:
        without = logits_of(architectures.switched_off(row, off), text[: len(ids) + 8])[-1]
        assert relative_error(without, logits[8]) > 100 * TOLERANCE, off


def test_norms_of_another_dtype_than_the_model(tmp_path: Path) -> None:
    """In float16, Gemma scales in float32: such norms are not fused with the residual."""
    folder = tiny.save_target(tmp_path / "gemma2", architectures.make_model(ROWS["gemma2"]))
    plan = tiny.tiny_plan(dtype="float16")
    check = tiny.export_tiny(folder, None, tmp_path / "bundle", plan).manifest.self_check
    assert max(check["relative_errors"].values()) < 1e-2


def test_a_row_is_the_same_alone_and_among_64(target: Traced) -> None:
    """To the last bit in `ort`, with experts, sinks and softcaps too."""
    text, tokens = prompt(), np.random.default_rng(6).integers(2, 64, 64).tolist()
    expected = logits_of(target.model, text + tokens)[len(text) :]
    engine = prefilled(target.bundle, text)
    wide = engine.verify(Tree.chain(tokens[0], tokens[1:]), len(text), want_logits=True).logits
    assert wide is not None and relative_error(wide, expected) < TOLERANCE
    wide = wide.copy()
    for i, token in enumerate(tokens):
        one = engine.verify(Tree.root_only(token), len(text) + i, want_logits=True).logits
        assert one is not None and relative_error(one[0], expected[i]) < TOLERANCE
        if target.bundle.manifest.plan.lowering == "ort":
            np.testing.assert_array_equal(one[0], wide[i])


def test_an_expert_that_overflows_spoils_only_rows_that_chose_it() -> None:
    """Where all experts run on all rows, what was not chosen must not come in as 0 times inf."""
    model = architectures.make_model(ROWS["mixtral"])
    experts, rows = model.model.layers[0].mlp.experts, torch.randn(5, tiny.HIDDEN)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]])
    weights = torch.rand(5, 2)
    expected = experts(rows, chosen, weights)
    torch.testing.assert_close(dense_experts(experts, rows, chosen, weights), expected)
    experts.down_proj.data[0] *= float("inf")
    found = dense_experts(experts, rows, chosen, weights)
    spoiled = (chosen == 0).any(-1)
    assert found[spoiled].isnan().all()
    torch.testing.assert_close(found[~spoiled], expected[~spoiled])


def test_an_expert_reads_only_rows_that_chose_it(traced: Trace) -> None:
    """In `ort` weights are separate constants, each multiplied once; in `portable` all at once."""
    for lowering, separate in (("ort", True), ("portable", False)):
        graph = traced("mixtral", lowering).graph.graph
        experts = [v for n, v in graph.initializers.items() if ".experts." in n]
        layers, matrices, num_experts = 2, 2, 4
        assert len(experts) == layers * matrices * (num_experts if separate else 1)
        for weight in experts:
            assert [use.node.op_type for use in weight.uses()] == ["MatMul"]
        assert ("Split" in {node.op_type for node in graph}) or not separate


@pytest.mark.parametrize("name", ROWS)
def test_portable_graphs_leave_nothing_to_the_host(traced: Trace, name: str) -> None:
    """ONNX Runtime's CUDA provider runs every node of them."""
    lint_ort_cuda(traced(name, "portable").bundle.path("target.onnx"))


def test_portable_graphs_hold_nothing_that_tensorrt_ignores_or_refuses(traced: Trace) -> None:
    for name in ("gemma2", "gpt_oss", "mixtral"):
        for node in traced(name, "portable").graph.graph:
            assert node.domain in ("", "ai.onnx"), node
            assert node.op_type not in ("NonZero", "Loop", "If", "Scan"), node
            if node.op_type == "Attention":
                assert set(node.attributes) <= {"scale"} and len(node.inputs) <= 4


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_rope_that_a_request_could_outgrow_is_refused(traced: Trace, name: str) -> None:
    """At the limit it is supported, as the rows show; one token beyond it is not."""
    folder = traced(name, "ort").folder
    with pytest.raises(UnsupportedModel, match=f"more than {CONTEXT} tokens.*is {CONTEXT + 1}"):
        load_target(str(folder), "float32", max_seq_len=CONTEXT + 1)


def test_the_readers_table_is_this_one() -> None:
    """docs/targets.md names each architecture of ROWS once, as working in both lowerings."""
    text = (Path(__file__).parents[3] / "docs" / "targets.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \|", text, re.MULTILINE)
    assert rows == [
        (name, "yes", "yes") for name in dict.fromkeys(r.architecture for r in ROWS.values())
    ]
    for row in ROWS.values():
        assert type(architectures.make_model(row)).__name__ == row.architecture
