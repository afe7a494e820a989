"""The tree grown by a graph's nodes equals the numpy builder's, node for node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from eagle3.export.draft_graphs.expand_rerank import (
    Best,
    TreeGrowth,
    best_by_rank,
    best_by_top_k,
    ordered_by_id,
)
from eagle3.export.graphs.graph_builder import GraphBuilder
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.trees.dynamic import DynamicTree
from eagle3.runtime.trees.tree import Tree

BATCH = 10
ROOT_POSITION = 100
Rows = tuple[NDArray[np.int64], NDArray[np.float32]]
BOTH = pytest.mark.parametrize("best", [best_by_top_k, best_by_rank])


def session(model: ir.Model) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def growth_session(tree: TreePlan, best: Best, *, unique: bool = False) -> Any:
    """The growth alone: ids and log q of every depth go in, the tree and all frontiers come out."""
    add = GraphBuilder("growth", {"": 24})
    int64, float32 = ir.DataType.INT64, ir.DataType.FLOAT
    growth = TreeGrowth(add, add.input("root", int64, "B", 1), tree, best, unique=unique)
    top_k = tree.draft_top_k
    for depth in range(tree.draft_depth):
        if depth:
            frontier = growth.next_frontier()
            for name in ("tokens", "parent_slots"):
                add.output(getattr(frontier, name), f"{name}.{depth}", int64, "B", top_k)
            add.output(frontier.values, f"values.{depth}", float32, "B", top_k)
        shape = ("B", top_k if depth else 1, top_k)
        ids = add.input(f"ids.{depth}", int64, *shape)
        growth.add(ids, add.input(f"log_q.{depth}", float32, *shape))
    grown = growth.finish(add.input("root_position", int64, "B", 1))
    for name, value in vars(grown).items():
        dtype = ir.DataType.BOOL if name == "tree_mask" else int64
        rank = {"tree_mask": 3, "num_nodes": 1}.get(name, 2)
        add.output(value, name, dtype, *["B", "M", "M"][:rank])
    return session(add.model())


def sizes(rng: np.random.Generator) -> TreePlan:
    """K 1..10, depth 1..8, nodes 1..60, as they are in use."""
    tree = TreePlan(*(int(rng.integers(1, high + 1)) for high in (10, 8, 60)))
    return TreePlan(tree.top_k_in_use, tree.depth_in_use, tree.num_draft_tokens)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Rows:
    """ids and log q [B,F,K]: ordinary, or with exact ties, near ties, ones, NaN and infinities."""
    ids = rng.integers(0, 12 if rng.random() < 0.3 else 30_000, shape)
    log_q = np.log(rng.random(shape)).astype(np.float32)
    kind = rng.integers(0, 6)
    if kind == 1:
        log_q = np.round(log_q)  # many exact ties, probability 1 among them
    elif kind == 2:
        log_q = np.nextafter(np.round(log_q * 4) / 4, rng.choice([-9, 9], shape), dtype=np.float32)
    elif kind == 3:
        log_q[rng.random(shape) < 0.3] = rng.choice([np.nan, np.inf, -np.inf])
    elif kind == 4:
        log_q = log_q + 1e-6  # a log-softmax may round above 0
    elif kind == 5:
        log_q[rng.random(shape) < 0.9] = np.nan  # trees that run out of nodes
    return ids, log_q.astype(np.float32)


def reference(plan: TreePlan, rows: list[Rows], root: int) -> tuple[Tree, list[Any]]:
    """DynamicTree over rows of one sequence, and its frontiers, which have F <= K nodes."""
    tree = DynamicTree(root, plan.draft_top_k, plan.draft_depth, plan.num_draft_tokens)
    tree.add_root_candidates(rows[0][0][0], rows[0][1][0])
    frontiers = []
    for ids, log_q in rows[1:]:
        if (frontier := tree.frontier) is None:
            break
        frontiers.append(frontier)
        tree.add(ids[: len(frontier.tokens)], log_q[: len(frontier.tokens)])
    return tree.finish(), frontiers


def check_equal(grown: dict[str, NDArray[Any]], expected: Tree, root_position: int) -> None:
    """One sequence of the graph's outputs against a tree; absent nodes are harmless padding."""
    count, num_nodes = int(grown["num_nodes"]), len(grown["tokens"])
    assert count == expected.num_nodes
    assert grown["tokens"].tolist() == expected.tokens.tolist() + [0] * (num_nodes - count)
    assert grown["parents"].tolist() == expected.parents.tolist() + [0] * (num_nodes - count)
    depths = [*expected.depths.tolist(), *[0] * (num_nodes - count)]
    assert (grown["positions"] - root_position).tolist() == depths
    mask = np.eye(num_nodes, dtype=np.bool_)
    mask[:count, :count] = expected.ancestor_mask()
    assert np.array_equal(grown["tree_mask"], mask)


def check_frontier(grown: dict[str, NDArray[Any]], depth: int, expected: Any) -> None:
    """What the draft runs at a depth is what the builder runs; absent nodes come last."""
    count = len(expected.tokens)
    for name in ("tokens", "parent_slots", "values"):
        ours = grown[f"{name}.{depth}"]
        assert np.array_equal(ours[:count], getattr(expected, name)), name
    assert grown[f"tokens.{depth}"][count:].tolist() == [0] * (len(ours) - count)
    assert np.isneginf(grown[f"values.{depth}"][count:]).all()


@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_the_tree_is_the_builders_node_for_node(best: Best, seed: int) -> None:
    """2 x 50 sizes, 10 sequences each, by either way to rank: 1,000 states."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        plan = sizes(rng)
        top_k = plan.draft_top_k
        rows = [
            random_rows(rng, (BATCH, top_k if depth else 1, top_k))
            for depth in range(plan.draft_depth)
        ]
        root, position = rng.integers(0, 30_000, (BATCH, 1)), np.arange(BATCH) + ROOT_POSITION
        feeds = {"root": root, "root_position": position[:, None]}
        for depth, (ids, log_q) in enumerate(rows):
            feeds |= {f"ids.{depth}": ids, f"log_q.{depth}": log_q}
        graph = growth_session(plan, best)
        names = [value.name for value in graph.get_outputs()]
        outputs = dict(zip(names, graph.run(names, feeds), strict=True))
        for i in range(BATCH):
            own = [(ids[i], log_q[i]) for ids, log_q in rows]
            expected, frontiers = reference(plan, own, int(root[i, 0]))
            grown = {name: value[i] for name, value in outputs.items()}
            check_equal(grown, expected, int(position[i]))
            for depth, frontier in enumerate(frontiers, start=1):
                check_frontier(grown, depth, frontier)


@BOTH
def test_a_parent_outranks_its_certain_child(best: Best) -> None:
    """Probability 1 at every depth: all values tie, and the shallower node is kept."""
    graph = growth_session(TreePlan(2, 3, 3), best, unique=True)
    certain = np.array([[[0.0, -9.0]]], np.float32)
    feeds = {"root": np.array([[5]]), "root_position": np.array([[0]])}
    for depth in range(3):
        width = 2 if depth else 1
        feeds[f"ids.{depth}"] = np.tile(np.array([1, 2]), (1, width, 1))
        feeds[f"log_q.{depth}"] = np.tile(certain, (1, width, 1))
    tokens, parents = graph.run(["tokens", "parents"], feeds)
    assert tokens.tolist() == [[5, 1, 1, 1]]
    assert parents.tolist() == [[-1, 0, 1, 2]]


def test_equal_log_probs_are_ordered_by_id() -> None:
    """Whatever order a TopK gives them in; NaN does no harm to other rows."""
    add = GraphBuilder("order", {"": 24})
    ids = add.input("ids", ir.DataType.INT64, 1, "F", 4)
    values = add.input("values", ir.DataType.FLOAT, 1, "F", 4)
    add.output(ordered_by_id(add, ids, values, 4), "ordered", ir.DataType.INT64, 1, "F", 4)
    log_q = [[-1.0, -1.0, -1.0, -2.0], [-0.5, -1.0, -1.0, -9.0], [np.nan] * 4]
    given = [[9, 3, 5, 1], [8, 7, 6, 0], [1, 2, 3, 4]]
    feeds = {"ids": np.array([given]), "values": np.array([log_q], np.float32)}
    (ordered,) = session(add.model()).run(["ordered"], feeds)
    assert ordered[0, :2].tolist() == [[3, 5, 9, 1], [8, 6, 7, 0]]
