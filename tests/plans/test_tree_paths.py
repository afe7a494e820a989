"""Tests of static trees: valid paths, trees cut to a smaller budget, and reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.plans.plan import Plan
from eagle3.plans.tree_paths import STATIC_TREES, TreePaths, read_paths
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import PlanError

EAGLE1 = STATIC_TREES["eagle1"]
SMALL = TreePaths(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))


@st.composite
def tree_paths(draw: st.DrawFn, max_nodes: int = 24) -> TreePaths:
    """Draw any tree: each new node is the next child of the root or of an earlier node."""
    paths: list[tuple[int, ...]] = []
    num_children: dict[tuple[int, ...], int] = {(): 0}
    for _ in range(draw(st.integers(1, max_nodes))):
        parent = draw(st.sampled_from([(), *paths[-6:]]))
        paths.append((*parent, num_children[parent]))
        num_children[parent] += 1
        num_children[paths[-1]] = 0
    return TreePaths(tuple(paths))


def test_the_reference_tree_is_the_papers() -> None:
    assert [sum(len(path) == depth for path in EAGLE1.paths) for depth in range(1, 7)] == [
        *(4, 8, 8, 3, 2),
        0,
    ]
    assert (EAGLE1.num_nodes, EAGLE1.top_k, EAGLE1.depth, EAGLE1.name) == (25, 4, 5, "eagle1")
    listed = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002"
    listed += " 00000 00001"
    assert ["".join(map(str, path)) for path in EAGLE1.paths] == listed.split()
    assert EAGLE1.num_draft_rows == 10  # 0 1 2 3 00 01 02 10 000 0000 have children


@given(tree_paths(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 30))
def test_a_cut_tree_is_a_tree(paths: TreePaths, top_k: int, depth: int, num_nodes: int) -> None:
    cut = paths.cut(top_k, depth, num_nodes)  # the constructor checks parents and siblings
    assert set(cut.paths) <= set(paths.paths)
    assert cut.top_k <= top_k and cut.depth <= depth and cut.num_nodes <= num_nodes
    fitting = [path for path in paths.paths if len(path) <= depth and max(path) < top_k]
    assert list(cut.paths) == fitting[:num_nodes]
    assert paths.cut(paths.top_k, paths.depth, paths.num_nodes) is paths
    plan = TreePlan(top_k, depth, num_nodes, paths)
    assert (plan.top_k_in_use, plan.depth_in_use) == (cut.top_k, cut.depth)
    assert plan.num_draft_rows == cut.num_draft_rows < cut.num_nodes


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([], r"static tree must be a list of one or more paths, .*, got \[\]"),
        ("eagle1", "static tree must be a list .*, got 'eagle1'"),
        ({"0": 1}, "must be a list of one or more paths"),
        (7, "static tree must be a list .*, got 7"),
        ([0], "path of the static tree must be .* one or more child ranks .*, got 0"),
        ([[0], []], r"path of the static tree must be .* one or more .*, got \[\]"),
        ([[0], [-1]], r"path of the static tree must be .*integers from 0.*, got \[-1\]"),
        ([[0], [True]], r"path of .*, got \[True\]"),
        ([[0.0]], r"path of .*, got \[0.0\]"),
        ([["0"]], r"path of .*, got \['0'\]"),
        ([["0"], 5], r"path of .*, got \['0'\]"),
        ([[0], [1], [0]], r"path \[0\] occurs twice"),
        ([[0], [1, 0]], r"path \[1, 0\] of the static tree does not follow its parent \[1\]"),
        ([[0, 0], [0]], r"path \[0, 0\] of the static tree does not follow its parent \[0\]"),
        ([[0], [2]], r"path \[2\] of the static tree does not follow its better sibling \[1\]"),
        ([[0], [0, 1], [0, 0]], r"path \[0, 1\] .* does not follow its better sibling \[0, 0\]"),
        ([[1], [0]], r"path \[1\] of the static tree does not follow its better sibling \[0\]"),
    ],
)
def test_what_is_no_tree_is_refused(paths: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        TreePaths(paths)
    with pytest.raises(PlanError):
        Plan().override(tree=paths if isinstance(paths, list) else [paths])


def test_a_tree_is_read_by_name_or_from_a_file(tmp_path: Path) -> None:
    assert read_paths("eagle1") is EAGLE1
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([list(path) for path in SMALL.paths]))
    found = read_paths(file)
    assert found == SMALL and found.name is None
    assert read_paths(str(file)) == TreePaths([[np.int64(0)], *map(list, SMALL.paths[1:])])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "not found: use one of dynamic, eagle1"),
        (b"[[0]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"paths": [[0]]}', "tree.json: a static tree must be"),
        (b"[[0], [0, 1]]", r"tree.json: path \[0, 1\] .* does not follow its better sibling"),
    ],
)
def test_a_file_that_holds_no_tree_is_named(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "tree.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PlanError, match=says):
        read_paths(file)
    with pytest.raises(PlanError, match="cannot be read"):
        read_paths(tmp_path)


def test_a_request_names_its_tree() -> None:
    plan = Plan(tree=TreePlan(4, 3, 8))
    whole = TreePlan(4, 5, 25, EAGLE1)
    assert plan.override(tree="eagle1") == TreePlan.of_paths(EAGLE1) == whole
    assert plan.override(tree=[[0], [0, 0]]).static == TreePaths(((0,), (0, 0)))
    assert plan.override(tree=TreePlan(1, 2, 2)) == TreePlan(1, 2, 2)
    assert plan.override(draft_depth=2, tree="eagle1") == TreePlan(4, 2, 25, EAGLE1)
    assert (whole.policy, plan.tree.policy) == ("static", "dynamic")
    static = Plan(tree=whole)
    assert static.override() == whole
    assert static.override(num_draft_tokens=6) == TreePlan(4, 5, 6, EAGLE1)
    assert static.override(tree="dynamic") == TreePlan(4, 5, 25)
    with pytest.raises(PlanError, match="tree 'medusa' is unknown: use one of dynamic, eagle1"):
        plan.override(tree="medusa")
    with pytest.raises(PlanError, match="num_draft_tokens is 25, .* max_draft_tokens is 16"):
        Plan(max_draft_tokens=16).override(tree="eagle1")
    assert Plan(max_draft_tokens=16).override(num_draft_tokens=16, tree="eagle1").depth_in_use == 3


def test_a_tree_beyond_all_limits_is_refused() -> None:
    with pytest.raises(PlanError, match="tree.draft_depth must be from 1 to 1024, got 1025"):
        Plan().override(tree=[[0] * depth for depth in range(1, 1026)])
    with pytest.raises(PlanError, match="tree.draft_top_k must be from 1 to 256, got 300"):
        Plan().override(tree=[[rank] for rank in range(300)])


def test_json_keeps_a_static_tree() -> None:
    plan = Plan(tree=TreePlan.of_paths(SMALL, num_draft_tokens=3))
    data = json.loads(json.dumps(plan.to_json()))
    assert data["tree"]["static"] == {"paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}
    assert Plan.from_json(data) == plan


@pytest.mark.parametrize(
    ("static", "says"),
    [
        ("eagle1", r"tree.static must be an object with .* \['paths'\], got 'eagle1'"),
        ({}, "tree.static must be an object .*, got {}"),
        ({"paths": [[0]], "name": "x"}, "must be an object with exactly"),
        ({"paths": [[1]]}, "does not follow its better sibling"),
    ],
)
def test_json_of_a_static_tree_is_strict(static: Any, says: str) -> None:
    data = Plan().to_json()
    data["tree"]["static"] = static
    with pytest.raises(PlanError, match=says):
        Plan.from_json(data)
    with pytest.raises(PlanError, match="must be TreePaths or None"):
        TreePlan(static=[[0]])  # type: ignore[arg-type]
