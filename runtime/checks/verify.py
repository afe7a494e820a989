"""`eagle3 verify`: check that no drafter of a bundle changes the target's output.

The rules that it checks are those of section 4 of the method.
Greedy and `coupled` decoding must produce exactly the tokens of plain decoding, with every drafter
and tree. `rejection` must follow the target's distribution (`rejection_check.py`).

A wide call and narrow calls may round differently, which can flip a near-tie. This noise is
measured too (`noise.py`). Below float32, or on a GPU, a divergence within the noise is reported but
is not a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from eagle3.plans.tree_plan import TreePlan, TreeRequest
from eagle3.runtime.acceptance.sampling import (
    CoupledUniforms,
    TokenHistory,
    target_probs,
)
from eagle3.runtime.checks.noise import measure_draft_noise, measure_noise
from eagle3.runtime.checks.rejection_check import (
    RejectionCheck,
    check_rejection,
    significant,
    tree_name,
)
from eagle3.runtime.engine import Engine
from eagle3.runtime.errors import RequestError
from eagle3.runtime.params import SamplingParams
from eagle3.runtime.text.prompt_files import PROMPTS

MAX_NEW_TOKENS = 128
NUM_WALKS = 20_000
WIDE = TreePlan(draft_top_k=4, draft_depth=4, num_draft_tokens=10)
CHAIN = TreePlan(draft_top_k=1, draft_depth=3, num_draft_tokens=3)
# Request options of each rule that guarantees equal tokens; the seed is the prompt's index.
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "acceptance": "coupled"},
}

_NUM_CONTEXTS = 3  # prompts used by the chi-square tests
_OTHER_TREES_EVERY = 4  # trees other than the main one run on every fourth prompt only

Report = Callable[[str], None]


@dataclass(frozen=True)
class Divergence:
    """The first token that differs from plain decoding.

    plain_token, draft_token: None if that text had already ended. margin: how close plain decoding
    was to choosing another token; None if unknown. For greedy, it is the difference of the two
    largest logits; for `coupled`, the distance of the uniform random number from the edge of the
    token's interval of the CDF.
    """

    prompt: int
    position: int
    plain_token: int | None
    draft_token: int | None
    margin: float | None
    within_noise: bool


@dataclass(frozen=True)
class EqualityCheck:
    """The comparison with plain decoding for one drafter, rule and tree.

    num_prompts, num_tokens: the prompts that ran, and the tokens of plain decoding on them.
    """

    drafter: str
    rule: str
    tree: TreePlan
    num_prompts: int
    num_tokens: int
    acceptance_length: float
    divergences: tuple[Divergence, ...]

    @property
    def passed(self) -> bool:
        """True if the engine's noise explains every divergence."""
        return all(each.within_noise for each in self.divergences)


@dataclass(frozen=True)
class VerifyReport:
    """The results of all checks.

    device: "cpu" or "cuda"; `rejection` is empty on "cuda". noise: the largest difference of a
    log-probability between wide and narrow target calls.
    """

    dtype: str
    device: str
    max_new_tokens: int
    noise: float
    equality: tuple[EqualityCheck, ...]
    rejection: tuple[RejectionCheck, ...]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(each.passed for each in self.equality) and not significant(self.rejection)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {"passed": self.passed, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        where = "" if self.device == "cpu" else f" on {self.device}"
        lines = [
            f"{self.dtype}{where}, up to {self.max_new_tokens} new tokens; log-probabilities of"
            f" wide and narrow calls differ by at most {self.noise:.1e}",
            "(tree: top-k, depth, number of draft tokens)",
        ]
        for each in self.equality:
            lines += _equality_lines(each)
        lines += _rejection_lines(self.rejection)
        if self.device != "cpu":
            lines.append(
                "rejection was not tested on cuda, which runs the same acceptance code on the"
                " host; use `eagle3 verify --device cpu` to test it"
            )
        return [*lines, f"verify: {'passed' if self.passed else 'FAILED'}"]


@dataclass(frozen=True)
class _Plain:
    """The tokens of plain decoding for every prompt, under one rule."""

    rule: str
    options: Mapping[str, Any]
    prompts: Sequence[list[int]]
    tokens: Sequence[list[int]]


def verify(
    engine: Engine,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    *,
    tree: TreeRequest | None = None,
    num_walks: int = NUM_WALKS,
    report: Report = lambda _: None,
) -> VerifyReport:
    """Check every drafter of the engine's bundle against plain decoding, and the `rejection` rule.

    max_new_tokens: maximum length of each answer. tree: the tree that every prompt runs with; None
    for the drafter's own. num_walks: acceptance walks per chi-square context. report: receives a
    line of progress after every prompt. Raises RequestError for a prompt that the engine rejects,
    or if there are no prompts, and PlanError for a tree that the bundle cannot run.
    """
    engine.plan.override(tree=tree)  # raises before the long work if the tree does not fit
    on_host = engine.device is None
    drafters = [name for name in engine.drafters if name != "none"]
    if engine.device is not None:
        for drafter in drafters:
            engine.device.check_tree(_trees(engine, drafter, tree)[0][0])
    if not prompts:
        raise RequestError("there are no prompts to verify with: give at least one")
    chat = engine.chat_template is not None
    encoded = [engine.encode(prompt, chat=chat) for prompt in prompts]
    plains = [_decode_plain(engine, rule, encoded, max_new_tokens, report) for rule in RULES]
    if on_host:
        noise = measure_noise(engine, encoded[0] + plains[0].tokens[0], WIDE.num_draft_tokens + 1)
    else:
        noise = measure_draft_noise(engine, encoded[0], max_new_tokens)
    equality = [
        _check_equality(engine, drafter, each, plain, every, noise, report)
        for drafter in drafters
        for plain in plains
        for each, every in _trees(engine, drafter, tree, WIDE)
    ]
    room = engine.plan.max_seq_len - engine.plan.max_draft_tokens - 1
    contexts = [ids for ids in encoded if len(ids) <= room]
    rejection = [
        check
        for drafter in (drafters if on_host else ())
        for check in check_rejection(
            engine,
            drafter,
            [each for each, _ in _trees(engine, drafter, tree, WIDE, CHAIN)],
            contexts[:_NUM_CONTEXTS],
            num_walks,
            report,
        )
    ]
    where = "cpu" if on_host else "cuda"
    return VerifyReport(
        engine.plan.dtype, where, max_new_tokens, noise, tuple(equality), tuple(rejection)
    )


def _trees(
    engine: Engine, drafter: str, asked: TreeRequest | None, *more: TreePlan
) -> list[tuple[TreePlan, int]]:
    """Return pairs (tree, n): the tree runs on every n-th prompt.

    The first one, with n = 1, is the tree `asked` for or else the drafter's own. The trees in
    `more` follow, cut to the number of tokens that the bundle can verify, unless they equal it.
    """
    own = engine.default_tree(drafter)
    main = own if asked is None else replace(engine.plan, tree=own).override(tree=asked)
    limit = engine.plan.max_draft_tokens
    if engine.device is not None:  # a GPU draft can grow its own tree only, or fewer of its nodes
        more = (replace(main, num_draft_tokens=-(-main.num_draft_tokens // 2)),)
    cut = [replace(each, num_draft_tokens=min(each.num_draft_tokens, limit)) for each in more]
    return [(main, 1), *((each, _OTHER_TREES_EVERY) for each in cut if each != main)]


def _decode_plain(
    engine: Engine, rule: str, prompts: Sequence[list[int]], max_new_tokens: int, report: Report
) -> _Plain:
    options = {**RULES[rule], "max_new_tokens": max_new_tokens}
    tokens = []
    for index, ids in enumerate(prompts):
        result = engine.generate(ids, drafter="none", seed=index, **options)
        tokens.append(result.token_ids)
        report(f"{rule}, plain: prompt {index + 1} of {len(prompts)}")
    return _Plain(rule, options, prompts, tokens)


def _check_equality(
    engine: Engine,
    drafter: str,
    tree: TreePlan,
    plain: _Plain,
    every: int,
    noise: float,
    report: Report,
) -> EqualityCheck:
    divergences = []
    rounds = committed = 0.0
    chosen = range(0, len(plain.prompts), every)
    for index in chosen:
        ids, expected = plain.prompts[index], plain.tokens[index]
        result = engine.generate(ids, drafter=drafter, tree=tree, seed=index, **plain.options)
        rounds += result.stats.rounds
        committed += result.stats.rounds * result.stats.acceptance_length
        if result.token_ids != expected:
            divergences.append(_divergence(engine, plain, index, result.token_ids, noise))
        report(
            f"{plain.rule}, {drafter}, tree {tree_name(tree)}: prompt {index + 1} of"
            f" {len(plain.prompts)}: {'equal' if result.token_ids == expected else 'DIFFERENT'}"
        )
    return EqualityCheck(
        drafter,
        plain.rule,
        tree,
        len(chosen),
        sum(len(plain.tokens[index]) for index in chosen),
        committed / rounds if rounds else 0.0,
        tuple(divergences),
    )


def _divergence(
    engine: Engine, plain: _Plain, index: int, found: list[int], noise: float
) -> Divergence:
    expected = plain.tokens[index]
    pairs = enumerate(zip(expected, found, strict=False))
    shorter = min(len(expected), len(found))
    position = next((i for i, (a, b) in pairs if a != b), shorter)
    margin = allowed = None
    if position < shorter and plain.rule == "greedy":
        # Each of the two logits may be off by the noise.
        margin, allowed = _greedy_margin(engine, plain, index, position), 2 * noise
    elif position < shorter:
        # A log-probability off by e moves a sum of probabilities by a factor of at most exp(2e/T).
        margin = _coupled_margin(engine, plain, index, position)
        allowed = float(np.expm1(2 * noise / RULES["coupled"]["temperature"]))
    return Divergence(
        prompt=index,
        position=position,
        plain_token=expected[position] if position < len(expected) else None,
        draft_token=found[position] if position < len(found) else None,
        margin=margin,
        within_noise=(
            (engine.plan.dtype != "float32" or engine.device is not None)
            and margin is not None
            and allowed is not None
            and margin <= allowed
        ),
    )


def _greedy_margin(engine: Engine, plain: _Plain, index: int, position: int) -> float | None:
    """Return the difference of the two largest logits of plain decoding at `position`."""
    options = {**plain.options, "max_new_tokens": position + 1}
    result = engine.generate(
        plain.prompts[index], drafter="none", seed=index, logprobs=2, **options
    )
    if result.logprobs is None or len(result.logprobs) <= position:
        return None
    (_, best), (_, second) = result.logprobs[position].top
    return best - second


def _coupled_margin(engine: Engine, plain: _Plain, index: int, position: int) -> float:
    """Return the distance of the uniform number from the edge of the plain token's CDF interval."""
    text = plain.prompts[index] + plain.tokens[index][:position]
    logits = engine.next_logits(text)
    params = SamplingParams(temperature=RULES["coupled"]["temperature"])
    p = target_probs(logits, TokenHistory(len(logits)), (), params)
    token = plain.tokens[index][position]
    edges = np.cumsum(p, dtype=np.float64)[max(token - 1, 0) : token + 1]
    edges = edges if token else np.array([0.0, edges[0]])
    u = CoupledUniforms(index).uniform(len(text))
    return float(np.abs(edges - u).min())


def _equality_lines(each: EqualityCheck) -> list[str]:
    equal = each.num_prompts - len(each.divergences)
    lines = [
        f"{each.rule:9} {each.drafter}, tree {tree_name(each.tree)}: {equal} of"
        f" {each.num_prompts} prompts token-equal ({each.num_tokens} tokens, tau"
        f" {each.acceptance_length:.2f})"
    ]
    for found in each.divergences:
        margin = "unknown" if found.margin is None else f"{found.margin:.1e}"
        verdict = "within the engine's noise" if found.within_noise else "FAILURE"
        lines.append(
            f"  prompt {found.prompt + 1}, token {found.position}: plain {found.plain_token},"
            f" drafted {found.draft_token}, margin {margin}: {verdict}"
        )
    return lines


def _rejection_lines(checks: Sequence[RejectionCheck]) -> list[str]:
    failed = significant(checks)
    lines = []
    for drafter, tree in dict.fromkeys((each.drafter, each.tree) for each in checks):
        group = [each for each in checks if (each.drafter, each.tree) == (drafter, tree)]
        worst = min(group, key=lambda each: each.p_value)
        lines.append(
            f"rejection {drafter}, tree {tree_name(tree)}: {len(group)} chi-square tests, smallest"
            f" p-value {worst.p_value:.2g} ({worst.num_walks} walks; {len(checks)} tests in total)"
        )
        lines += [
            f"  context {each.context + 1}, token {each.token}: p-value {each.p_value:.1e} over"
            f" {each.num_cells} cells: FAILURE"
            for each in group
            if each in failed
        ]
    return lines
