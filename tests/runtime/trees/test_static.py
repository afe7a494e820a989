"""The static builder against the paths it was given, and what holds for both builders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.plans.tree_paths import STATIC_TREES, TreePaths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.trees.builder import TreeBuilder, tree_builder
from eagle3.runtime.trees.static import StaticTree
from eagle3.runtime.trees.tree import Tree

ROOT = 99
STYLES = ["plain", "duplicates", "sure", "half precision", "broken", "dead"]
Path_ = tuple[int, ...]


def random_paths(rng: np.random.Generator, num_nodes: int) -> TreePaths:
    """Any static tree: each node is the next child of the root or of an earlier node."""
    paths: list[Path_] = []
    num_children: dict[Path_, int] = {(): 0}
    for _ in range(num_nodes):
        parent = [(), *paths][int(rng.integers(len(paths) + 1))]
        paths.append((*parent, num_children[parent]))
        num_children[parent] += 1
        num_children[paths[-1]] = 0
    return TreePaths(tuple(paths))


def top(seed: int, path: Path_, num_columns: int, style: str) -> tuple[Any, Any]:
    """What a made-up draft proposes behind `path`: ids [K] and log q float32 [K], best first."""
    rng = np.random.default_rng([seed, *path])
    ids = rng.permutation(12)[:num_columns]
    if style == "duplicates":
        ids = rng.integers(0, 4, num_columns)
    q = np.sort(rng.dirichlet(np.full(num_columns, 0.3)))[::-1] + 1e-30
    if style == "sure":  # a child of probability 1 ties with its parent
        q = np.array([1.0] + [1e-4] * (num_columns - 1))
    log_q = np.log(q).astype(np.float32)
    if style == "half precision":
        with np.errstate(divide="ignore"):
            log_q = np.log(q.astype(np.float16)).astype(np.float16).astype(np.float32)
    if style == "broken":
        odd = np.array([np.nan, np.inf, -np.inf], np.float32)
        log_q = np.where(rng.random(num_columns) < 0.4, rng.choice(odd, num_columns), log_q)
    if style == "dead" and rng.random() < 0.4:
        log_q = np.full(num_columns, np.nan, np.float32)
    return ids, log_q


def grow(builder: TreeBuilder, seed: int, num_columns: int, style: str) -> tuple[Tree, list[Path_]]:
    """The finished tree, and the paths of all rows that the draft ran for it."""
    builder.add_root_candidates(*top(seed, (), num_columns, style))
    paths: list[Path_] = [()]
    rows: list[Path_] = []
    while (frontier := builder.frontier) is not None:
        pairs = zip(frontier.parent_slots.tolist(), frontier.tokens.tolist(), strict=True)
        paths = [(*paths[slot], token) for slot, token in pairs]
        assert {len(path) for path in paths} == {frontier.depth}
        rows += paths
        for slot, path in enumerate(paths):
            assert frontier.row_mask[slot].tolist() == [path[: len(row)] == row for row in rows]
        tops = [top(seed, path, num_columns, style) for path in paths]
        builder.add(np.stack([t[0] for t in tops]), np.stack([t[1] for t in tops]))
    return builder.finish(), rows


def usable(seed: int, path: Path_, num_columns: int, style: str) -> list[int]:
    """The candidates of a node that may be proposed, best first."""
    ids, log_q = top(seed, path, num_columns, style)
    finite = [int(i) for i, value in zip(ids, log_q, strict=True) if np.isfinite(value)]
    return list(dict.fromkeys(finite))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 30),
    num_columns=st.integers(1, 6),
    style=st.sampled_from(STYLES),
)
def test_a_static_tree_is_the_paths_it_was_given(
    seed: int, num_nodes: int, num_columns: int, style: str
) -> None:
    paths = random_paths(np.random.default_rng(seed), num_nodes)
    tree, rows = grow(StaticTree(ROOT, paths), seed, num_columns, style)
    expected: dict[Path_, Path_] = {(): ()}  # path of ranks -> path of tokens
    for ranks in paths.paths:
        above = expected.get(ranks[:-1])
        found = [] if above is None else usable(seed, above, num_columns, style)
        if above is not None and ranks[-1] < len(found):
            expected[ranks] = (*above, found[ranks[-1]])
    nodes = [tuple(tree.path_tokens(node)) for node in range(tree.num_nodes)]
    assert nodes == list(expected.values()), "in the order of the paths"
    run = {tokens for ranks, tokens in expected.items() if ranks and (*ranks, 0) in paths.paths}
    assert len(rows) == len(set(rows)) and set(rows) == run, "only nodes with children are run"
    assert len(rows) <= paths.num_draft_rows


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    style=st.sampled_from(STYLES),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 40)),
    static=st.sampled_from([None, "eagle1", "random"]),
    num_columns=st.integers(1, 6),
)
def test_whatever_the_draft_says_it_is_a_tree_within_its_budget(
    seed: int, style: str, sizes: tuple[int, int, int], static: str | None, num_columns: int
) -> None:
    """K > 1 with few nodes, more nodes than candidates, near-ties, NaN: for both policies."""
    paths = random_paths(np.random.default_rng(seed), 20)
    plan = TreePlan(*sizes, static={"eagle1": STATIC_TREES["eagle1"], "random": paths}.get(static))
    tree, rows = grow(tree_builder(ROOT, plan, plan.top_k_in_use), seed, num_columns, style)
    tree.validate()  # parents before children, no duplicate siblings
    top_k, depth, num_nodes = sizes
    assert tree.tokens[0] == ROOT and tree.num_draft_tokens <= num_nodes
    assert max(len(tree.children(node)) for node in range(tree.num_nodes)) <= top_k
    assert tree.depths.max() <= depth
    assert len(rows) <= plan.num_draft_rows
    mask = tree.ancestor_mask()
    for node in range(tree.num_nodes):
        assert set(np.flatnonzero(mask[node])) == {0, *tree.path(node)}
        proposed = usable(seed, tuple(tree.path_tokens(node)), num_columns, style)
        tokens = [tree.token_list[child] for child in tree.children(node)]
        assert tokens == [t for t in proposed if t in tokens], "siblings stand best first"
        if plan.static is not None:
            assert tokens == proposed[: len(tokens)], "no better candidate is left out"
    again, _ = grow(tree_builder(ROOT, plan, plan.top_k_in_use), seed, num_columns, style)
    assert again.tokens.tolist() == tree.tokens.tolist(), "ties are broken the same way"


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 25), depth=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_a_smaller_budget_keeps_the_first_nodes(seed: int, budget: int, depth: int) -> None:
    whole = TreePlan.of_paths(STATIC_TREES["eagle1"])
    plan = replace(whole, draft_depth=depth, num_draft_tokens=budget)
    full, cut = (
        grow(tree_builder(ROOT, each, each.top_k_in_use), seed, 5, "plain")[0]
        for each in (whole, plan)
    )
    kept = [node for node in range(full.num_nodes) if full.depths[node] <= depth][: budget + 1]
    assert [cut.path_tokens(n) for n in range(cut.num_nodes)] == [full.path_tokens(n) for n in kept]


def test_one_node_needs_no_draft_call() -> None:
    builder = StaticTree(ROOT, TreePaths(((0,),)))
    builder.add_root_candidates(np.array([4, 5]), np.array([-1, -2], np.float32))
    assert builder.frontier is None and builder.finish().tokens.tolist() == [ROOT, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_draft_of_no_numbers_gives_the_root_alone(bad: float) -> None:
    builder = StaticTree(ROOT, STATIC_TREES["eagle1"])
    builder.add_root_candidates(np.arange(4), np.full(4, bad, np.float32))
    assert builder.frontier is None and builder.finish().tokens.tolist() == [ROOT]


def test_finish_before_the_last_depth() -> None:
    builder = StaticTree(ROOT, STATIC_TREES["eagle1"])
    assert builder.finish().tokens.tolist() == [ROOT]
    builder.add_root_candidates(np.arange(4), np.zeros(4, np.float32))
    assert builder.finish().tokens.tolist() == [ROOT, 0, 1, 2, 3]


def test_caller_mistakes_are_caught() -> None:
    builder = StaticTree(ROOT, STATIC_TREES["eagle1"])
    two = np.array([1, 2]), np.array([-1, -2], np.float32)
    with pytest.raises(AssertionError):
        builder.add(two[0][None], two[1][None])
    builder.add_root_candidates(*two)
    with pytest.raises(AssertionError):
        builder.add_root_candidates(*two)
    with pytest.raises(AssertionError):
        builder.add(two[0][None], two[1][None])  # two nodes have children
    assert builder.finish().tokens.tolist() == [ROOT, 1, 2]
