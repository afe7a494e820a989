"""Growth graphs of a tiny head, run by ONNX Runtime: against the numpy builder, fed with the very
numbers of the graph; padding and batches; int8 weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import tiny
import torch
from numpy.typing import NDArray

from eagle3.export.checks.growth_check import grown_tree_agreement
from eagle3.export.draft_graphs import growth_graph as growth_module
from eagle3.export.draft_graphs.draft_engines import _inputs, _trace_fuse
from eagle3.export.draft_graphs.expand_rerank import TreeGrowth
from eagle3.export.draft_graphs.growth_graph import growth_graph
from eagle3.export.draft_graphs.head_modules import DraftGraph, build_head
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.tracer import trace_unlowered
from eagle3.export.graphs.weights import quantize_int8
from eagle3.export.heads.head_config import Head, TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import SelfCheckFailed
from eagle3.runtime.ort.growth_engine import GrowthEngine
from eagle3.runtime.trees.dynamic import DynamicTree
from eagle3.runtime.trees.tree import Tree

CAPACITY, WIDTH = 64, 96
TREES = [(1, 1, 1), (1, 4, 4), (3, 3, 6), (4, 2, 30), (10, 4, 48), (6, 8, 60)]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Traced:
    """A head and what it was traced into, its attention not lowered."""

    head: Head
    draft: ir.Model
    fuse: ir.Model
    lowering: str

    def growth(self, tree: TreePlan) -> ir.Model:
        lowering = LOWERINGS[self.lowering]
        return growth_graph(self.draft, self.fuse, self.head.target_ids, lowering, tree)


@pytest.fixture(scope="module", params=["ort", "portable"])
def traced(request: pytest.FixtureRequest, llama: Any, head_folder: Path) -> Traced:
    facts = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
    head = read_head(head_folder, facts)
    module, lowering = build_head(head, torch.float32), LOWERINGS[request.param]
    table = llama.get_input_embeddings().weight.detach()
    graph = DraftGraph(module, table, head.target_ids, lowering)
    outputs = ["logits", "top_log_probs", "top_ids", "hidden_out"]
    inputs = _inputs(head, module, CAPACITY)
    draft = trace_unlowered(graph, inputs, outputs, lowering, "draft")
    return Traced(head, draft, _trace_fuse(module, lowering), request.param)


def session(model: ir.Model) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def run(graph: Any, feeds: Arrays) -> Arrays:
    names = [value.name for value in graph.get_outputs()]
    return dict(zip(names, graph.run(names, feeds), strict=True))


def random_call(rng: np.random.Generator, num_rows: list[int], past_len: list[int]) -> Arrays:
    """A call of B sequences; rows in use are ordinary, padding is the worst there may be."""
    batch, rows = len(num_rows), max(num_rows)
    features = rng.normal(size=(batch, rows, WIDTH)).astype(np.float32)
    ids = rng.integers(0, 64, (batch, rows))
    for sequence, used in enumerate(num_rows):
        features[sequence, used:], ids[sequence, used:] = np.nan, 1 << 40
    past = rng.normal(size=(2, batch, 2, CAPACITY, 8)).astype(np.float32)
    return {
        "features": features,
        "next_ids": ids,
        "num_rows": np.array(num_rows),
        "past_len": np.array(past_len),
        "past_k.0": past[0],
        "past_v.0": past[1],
    }


def one_of(call: Arrays, sequence: int) -> Arrays:
    """The call of one sequence alone, without padding."""
    own = {name: value[sequence : sequence + 1] for name, value in call.items()}
    used = int(own["num_rows"][0])
    return {**own, "features": own["features"][:, :used], "next_ids": own["next_ids"][:, :used]}


@pytest.mark.parametrize("sizes", TREES)
def test_the_graph_grows_the_builders_tree(
    traced: Traced, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node for node, over the ids and log q that the graph itself found at every depth."""
    seen: list[tuple[ir.Value, ir.Value]] = []

    class Recorded(TreeGrowth):
        def add(self, top_ids: ir.Value, top_log_probs: ir.Value) -> None:
            seen.append((top_ids, top_log_probs))
            super().add(top_ids, top_log_probs)

    monkeypatch.setattr(growth_module, "TreeGrowth", Recorded)
    plan = TreePlan(*sizes)
    model = traced.growth(plan)
    for depth, (ids, log_q) in enumerate(seen):
        for value, name, dtype in ((ids, "ids", "INT64"), (log_q, "log_q", "FLOAT")):
            value.name, value.type = f"{name}.{depth}", ir.TensorType(ir.DataType[dtype])
            value.shape = ir.Shape(["B", "F", plan.draft_top_k])
            model.graph.outputs.append(value)
    graph, rng = session(model), np.random.default_rng(0)
    for _ in range(20):
        call = random_call(rng, rng.integers(1, 6, 2).tolist(), rng.integers(0, 40, 2).tolist())
        out = run(graph, call)
        for sequence in range(2):
            own = {name: value[sequence] for name, value in out.items()}
            _check_tree(own, plan, int(call["next_ids"][sequence, call["num_rows"][sequence] - 1]))
            root = call["past_len"][sequence] + call["num_rows"][sequence]
            assert own["positions"][0] == root


def _check_tree(out: Arrays, plan: TreePlan, root: int) -> None:
    tree = DynamicTree(root, plan.draft_top_k, plan.draft_depth, plan.num_draft_tokens)
    tree.add_root_candidates(out["ids.0"][0], out["log_q.0"][0])
    for depth in range(1, plan.draft_depth):
        count = 0 if tree.frontier is None else len(tree.frontier.tokens)
        tree.add(out[f"ids.{depth}"][:count], out[f"log_q.{depth}"][:count])
    expected = tree.finish()
    count = expected.num_nodes
    assert out["num_nodes"] == count
    assert out["tokens"][:count].tolist() == expected.tokens.tolist()
    assert out["parents"][:count].tolist() == expected.parents.tolist()
    assert (out["positions"] - out["positions"][0])[:count].tolist() == expected.depths.tolist()
    assert np.array_equal(out["tree_mask"][:count, :count], expected.ancestor_mask())


def test_sequences_of_a_batch_do_not_touch_each_other(traced: Traced) -> None:
    """Other lengths, other numbers of rows, padding of NaN and of ids that are no tokens."""
    graph, rng = session(traced.growth(TreePlan(3, 3, 6))), np.random.default_rng(1)
    for num_rows, past_len in (([1, 5], [30, 0]), ([4, 2], [0, 17]), ([3, 3], [9, 9])):
        call = random_call(rng, num_rows, past_len)
        both = run(graph, call)
        for sequence in range(2):
            alone = run(graph, one_of(call, sequence))
            for name in ("tokens", "parents", "positions", "tree_mask", "num_nodes"):
                assert np.array_equal(both[name][sequence], alone[name][0]), name
            used = past_len[sequence] + num_rows[sequence]
            for name in ("present_k.0", "present_v.0"):
                ours, theirs = both[name][sequence, :, :used], alone[name][0, :, :used]
                assert np.abs(ours - theirs).max() < 1e-5
                before = call[name.replace("present", "past")][sequence]
                assert np.array_equal(
                    ours[:, : past_len[sequence]], before[:, : used - num_rows[sequence]]
                )


def test_only_the_extension_rows_enter_the_cache(traced: Traced) -> None:
    graph, rng = session(traced.growth(TreePlan(3, 3, 6))), np.random.default_rng(2)
    call = random_call(rng, [3], [20])
    out = run(graph, call)
    for kind in "kv":
        past, present = call[f"past_{kind}.0"], out[f"present_{kind}.0"]
        changed = np.flatnonzero((past != present).any((0, 1, 3)))
        assert changed.tolist() == [20, 21, 22]


def test_a_head_without_numbers_grows_the_root_alone(traced: Traced) -> None:
    graph, rng = session(traced.growth(TreePlan(3, 3, 6))), np.random.default_rng(3)
    call = random_call(rng, [2], [5])
    call["features"][:] = np.nan
    out = run(graph, call)
    assert out["num_nodes"].tolist() == [1]
    assert out["tokens"][0].tolist() == [call["next_ids"][0, 1], *[0] * 6]
    assert out["tree_mask"][0].tolist() == np.eye(7, dtype=bool).tolist()


def test_all_depths_read_one_set_of_int8_weights(traced: Traced) -> None:
    model = traced.growth(TreePlan(3, 3, 6))
    whole = session(model)
    count = quantize_int8(model)
    stored = [name for name in model.graph.initializers if name.endswith(".int8")]
    dequantized = Counter(
        str(node.inputs[0].name)
        for node in model.graph
        if node.op_type == "DequantizeLinear" and node.inputs[0] is not None
    )
    assert sorted(dequantized) == sorted(stored)
    assert sum(dequantized.values()) == count and max(dequantized.values()) == 3
    rng = np.random.default_rng(4)
    quantized = session(model)
    call = random_call(rng, [2], [5])
    ours, theirs = run(quantized, call)["present_k.0"], run(whole, call)["present_k.0"]
    assert 0 < np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def test_the_self_check_compares_both_ways_to_grow(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    text: Any = SimpleNamespace(
        tokens=rng.integers(0, 64, 40), features=rng.normal(size=(40, WIDTH)).astype(np.float32)
    )
    assert grown_tree_agreement(bundle, "eagle3", text) == 1.0
    grow = GrowthEngine.grow

    def flat(self: GrowthEngine, *call: Any) -> Tree:
        """The right tokens, all of them under the root."""
        tree = grow(self, *call)
        return Tree(tree.tokens, np.minimum(tree.parents, 0))

    monkeypatch.setattr(GrowthEngine, "grow", flat)
    with pytest.raises(SelfCheckFailed, match="draft_tree disagrees"):
        grown_tree_agreement(bundle, "eagle3", text)
