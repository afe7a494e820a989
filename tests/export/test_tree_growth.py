"""The tree grown by tensors equals the numpy builder's, node for node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eagle3.export.tree_growth import TreeGrowth, best_by_rank, ordered_by_id
from eagle3.plans.plan import TreePlan
from eagle3.runtime.tree import DynamicTree, Tree

BATCH = 8
ROOT_POSITION = 100


def sizes(rng: np.random.Generator) -> TreePlan:
    """K 1..10, depth 1..8, nodes 1..60, as they are in use."""
    tree = TreePlan(*(int(rng.integers(1, high + 1)) for high in (10, 8, 60)))
    return TreePlan(tree.top_k_in_use, tree.depth_in_use, tree.num_draft_tokens)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Any, Any]:
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


def reference(plan: TreePlan, rows: list[tuple[Any, Any]], root: int) -> Tree:
    """DynamicTree over rows of one sequence; it has only the first F rows of a depth."""
    tree = DynamicTree(root, plan.draft_top_k, plan.draft_depth, plan.num_draft_tokens)
    tree.add_root_candidates(rows[0][0][0], rows[0][1][0])
    for ids, log_q in rows[1:]:
        if (frontier := tree.frontier) is None:
            break
        tree.add(ids[: len(frontier.tokens)], log_q[: len(frontier.tokens)])
    return tree.finish()


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


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_is_the_builders_node_for_node(seed: int) -> None:
    """5 x 25 trees of random sizes, 8 sequences each: 1,000 states."""
    rng = np.random.default_rng(seed)
    for _ in range(25):
        plan = sizes(rng)
        top_k = plan.draft_top_k
        root = rng.integers(0, 30_000, BATCH)
        growth = TreeGrowth(torch.from_numpy(root), plan, best_by_rank, unique=False)
        rows = [random_rows(rng, (BATCH, 1, top_k))]
        growth.add(*map(torch.from_numpy, rows[0]))
        for _ in range(1, plan.draft_depth):
            growth.next_frontier()
            rows.append(random_rows(rng, (BATCH, top_k, top_k)))
            growth.add(*map(torch.from_numpy, rows[-1]))
        position = torch.arange(BATCH) + ROOT_POSITION
        grown = {name: value.numpy() for name, value in vars(growth.finish(position)).items()}
        for i in range(BATCH):
            expected = reference(plan, [(ids[i], log_q[i]) for ids, log_q in rows], int(root[i]))
            check_equal({k: v[i] for k, v in grown.items()}, expected, ROOT_POSITION + i)


def test_a_frontier_is_the_builders() -> None:
    """Tokens, parents' slots and values of what the draft is to run; absent nodes come last."""
    rng = np.random.default_rng(0)
    plan = TreePlan(4, 3, 9)
    for _ in range(50):
        builder = DynamicTree(7, 4, 3, 9)
        growth = TreeGrowth(torch.tensor([7]), plan, best_by_rank, unique=False)
        ids, log_q = random_rows(rng, (1, 1, 4))
        builder.add_root_candidates(ids[0, 0], log_q[0, 0])
        growth.add(torch.from_numpy(ids), torch.from_numpy(log_q))
        for depth in (1, 2):
            expected, found = builder.frontier, growth.next_frontier()
            count = 0 if expected is None else len(expected.tokens)
            assert found.present[0].tolist() == [True] * count + [False] * (4 - count)
            if expected is None or depth == 2:
                break
            for name in ("tokens", "parent_slots", "values"):
                ours = getattr(found, name)[0, :count].numpy()
                assert np.array_equal(ours, getattr(expected, name)), name
            ids, log_q = random_rows(rng, (1, 4, 4))
            builder.add(ids[0, :count], log_q[0, :count])
            growth.add(torch.from_numpy(ids), torch.from_numpy(log_q))


def test_a_parent_outranks_its_certain_child() -> None:
    """Probability 1 at every depth: all values tie, and the shallower node is kept."""
    plan = TreePlan(2, 3, 3)
    growth = TreeGrowth(torch.tensor([5]), plan, best_by_rank, unique=True)
    one = torch.tensor([[[0.0, -9.0]]])
    growth.add(torch.tensor([[[1, 2]]]), one)
    for _ in range(2):
        growth.next_frontier()
        growth.add(torch.tensor([[[1, 2], [1, 2]]]), one.expand(1, 2, 2))
    grown = growth.finish(torch.tensor([0]))
    assert grown.tokens.tolist() == [[5, 1, 1, 1]]
    assert grown.parents.tolist() == [[-1, 0, 1, 2]]


def test_equal_log_probs_are_ordered_by_id() -> None:
    """Whatever order a TopK gives them in; NaN does no harm to other rows."""
    nan = float("nan")
    values = torch.tensor([[-1.0, -1.0, -1.0, -2.0], [-0.5, -1.0, -1.0, -9.0], [nan] * 4])
    ids = torch.tensor([[9, 3, 5, 1], [8, 7, 6, 0], [1, 2, 3, 4]])
    assert ordered_by_id(ids, values)[:2].tolist() == [[3, 5, 9, 1], [8, 6, 7, 0]]
