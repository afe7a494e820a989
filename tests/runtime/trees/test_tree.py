"""Trees, and the EAGLE-2 builder against a slow reference in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.runtime.trees.dynamic import DynamicTree
from eagle3.runtime.trees.tree import Tree

ROOT = 99


def tree_of(parents, tokens=None):
    tokens = range(100, 100 + len(parents)) if tokens is None else tokens
    return Tree(np.array(list(tokens), np.int64), np.array(parents, np.int32))


# ---- Tree


def test_root_only():
    tree = Tree.root_only(7)
    tree.validate()
    assert (tree.num_nodes, tree.num_draft_tokens) == (1, 0)
    assert tree.tokens.tolist() == [7] and tree.children(0) == () and tree.path(0) == ()
    assert tree.depths.tolist() == [0] and tree.ancestor_mask().tolist() == [[True]]


def test_chain():
    tree = Tree.chain(7, [1, 2, 1])
    tree.validate()
    assert tree.parents.tolist() == [-1, 0, 1, 2] and tree.depths.tolist() == [0, 1, 2, 3]
    assert tree.path(3) == (1, 2, 3) and tree.path_tokens(3) == [1, 2, 1]
    assert (tree.ancestor_mask() == np.tri(4, dtype=bool)).all()
    assert Tree.chain(7, []).num_nodes == 1


def test_children_and_tokens():
    tree = tree_of([-1, 0, 0, 2, 1, 2], [ROOT, 4, 5, 6, 6, 7])
    tree.validate()
    assert tree.children(0) == (1, 2) and tree.children(2) == (3, 5) and tree.children(5) == ()
    assert tree.child_with_token(2, 7) == 5 and tree.child_with_token(1, 7) is None
    assert tree.path(5) == (2, 5) and tree.depths.dtype == np.int32


random_parents = st.lists(st.integers(0, 10**6), max_size=40).map(
    lambda picks: [-1] + [pick % (node + 1) for node, pick in enumerate(picks)]
)


@given(random_parents)
def test_mask_is_ancestor_or_self(parents):
    tree = tree_of(parents)
    tree.validate()
    mask = tree.ancestor_mask()
    for node in range(len(parents)):
        lineage, up = set(), node
        while up >= 0:
            lineage.add(up)
            up = parents[up]
        assert set(np.flatnonzero(mask[node]).tolist()) == lineage
        assert tree.depths[node] == len(lineage) - 1
        assert set(tree.path(node)) == lineage - {0}


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [
        ([0], [1]),
        ([-1, 2, 0], [1, 2, 3]),
        ([-1, 1], [1, 2]),
        ([-1, -1], [1, 2]),
        ([-1, 0, 0], [1, 2, 2]),
    ],
)
def test_validate_can_fail(parents, tokens):
    with pytest.raises(AssertionError):
        tree_of(parents, tokens).validate()


# ---- DynamicTree against a reference


class Draft:
    """A made-up draft: top tokens and log q of a node, a fixed function of its path."""

    def __init__(self, seed, num_columns, vocab_size, style):
        self.seed, self.num_columns, self.vocab_size = seed, num_columns, vocab_size
        self.style = style

    def top(self, path):
        rng = np.random.default_rng([self.seed, *path])
        size = self.num_columns
        if self.style == "duplicates":
            ids = rng.integers(0, self.vocab_size, size)
        else:
            ids = rng.permutation(self.vocab_size)[:size]
        log_q = np.log(rng.dirichlet(np.full(size, 0.3)) + 1e-30)
        log_q = np.sort(log_q.astype(np.float32))[::-1].copy()
        if self.style == "near ties":  # as fp16 scores are: a child of p > 0.999 ties its parent
            log_q = np.exp(log_q).astype(np.float16).astype(np.float32)
            with np.errstate(divide="ignore"):
                log_q = np.log(log_q).astype(np.float16).astype(np.float32)
        elif self.style == "all tied":
            log_q = rng.choice([0.0, -1.0], size).astype(np.float32)
            log_q = np.sort(log_q)[::-1].copy()
        elif self.style == "above zero":
            log_q = log_q + np.float32(0.5)
        elif self.style == "broken":
            odd = [np.nan, np.inf, -np.inf, np.finfo(np.float32).min]
            broken = rng.random(size) < 0.5
            log_q[broken] = rng.choice(odd, size).astype(np.float32)[broken]
        return ids, log_q


STYLES = ["plain", "duplicates", "near ties", "all tied", "above zero", "broken"]


def reference(draft, top_k, depth, budget):
    """EAGLE-2 as docs/method.md tells it: the paths of tokens of the kept nodes, in order."""
    candidates = []  # (value, depth, index, path)
    frontier = [(np.float32(0.0), ())]
    for level in range(1, depth + 1):
        new = []
        for value, path in frontier:
            ids, log_q = draft.top(path)
            taken = set()
            for token, score in list(zip(ids, log_q, strict=True))[:top_k]:
                with np.errstate(over="ignore"):
                    total = np.float32(value + score)
                if not np.isfinite(total) or token in taken:
                    continue
                taken.add(token)
                new.append((min(total, value), path + (int(token),)))
        indexed = [(v, level, i, path) for i, (v, path) in enumerate(new)]
        candidates += indexed
        frontier = [(c[0], c[3]) for c in sorted(indexed, key=lambda c: (-c[0], c[2]))[:top_k]]
    best = sorted(candidates, key=lambda c: (-c[0], c[1], c[2]))[:budget]
    return [c[3] for c in best]


def grow(draft, top_k, depth, budget):
    """Drive DynamicTree as a drafter does; checks every frontier on the way."""
    builder = DynamicTree(ROOT, top_k, depth, budget)
    builder.add_root_candidates(*draft.top(()))
    paths, row_paths, calls = [()], [], 0
    while (frontier := builder.frontier) is not None:
        parents = frontier.parent_slots.tolist()
        paths = [
            paths[slot] + (token,)
            for slot, token in zip(parents, frontier.tokens.tolist(), strict=True)
        ]
        row_paths += paths
        assert 1 <= len(paths) <= top_k and len(set(paths)) == len(paths)
        assert frontier.depth == len(paths[0]) and frontier.values.dtype == np.float32
        assert frontier.row_mask.shape == (len(paths), len(row_paths))
        for slot, path in enumerate(paths):
            wanted = [path[: len(row)] == row for row in row_paths]
            assert frontier.row_mask[slot].tolist() == wanted
        tops = [draft.top(path) for path in paths]
        builder.add(np.stack([top[0] for top in tops]), np.stack([top[1] for top in tops]))
        calls += 1
    assert calls <= depth - 1
    return builder.finish()


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    style=st.sampled_from(STYLES),
    top_k=st.integers(1, 6),
    num_columns=st.integers(1, 8),
    depth=st.integers(1, 5),
    budget=st.integers(0, 80),
)
def test_dynamic_tree_equals_the_reference(seed, style, top_k, num_columns, depth, budget):
    draft = Draft(seed, num_columns, 8, style)
    tree = grow(draft, top_k, depth, budget)
    tree.validate()
    assert tree.tokens[0] == ROOT and tree.num_draft_tokens <= budget
    paths = [tuple(tree.path_tokens(node)) for node in range(1, tree.num_nodes)]
    assert paths == reference(draft, top_k, depth, budget)
    assert int(tree.depths.max()) <= depth
    for node in range(tree.num_nodes):
        assert list(tree.children(node)) == sorted(tree.children(node))


def test_a_sure_child_never_displaces_its_parent():
    """q = 1 all the way: every value ties, so the shallower node must win."""
    for budget in range(1, 5):
        builder = DynamicTree(ROOT, 2, 4, budget)
        log_q = np.array([0.0, -5.0], np.float32)
        builder.add_root_candidates(np.array([1, 2]), log_q)
        while builder.frontier is not None:
            num = builder.frontier.tokens.size
            builder.add(np.tile([1, 2], (num, 1)), np.tile(log_q, (num, 1)))
        tree = builder.finish()
        assert tree.parents.tolist() == [-1, *range(budget)]
        assert tree.tokens.tolist() == [ROOT] + [1] * budget


def test_top_1_is_a_chain():
    tree = grow(Draft(3, 5, 8, "plain"), top_k=1, depth=4, budget=9)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_depth_1_needs_no_draft_call():
    builder = DynamicTree(ROOT, 3, 1, 10)
    builder.add_root_candidates(np.array([4, 5, 6]), np.array([-1, -2, -3], np.float32))
    assert builder.frontier is None
    assert builder.finish().parents.tolist() == [-1, 0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_draft_of_no_numbers_gives_the_root_alone(bad):
    builder = DynamicTree(ROOT, 2, 3, 10)
    builder.add_root_candidates(np.array([1, 2]), np.full(2, bad, np.float32))
    assert builder.frontier is None
    assert builder.finish().tokens.tolist() == [ROOT]


def test_a_broken_step_ends_the_tree_there():
    builder = DynamicTree(ROOT, 2, 3, 10)
    builder.add_root_candidates(np.array([1, 2]), np.array([-1, -2], np.float32))
    builder.add(np.array([[3, 4], [5, 6]]), np.full((2, 2), np.nan, np.float32))
    assert builder.frontier is None
    assert builder.finish().tokens.tolist() == [ROOT, 1, 2]


def test_finish_before_the_last_depth():
    builder = DynamicTree(ROOT, 2, 5, 10)
    assert builder.finish().tokens.tolist() == [ROOT]
    builder.add_root_candidates(np.array([1, 2]), np.array([-1, -2], np.float32))
    assert builder.finish().tokens.tolist() == [ROOT, 1, 2]


def test_the_frontier_is_not_overwritten_by_the_next_step():
    builder = DynamicTree(ROOT, 2, 3, 10)
    builder.add_root_candidates(np.array([1, 2]), np.array([-1, -2], np.float32))
    first = builder.frontier
    builder.add(np.array([[3, 4], [5, 6]]), np.full((2, 2), -1, np.float32))
    assert first.tokens.tolist() == [1, 2] and first.values.tolist() == [-1, -2]
    assert builder.frontier.parent_slots.tolist() == [0, 0]


def test_caller_mistakes_are_caught():
    builder = DynamicTree(ROOT, 2, 3, 10)
    two = np.array([1, 2]), np.array([-1, -2], np.float32)
    with pytest.raises(AssertionError):
        builder.add(two[0][None], two[1][None])
    builder.add_root_candidates(*two)
    with pytest.raises(AssertionError):
        builder.add_root_candidates(*two)
    with pytest.raises(AssertionError):
        builder.add(two[0][None], two[1][None])
