"""Drafters for tests: they know the target's text, or are the target, or lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import eagle3
from eagle3.runtime.acceptance.sampling import draft_probs, sample_inverse_cdf
from eagle3.runtime.drafters.base import Drafter, DraftRequest
from eagle3.runtime.trees.tree import Tree


class Positions:
    """Counts what the target ran: the root of a round stands at position `seen`."""

    name = "test"
    proposes = True

    def __init__(self) -> None:
        self.seen = self.proposals = 0

    def reset(self) -> None:
        self.seen = self.proposals = 0

    def observe(self, tokens: NDArray[np.int64], features: Any) -> None:
        self.seen += len(tokens)

    def rewind(self, num_tokens: int) -> None:
        self.seen -= num_tokens


class Oracle(Positions):
    """Proposes the text itself as a chain."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self.text = list(text)

    def propose(self, request: DraftRequest) -> Tree:
        self.proposals += 1
        depth = request.tree.depth_in_use
        return Tree.chain(request.root, self.text[self.seen + 1 : self.seen + 1 + depth])


class Forking(Positions):
    """A random tree around the text: branches part anywhere, wrong ones go on with right tokens.

    `hit`: chance that a node of the true path gets its true child.
    """

    def __init__(self, text: Sequence[int], vocab_size: int, hit: float = 0.8) -> None:
        super().__init__()
        self.text, self.vocab_size, self.hit = list(text), vocab_size, hit
        self.rng = np.random.default_rng(0)

    def propose(self, request: DraftRequest) -> Tree:
        self.proposals += 1
        tokens, parents, depths = [request.root], [-1], [0]
        children: list[set[int]] = [set()]
        for _ in range(request.tree.num_draft_tokens):
            open_nodes = [i for i, d in enumerate(depths) if d < request.tree.draft_depth]
            parent = int(self.rng.choice(open_nodes[-4:]))
            position = self.seen + depths[parent] + 1
            known = position < len(self.text) and self.rng.random() < self.hit
            token = self.text[position] if known else int(self.rng.integers(self.vocab_size))
            if token in children[parent]:
                continue
            children[parent].add(token)
            children.append(set())
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))


class Itself(Positions):
    """The target as its own draft: a chain drawn from q = p."""

    def __init__(self, engine: eagle3.Engine) -> None:
        super().__init__()
        self._target = engine.target

    def observe(self, tokens: NDArray[np.int64], features: Any) -> None:
        for start in range(0, len(tokens), 8):
            part = tokens[start : start + 8]
            self._target.verify(Tree.chain(int(part[0]), part[1:].tolist()), self.seen, False)
            self.seen += len(part)

    def propose(self, request: DraftRequest) -> Tree:
        self.proposals += 1
        assert request.temperature is not None and request.rng is not None
        tokens, q = [request.root], {}
        for depth in range(request.tree.depth_in_use):
            out = self._target.verify(Tree.root_only(tokens[-1]), self.seen + depth, True)
            assert out.logits is not None
            probs = draft_probs(out.logits[0], request.temperature)
            assert probs is not None
            q[depth] = probs
            tokens.append(sample_inverse_cdf(probs, request.rng.random()))
        return Tree.chain(tokens[0], tokens[1:], q)


class Fixed(Positions):
    """Hangs the same chain under every root, whatever it holds."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self.tokens = list(tokens)

    def propose(self, request: DraftRequest) -> Tree:
        self.proposals += 1
        return Tree.chain(request.root, self.tokens[: request.tree.depth_in_use])


@contextmanager
def using(engine: eagle3.Engine, drafter: Drafter) -> Iterator[None]:
    """`engine` drafts with `drafter` in place of its own, inside this context."""
    name = engine.default_drafter
    before = engine._drafters[name]
    engine._drafters[name] = drafter
    try:
        yield
    finally:
        engine._drafters[name] = before
