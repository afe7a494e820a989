"""The self-check of `draft_tree`: trees grown in one call against trees grown one level
per call.
"""

from __future__ import annotations

import numpy as np

from eagle3.export.checks.reference import Reference, num_threads
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import DraftRequest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.errors import SelfCheckFailed
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.ort.growth_engine import GrowthEngine
from eagle3.runtime.stats import Clock

_ROWS = 7
_NUM_TOKENS = 64
_AGREEMENT = 0.75


def grown_tree_agreement(bundle: Bundle, name: str, reference: Reference) -> float:
    """Return the fraction of nodes that both ways to grow a tree have in common, mean over a text.

    Rounding can decide between candidates of nearly equal value. Raises SelfCheckFailed if the
    difference is larger than that.
    """
    tree, clock, tokens = bundle.manifest.drafts[name].tree, Clock(), reference.tokens
    assert reference.features is not None
    stepwise, whole = (DraftEngine(bundle, num_threads(), clock, name) for _ in range(2))
    growth = GrowthEngine(bundle, name, whole, num_threads(), clock)
    sizes = (bundle.target_ids(name), bundle.manifest.target.vocab_size)
    drafters = (
        EagleDrafter(name, stepwise, *sizes),
        EagleDrafter(name, whole, *sizes, growth),
    )
    shares = []
    step = min(_ROWS, stepwise.max_rows, len(tokens) - 1)
    for start in range(0, min(_NUM_TOKENS, len(tokens) - step), step):
        rows = slice(start, start + step)
        paths: list[set[tuple[int, ...]]] = []
        for drafter in drafters:
            drafter.observe(tokens[rows], reference.features[rows])
            grown = drafter.propose(DraftRequest(int(tokens[rows.stop]), tree))
            paths.append({tuple(grown.path_tokens(i)) for i in range(1, grown.num_nodes)})
        every = paths[0] | paths[1]
        shares.append(len(paths[0] & paths[1]) / len(every) if every else 1.0)
    agreement = float(np.mean(shares))
    if agreement < _AGREEMENT:
        raise SelfCheckFailed(
            f"the exported {name}.draft_tree disagrees with {name}.draft: {agreement:.1%} of their"
            f" nodes are equal, expected at least {_AGREEMENT:.0%}; nothing was written. Please"
            " report the target and the versions"
        )
    return agreement
