"""Losslessness of acceptance, on random tables p(x | prefix) and q(x | prefix).

Two ways, both through the real functions. *Exactly*: every outcome of every random comparison is
followed with its probability, so the law of whole sequences comes out to rounding, over the full
grid of rules, temperatures and warpers. *By sampling*: 100,000 sequences with the real generators
against that law, by chi-square over all sequences. Both are shown to reject broken rules.
"""

import itertools
from bisect import bisect

import numpy as np
import pytest
from scipy.stats import chisquare

from eagle3.runtime.acceptance import accept
from eagle3.runtime.acceptance.accept import Accepted, accept_by_token, accept_rejection
from eagle3.runtime.acceptance.sampling import (
    CoupledUniforms,
    TokenHistory,
    draft_probs,
    rejection_rng,
    sample_inverse_cdf,
    target_probs,
)
from eagle3.runtime.params import SamplingParams
from eagle3.runtime.trees.tree import Tree

LENGTH = 3
NUM_SAMPLES = 100_000
WARPERS = {"plain": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.8}}
RULES = ["candidates", "sampled chain", "sampled children", "coupled"]
ROOT = 0


class Tables:
    """p and q for every prefix of fewer than LENGTH tokens; a prefix of LENGTH has any p."""

    def __init__(self, vocab_size, params, seed=0):
        self.vocab_size, self.params = vocab_size, params
        rng = np.random.default_rng(seed)
        history = TokenHistory(vocab_size)
        self.p, self.q, self.q_sums = {}, {}, {}
        for length in range(LENGTH):
            for prefix in itertools.product(range(vocab_size), repeat=length):
                logits = (rng.standard_normal(vocab_size) * 1.5).astype(np.float32)
                guess = (logits + rng.standard_normal(vocab_size)).astype(np.float32)
                self.p[prefix] = target_probs(logits, history, (), params)
                self.q[prefix] = draft_probs(guess, params.temperature)
                self.q_sums[prefix] = np.cumsum(self.q[prefix], dtype=np.float64).tolist()
        self.after_the_end = np.full(vocab_size, 1 / vocab_size, np.float32)

    def p_of(self, prefix):
        return self.p.get(prefix, self.after_the_end)

    def law(self):
        """The distribution of all sequences, float64 [V] * LENGTH."""
        law = np.empty((self.vocab_size,) * LENGTH)
        for x, y in itertools.product(range(self.vocab_size), repeat=2):
            head = normalised(self.p[()])[x] * normalised(self.p[x,])[y]
            law[x, y] = head * normalised(self.p[x, y])
        return law


def normalised(float32s):
    """The float32 numbers as a float64 distribution: what they mean, to rounding of float64."""
    wide = float32s.astype(np.float64)
    return wide / wide.sum()


class Shapes:
    """Trees for a prefix, memoised, each with the p of its nodes (what the target would verify)."""

    def __init__(self, tables, softmax_candidates=False):
        self.tables, self.memo = tables, {}
        self.softmax_candidates = softmax_candidates

    def best(self, prefix, count):
        return np.argsort(-self.tables.q[prefix], kind="stable")[:count].tolist()

    def candidates(self, prefix):
        """The draft's top 3, the top 2 below each of them, and so on to the end of the text."""
        if prefix not in self.memo:
            levels = [[()]]
            for width in (3, 2, 1)[: LENGTH - len(prefix)]:
                above = levels[-1]
                levels.append([n + (x,) for n in above for x in self.best(prefix + n, width)])
            self.memo[prefix] = self.build(prefix, sum(levels, []), self.softmax_candidates)
        return self.memo[prefix]

    def sampled(self, prefix, nodes):
        """A tree from nodes (paths in the order drawn) whose children were drawn from q."""
        if (prefix, nodes) not in self.memo:
            self.memo[prefix, nodes] = self.build(prefix, [(), *nodes], True)
        return self.memo[prefix, nodes]

    def build(self, prefix, paths, with_q):
        index = {path: node for node, path in enumerate(paths)}
        parents = [-1] + [index[path[:-1]] for path in paths[1:]]
        q = {index[path[:-1]]: self.tables.q[prefix + path[:-1]] for path in paths[1:]}
        tree = Tree(
            np.array([ROOT] + [path[-1] for path in paths[1:]], np.int64),
            np.array(parents, np.int32),
            q if with_q else None,
        )
        tree.validate()
        return tree, [self.tables.p_of(prefix + path) for path in paths]


def new_tokens(tree, accepted):
    return tuple(tree.token_list[node] for node in accepted.path) + (accepted.token,)


# ---- by sampling


def draw_distinct(tables, prefix, count, uniform):
    """`count` tokens from q without replacement: drawing again is renormalising."""
    drawn = []
    while len(drawn) < count:
        token = bisect(tables.q_sums[prefix], uniform() * tables.q_sums[prefix][-1])
        if token not in drawn:
            drawn.append(token)
    return drawn


def draw_tree(rule, shapes, prefix, uniform):
    tables, room = shapes.tables, LENGTH - len(prefix)
    if rule in ("candidates", "coupled"):
        return shapes.candidates(prefix)
    if rule == "sampled chain":
        path = ()
        for _ in range(min(room, 2)):
            path += tuple(draw_distinct(tables, prefix + path, 1, uniform))
        return shapes.sampled(prefix, tuple(path[:n] for n in range(1, len(path) + 1)))
    first = draw_distinct(tables, prefix, 3, uniform)
    nodes = [(x,) for x in first]
    if room > 1:  # and below the first child two more
        nodes += [(first[0], x) for x in draw_distinct(tables, prefix + (first[0],), 2, uniform)]
    return shapes.sampled(prefix, tuple(nodes))


def sample_sequences(rule, shapes, num_samples):
    """Counts of decoded sequences, int64 [V] * LENGTH, and tokens per round."""
    uniform = itertools.chain.from_iterable(
        np.random.default_rng([1, chunk]).random(4096).tolist() for chunk in itertools.count()
    ).__next__
    rng = rejection_rng(5)
    counts = np.zeros((shapes.tables.vocab_size,) * LENGTH, np.int64)
    for sample in range(num_samples):
        prefix = ()
        uniforms = CoupledUniforms(sample) if rule == "coupled" else None
        while len(prefix) < LENGTH:
            tree, p = draw_tree(rule, shapes, prefix, uniform)
            if uniforms is None:
                accepted = accept_rejection(tree, p.__getitem__, rng)
            else:
                choose = coupled_choice(tree, p, uniforms, len(prefix))
                accepted = accept_by_token(tree, choose)
            prefix += new_tokens(tree, accepted)
        counts[prefix[:LENGTH]] += 1
    return counts


def coupled_choice(tree, p, uniforms, position):
    def choose(node):
        return sample_inverse_cdf(p[node], uniforms.uniform(position + len(tree.path(node))))

    return choose


def chi_square_p_value(counts, law):
    """Chi-square over all sequences, cells of small expected count pooled into one."""
    num_samples = counts.sum()
    assert counts[law == 0].sum() == 0, "a sequence of probability 0 was drawn"
    expected, counts = law.ravel() * num_samples, counts.ravel()
    large = expected >= 5
    pooled = lambda values: np.append(values[large], values[~large].sum())  # noqa: E731
    observed, wanted = pooled(counts), pooled(expected)
    if wanted[-1] < 5:  # too small still: into the smallest of the others
        smallest = int(wanted[:-1].argmin())
        for values in (observed, wanted):
            values[smallest] += values[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    assert wanted.size > 30
    return chisquare(observed, wanted).pvalue


def p_value(rule, temperature, warper, num_samples=NUM_SAMPLES, **broken):
    params = SamplingParams(temperature=temperature, **WARPERS[warper])
    tables = Tables(16, params)
    counts = sample_sequences(rule, Shapes(tables, **broken), num_samples)
    return chi_square_p_value(counts, tables.law())


@pytest.mark.parametrize(
    ("rule", "temperature", "warper"),
    [
        ("candidates", 0.7, "plain"),
        ("candidates", 1.0, "top_p"),
        ("sampled chain", 1.0, "plain"),
        ("sampled chain", 0.7, "top_k"),
        ("sampled children", 0.7, "plain"),
        ("sampled children", 1.0, "top_k"),
        ("coupled", 1.0, "plain"),
        ("coupled", 0.7, "top_p"),
    ],
)
def test_sampled_sequences_have_the_targets_law(rule, temperature, warper):
    assert p_value(rule, temperature, warper) > 0.001


@pytest.mark.parametrize("rule", ["sampled chain", "sampled children"])
def test_chi_square_rejects_a_residual_that_is_p(rule, monkeypatch):
    monkeypatch.setattr(accept, "_residual", lambda p, *_: p)
    assert p_value(rule, 1.0, "plain", 20_000) < 1e-6


def test_chi_square_rejects_a_softmax_q_for_deterministic_candidates():
    assert p_value("candidates", 1.0, "plain", 20_000, softmax_candidates=True) < 1e-6


# ---- exactly


class Fork:
    """A uniform number that is not drawn: a comparison takes the scripted side and weighs it."""

    def __init__(self, walk, scale=1.0):
        self.walk, self.scale = walk, scale

    def __mul__(self, factor):
        return Fork(self.walk, self.scale * factor)

    def __lt__(self, bound):
        probability = min(1.0, float(bound) / self.scale)
        return self.walk.choose([probability, 1.0 - probability]) == 0


class Walk:
    """One run of a random function along a script; `pending` are the scripts not yet run."""

    def __init__(self, script, pending):
        self.script, self.pending, self.taken, self.probability = script, pending, [], 1.0

    def choose(self, probabilities):
        at = len(self.taken)
        options = [i for i, probability in enumerate(probabilities) if probability > 0]
        if at < len(self.script):
            option = self.script[at]
        else:
            option = options[0]
            self.pending += [[*self.taken, other] for other in options[1:]]
        self.taken.append(option)
        self.probability *= probabilities[option]
        return option

    def random(self):
        return Fork(self)


def outcomes(tree, p, monkeypatch):
    """All (new tokens, probability) of accept_rejection, by running it along every branch."""

    def draw(weights, fork):
        return fork.walk.choose(normalised(weights).tolist())

    monkeypatch.setattr(accept, "sample_inverse_cdf", draw)
    pending, found = [[]], []
    while pending:
        walk = Walk(pending.pop(), pending)
        accepted = accept_rejection(tree, p.__getitem__, walk)
        found.append((new_tokens(tree, accepted), walk.probability))
    return found


def ordered_draws(q, count):
    """All ordered draws of `count` tokens without replacement, with their probabilities."""
    for tokens in itertools.permutations(range(q.size), count):
        probability, left = 1.0, 1.0
        for token in tokens:
            probability *= float(q[token]) / left
            left -= float(q[token])
        yield tokens, probability


def all_trees(rule, shapes, prefix):
    """All trees that a drafter may propose after a prefix, with their probabilities."""
    q, room = shapes.tables.q, LENGTH - len(prefix)
    if rule == "candidates":
        yield *shapes.candidates(prefix), 1.0
    elif rule == "sampled children":
        for tokens, probability in ordered_draws(normalised(q[prefix]), 2):
            yield *shapes.sampled(prefix, tuple((x,) for x in tokens)), probability
    else:
        for path in itertools.product(range(shapes.tables.vocab_size), repeat=min(room, 2)):
            steps = [normalised(q[prefix + path[:n]])[x] for n, x in enumerate(path)]
            nodes = tuple(path[:n] for n in range(1, len(path) + 1))
            yield *shapes.sampled(prefix, nodes), np.prod(steps)


def exact_law(rule, shapes, monkeypatch):
    """The distribution of all sequences that decoding in rounds gives, float64 [V] * LENGTH."""
    law = np.zeros((shapes.tables.vocab_size,) * LENGTH)
    reached = {(): 1.0}
    for length in range(LENGTH):
        for prefix in [prefix for prefix in reached if len(prefix) == length]:
            for tree, p, drawn in all_trees(rule, shapes, prefix):
                for tokens, probability in outcomes(tree, p, monkeypatch):
                    longer = (prefix + tokens)[:LENGTH]
                    weight = reached[prefix] * drawn * probability
                    reached[longer] = reached.get(longer, 0.0) + weight
    for sequence, probability in reached.items():
        if len(sequence) == LENGTH:
            law[sequence] += probability
    return law


def largest_error(rule, temperature, warper, monkeypatch, **broken):
    params = SamplingParams(temperature=temperature, **WARPERS[warper])
    tables = Tables(6, params)
    law = exact_law(rule, Shapes(tables, **broken), monkeypatch)
    assert abs(law.sum() - 1) < 1e-12
    return np.abs(law - tables.law()).max()


@pytest.mark.parametrize("rule", ["candidates", "sampled chain", "sampled children"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("warper", WARPERS)
def test_rejection_is_exact(rule, temperature, warper, monkeypatch):
    assert largest_error(rule, temperature, warper, monkeypatch) < 1e-12


def test_the_exact_law_sees_broken_rules(monkeypatch):
    error = largest_error("candidates", 1.0, "plain", monkeypatch, softmax_candidates=True)
    assert error > 1e-3
    monkeypatch.setattr(accept, "_without", lambda q, _: q)
    assert largest_error("sampled children", 1.0, "plain", monkeypatch) > 1e-4
    monkeypatch.setattr(accept, "_residual", lambda p, *_: p)
    assert largest_error("sampled chain", 1.0, "plain", monkeypatch) > 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("warper", WARPERS)
def test_coupled_text_does_not_depend_on_the_draft(temperature, warper):
    """Any tree, and none, give the same text from the same seed: exact by construction."""
    tables = Tables(16, SamplingParams(temperature=temperature, **WARPERS[warper]))
    shapes, uniform = Shapes(tables), np.random.default_rng(2).random
    for seed in range(300):
        uniforms = CoupledUniforms(seed)
        plain = ()
        while len(plain) < LENGTH:
            plain += (sample_inverse_cdf(tables.p[plain], uniforms.uniform(len(plain))),)
        for rule in RULES:
            text = ()
            while len(text) < LENGTH:
                tree, p = draw_tree(rule, shapes, text, uniform)
                choose = coupled_choice(tree, p, uniforms, len(text))
                text += new_tokens(tree, accept_by_token(tree, choose))
            assert text[:LENGTH] == plain


# ---- known patterns


def random_p(vocab_size, seed):
    return np.random.default_rng(seed).dirichlet(np.ones(vocab_size)).astype(np.float32)


def test_draft_equal_to_target_accepts_everything():
    uniform, rng = np.random.default_rng(3).random, rejection_rng(4)
    for seed in range(300):
        p = [random_p(1000, [seed, node]) for node in range(5)]
        drawn = [sample_inverse_cdf(p[node], uniform()) for node in range(4)]
        tree = Tree.chain(ROOT, drawn, {node: p[node] for node in range(4)})
        assert accept_rejection(tree, p.__getitem__, rng).path == (1, 2, 3, 4)


def test_greedy_follows_the_argmax():
    tree = Tree(np.array([0, 5, 6, 7, 8, 9]), np.array([-1, 0, 0, 2, 2, 4], np.int32))
    argmax = {0: 6, 1: 1, 2: 8, 3: 1, 4: 3, 5: 1}
    visited = []

    def choose(node):
        visited.append(node)
        return argmax[node]

    assert accept_by_token(tree, choose) == Accepted((2, 4), 3)
    assert visited == [0, 2, 4]


def test_a_hostile_tree_changes_no_greedy_token():
    rng = np.random.default_rng(5)
    tables = Tables(8, SamplingParams(temperature=0.0001))
    plain = ()
    while len(plain) < LENGTH:
        plain += (int(tables.p[plain].argmax()),)
    for _ in range(300):
        text = ()
        while len(text) < LENGTH:
            size = int(rng.integers(1, 12))
            parents = [-1] + [int(rng.integers(0, node)) for node in range(1, size)]
            tokens = [ROOT] + [int(x) for x in rng.permutation(8 * size)[: size - 1] % 8]
            tree = Tree(np.array(tokens), np.array(parents, np.int32))

            def choose(node, tree=tree, text=text):
                return int(tables.p_of(text + tuple(tree.path_tokens(node))).argmax())

            text += new_tokens(tree, accept_by_token(tree, choose))
        assert text[:LENGTH] == plain


@pytest.mark.parametrize("with_q", [False, True])
def test_a_draft_of_impossible_tokens_is_rejected(with_q):
    p = np.array([0.5, 0.5, 0, 0], np.float32)
    q = np.array([0, 0, 0.5, 0.5], np.float32)
    rng = rejection_rng(6)
    tree = Tree(np.array([0, 2, 3]), np.array([-1, 0, 0], np.int32), {0: q} if with_q else None)
    for _ in range(200):
        accepted = accept_rejection(tree, lambda _: p, rng)
        assert accepted.path == () and accepted.token in (0, 1)


def test_target_p_is_asked_for_visited_nodes_only_and_never_written():
    p = np.array([0, 0, 1, 0], np.float32)
    p.flags.writeable = False
    tree = Tree(np.array([0, 1, 2, 3, 3]), np.array([-1, 0, 0, 1, 2], np.int32))
    visited = []

    def target_p(node):
        visited.append(node)
        return p

    assert accept_rejection(tree, target_p, rejection_rng(7)) == Accepted((2,), 2)
    assert visited == [0, 2]


# ---- guards


class Numbers:
    """A generator with given numbers."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


ALMOST_1 = float(np.nextafter(1.0, 0.0))


def test_no_residual_falls_back_to_the_p_of_that_step():
    p = np.array([0.25, 0.75, 0, 0], np.float32)
    rest = accept._residual(p, 1.0, p, 1.0)
    assert rest is p
    # A first child took all of token 0's excess; the second step's p has none of it left.
    later = np.array([0, 1, 0, 0], np.float64)
    assert accept._residual(later, 1.0, np.array([0, 2, 0, 0], np.float32), 2.0) is later


def test_q_that_was_drawn_empty_ends_the_siblings():
    p = np.array([0.25, 0.75, 0, 0], np.float32)
    q = np.array([1, 0, 0, 0], np.float32)
    tree = Tree(np.array([9, 0, 1]), np.array([-1, 0, 0], np.int32), {0: q})
    assert accept_rejection(tree, lambda _: p, Numbers(0.9, 0.0)) == Accepted((), 1)


def test_a_child_that_q_cannot_have_drawn_is_passed_over():
    p = np.array([0.25, 0.75, 0, 0], np.float32)
    q = np.array([1, 0, 0, 0], np.float32)
    tree = Tree(np.array([9, 1, 0]), np.array([-1, 0, 0], np.int32), {0: q})
    assert accept_rejection(tree, lambda _: p, Numbers(0.2, 0.0)).path == (2,)


@pytest.mark.parametrize("rest", [0.7, 1.7e-16])
def test_candidates_that_hold_all_of_p_are_accepted_at_last(rest):
    """Also where the mass left, by rounding, is more than the last candidate's p."""
    p = np.array([1.0, rest, 0, 0], np.float32)
    tree = Tree(np.array([9, 0, 1, 2]), np.array([-1, 0, 0, 0], np.int32))
    assert accept_rejection(tree, lambda _: p, Numbers(*[ALMOST_1] * 5)).path == (2,)
