"""The self-check of an export: the finished engines against the PyTorch model they came from.

The engines run through the runtime's own classes, so what is compared is what will be served.
Errors are relative: the largest difference over the largest reference value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.export.head_config import Head
from eagle3.export.head_graph import Eagle1Head, EagleHead
from eagle3.export.target import Target
from eagle3.export.texts import PROMPTS, TEXT
from eagle3.export.weights import block_int8, int8_block
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.draft import DraftEngine
from eagle3.runtime.drafters import DraftRequest
from eagle3.runtime.drafters.eagle import EagleDrafter
from eagle3.runtime.engine import Engine
from eagle3.runtime.errors import SelfCheckFailed
from eagle3.runtime.growth import ENGINE, GrowthEngine
from eagle3.runtime.session import Clock
from eagle3.runtime.stats import NEAR_ZERO_ACCEPTANCE
from eagle3.runtime.target import TargetEngine
from eagle3.runtime.tree import Tree

TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
# int8 weights: the reference has them too, what is left is the kernel's int8 activations.
INT8_TOLERANCE = 1e-1

_NUM_TOKENS = 384
_FEW_TOKENS = 64
_DRAFT_STEPS = 3
_GROWN_ROWS = 7
_GROWN_AGREEMENT = 0.75
# A tree whose branches part at the root and again deep down: node 0 is the root.
_TREE_PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9)

Array = NDArray[Any]
_AnyHead = EagleHead | Eagle1Head


@dataclass
class SelfCheck:
    """What was measured, as it stands in the manifest: `engines` of the target, `draft`."""

    engines: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """What the user should know although the export succeeded."""
        acceptance = self.draft.get("first_position_acceptance")
        if acceptance is None or acceptance >= NEAR_ZERO_ACCEPTANCE:
            return []
        return [
            f"only {acceptance:.1%} of the first draft tokens are accepted on ordinary prompts: "
            "the head does not fit this target as it was read. Check its fused layers "
            "(--aux-layers counts hidden_states indices), its RoPE, its vocabulary mapping and the "
            "chat template"
        ]


def check_bundle(
    bundle: Bundle,
    target: Target,
    head: Head | None,
    module: _AnyHead | None,
    report: Callable[[str], None],
) -> SelfCheck:
    """Compares and measures; raises SelfCheckFailed, with the errors, above the tolerance."""
    plan, check = bundle.manifest.plan, SelfCheck()
    if plan.dtype not in TOLERANCE:
        reason = f"{plan.dtype} engines cannot run on this machine's CPU"
        report(f"not compared with PyTorch: {reason}")
        check.engines["skipped"] = reason
        return check
    tokens = _tokens(target, plan.max_seq_len - len(_TREE_PARENTS))
    reference = _Reference(target, tokens, bundle.manifest.target.aux_layer_ids)
    tolerance = TOLERANCE[plan.dtype]
    check.engines = _check_target(bundle, reference, tolerance)
    report(_summary("target", check.engines))
    if head is not None and module is not None:
        bound = INT8_TOLERANCE if plan.draft_weights == "int8" else tolerance
        check.draft = _check_draft(bundle, module, reference, bound)
        report(_summary("draft", check.draft))
        if ENGINE in bundle.manifest.engines:
            check.draft["grown_tree_agreement"] = agreement = _grown_tree_agreement(
                bundle, reference
            )
            report(f"trees grown in one call and a level a call: {agreement:.1%} of nodes agree")
        acceptance = first_position_acceptance(bundle)
        check.draft["first_position_acceptance"] = acceptance
        report(f"first draft token accepted: {acceptance:.1%} on {len(PROMPTS)} prompts")
    for warning in check.warnings:
        report(f"warning: {warning}")
    return check


def _tokens(target: Target, limit: int) -> NDArray[np.int64]:
    """Several hundred token ids of ordinary text, all inside the vocabulary.

    A tokenizer that does not know the text's words would say "unknown" to all of them, and a text
    of equal tokens hides a wrong mask; its ids are drawn at random instead.
    """
    ids = target.tokenizer(TEXT * 4, add_special_tokens=False)["input_ids"]
    known = [i for i in ids if i < target.vocab_size]
    if len(set(known)) < min(_FEW_TOKENS, target.vocab_size // 2):
        known = np.random.default_rng(0).integers(0, target.vocab_size, _NUM_TOKENS).tolist()
    repeated = (known * (_NUM_TOKENS // len(known) + 1))[: min(_NUM_TOKENS, limit)]
    return np.asarray(repeated, np.int64)


class _Reference:
    """The PyTorch model's own numbers for a text: logits [T,V], features [T,F]."""

    def __init__(self, target: Target, tokens: NDArray[np.int64], layers: tuple[int, ...]) -> None:
        self.target, self.tokens, self._layers = target, tokens, layers
        self.logits, self.features = self.run(tokens)

    def run(self, tokens: NDArray[np.int64]) -> tuple[Array, Array | None]:
        """A separate call without any cache."""
        with torch.no_grad():
            out = self.target.model(
                input_ids=torch.from_numpy(tokens)[None],
                use_cache=False,
                output_hidden_states=bool(self._layers),
            )
        logits = out.logits[0].float().numpy()
        if not self._layers:
            return logits, None
        fused = torch.cat([out.hidden_states[i] for i in self._layers], -1)
        return logits, fused[0].float().numpy()


def relative_error(found: Array, reference: Array) -> float:
    """max |found - reference| / max |reference|; NaN counts as infinite."""
    return _relative(_difference(found, reference), reference)


def _difference(found: Array, reference: Array) -> float:
    return float(np.abs(found.astype(np.float32) - reference.astype(np.float32)).max())


def _relative(difference: float, reference: Array) -> float:
    error = difference / max(float(np.abs(reference).max()), 1e-9)
    return error if np.isfinite(error) else float("inf")


def _check_target(bundle: Bundle, reference: _Reference, tolerance: float) -> dict[str, Any]:
    engine = TargetEngine(bundle, _threads(), Clock())
    errors = {
        **_teacher_forced(engine, reference),
        "prefill_logits": _prefill_error(engine, reference),
        "tree_logits": _tree_error(engine, reference),
    }
    _judge("target", errors, tolerance)
    return {"tokens": len(reference.tokens), "tolerance": tolerance, "relative_errors": errors}


def _threads() -> int:
    return max(1, torch.get_num_threads())


def _teacher_forced(engine: TargetEngine, reference: _Reference) -> dict[str, float]:
    """The text as accepted chains of one verify call after the other."""
    expected = {"logits": reference.logits}
    if reference.features is not None:
        expected["features"] = reference.features
    worst = dict.fromkeys(expected, 0.0)
    width = min(17, engine.max_verify_rows)
    for past in range(0, len(reference.tokens), width):
        part = reference.tokens[past : past + width]
        out = engine.verify(Tree.chain(int(part[0]), part[1:].tolist()), past, want_logits=True)
        engine.keep(past, tuple(range(1, len(part))))
        for name, whole in expected.items():
            rows = whole[past : past + len(part)]
            # np.maximum keeps a NaN.
            worst[name] = float(np.maximum(worst[name], _difference(getattr(out, name), rows)))
    return {name: _relative(worst[name], whole) for name, whole in expected.items()}


def _prefill_error(engine: TargetEngine, reference: _Reference) -> float:
    """The text prefilled in chunks: the last row."""
    tokens, chunk = reference.tokens, engine.prefill_chunk
    for past in range(0, len(tokens), chunk):
        out = engine.prefill(tokens[past : past + chunk], past, want_logits=True)
    assert out.logits is not None
    return relative_error(out.logits[0], reference.logits[-1])


def _tree_error(engine: TargetEngine, reference: _Reference) -> float:
    """One tree call behind the prefilled text, against a separate PyTorch call for every path."""
    past = len(reference.tokens)
    rng = np.random.default_rng(0)
    different = rng.permutation(np.unique(reference.tokens))  # equal siblings would hide a mix-up
    tokens = np.resize(different, len(_TREE_PARENTS))
    tree = Tree(tokens, np.asarray(_TREE_PARENTS, np.int32))
    num_nodes = min(tree.num_nodes, engine.max_verify_rows)
    tree = Tree(tree.tokens[:num_nodes], tree.parents[:num_nodes])
    out = engine.verify(tree, past, want_logits=True)
    assert out.logits is not None
    errors = []
    for leaf in (node for node in range(num_nodes) if not tree.children(node)):
        path = [0, *tree.path(leaf)]
        text = np.concatenate([reference.tokens, tree.tokens[path]])
        errors.append(relative_error(out.logits[path], reference.run(text)[0][past:]))
    return max(errors)


def _check_draft(
    bundle: Bundle, module: _AnyHead, reference: _Reference, tolerance: float
) -> dict[str, Any]:
    """Per-step logits: rows with the target's features, then what the head feeds back, K = 2."""
    engine = DraftEngine(bundle, _threads(), Clock())
    if bundle.manifest.plan.draft_weights == "int8":
        module = _with_int8_weights(module)
    assert reference.features is not None
    count = min(48, len(reference.tokens) - 1, engine.max_rows)
    engine.feature_slots(count)[:] = reference.features[:count]
    next_ids = reference.tokens[1 : count + 1]
    out = engine.extend(next_ids, top_k=2, want_logits=True)
    path = _DraftPath(module, reference, count)
    errors = {}
    hidden, ids = out.hidden[-1:].copy(), out.top_ids[0].copy()
    assert out.logits is not None
    errors["step_0"] = relative_error(out.logits[0], path.logits(()))
    # Two branches side by side: each row sees itself and its own ancestors.
    branches: list[tuple[int, ...]] = [(int(i),) for i in ids]
    hidden, mask = np.repeat(hidden, len(ids), 0), np.eye(len(ids), dtype=np.bool_)
    for depth in range(1, _DRAFT_STEPS + 1):
        tokens = np.array([branch[-1] for branch in branches], np.int64)
        out = engine.step(tokens, hidden, depth, mask, top_k=1, want_logits=True)
        assert out.logits is not None
        errors[f"step_{depth}"] = max(
            relative_error(found, path.logits(branch))
            for found, branch in zip(out.logits, branches, strict=True)
        )
        branches = [(*b, int(t[0])) for b, t in zip(branches, out.top_ids, strict=True)]
        hidden, mask = out.hidden.copy(), np.concatenate([mask, np.eye(len(ids), dtype=bool)], 1)
    _judge("draft", errors, tolerance)
    return {"tolerance": tolerance, "relative_errors": errors}


def _grown_tree_agreement(bundle: Bundle, reference: _Reference) -> float:
    """Share of nodes that the two ways to grow the plan's tree have in common, mean over a text.

    Rounding may decide between candidates of nearly equal value; raises SelfCheckFailed where it is
    more than that.
    """
    info, tree, clock = bundle.manifest.draft, bundle.manifest.plan.tree, Clock()
    assert info is not None and reference.features is not None
    stepwise, whole = (DraftEngine(bundle, _threads(), clock) for _ in range(2))
    growth = GrowthEngine(bundle, whole, _threads(), clock)
    sizes = (bundle.target_ids(), bundle.manifest.target.vocab_size)
    drafters = (
        EagleDrafter(info.method, stepwise, *sizes),
        EagleDrafter(info.method, whole, *sizes, growth),
    )
    shares = []
    step = min(_GROWN_ROWS, stepwise.max_rows, len(reference.tokens) - 1)
    for start in range(0, min(_FEW_TOKENS, len(reference.tokens) - step), step):
        rows = slice(start, start + step)
        paths: list[set[tuple[int, ...]]] = []
        for drafter in drafters:
            drafter.observe(reference.tokens[rows], reference.features[rows])
            grown = drafter.propose(DraftRequest(int(reference.tokens[rows.stop]), tree))
            paths.append({tuple(grown.path_tokens(i)) for i in range(1, grown.num_nodes)})
        every = paths[0] | paths[1]
        shares.append(len(paths[0] & paths[1]) / len(every) if every else 1.0)
    agreement = float(np.mean(shares))
    if agreement < _GROWN_AGREEMENT:
        raise SelfCheckFailed(
            f"the exported draft_tree disagrees with draft: {agreement:.1%} of their nodes are the"
            f" same, at least {_GROWN_AGREEMENT:.0%} must be; nothing was written. Please report"
            " the target and the versions"
        )
    return agreement


class _DraftPath:
    """The head in plain PyTorch, without cache or tree: one path at a time, from the start."""

    def __init__(self, module: _AnyHead, reference: _Reference, count: int) -> None:
        assert reference.features is not None
        self._module, self._count = module, count
        self._features = torch.from_numpy(reference.features[:count])[None].to(module.fc.weight)
        self._tokens = reference.tokens[1 : count + 1].tolist()
        self._embed = reference.target.model.get_input_embeddings()

    def logits(self, path: tuple[int, ...]) -> Array:
        """Logits [Vd] of the row with the last token of `path` (() = the last prefix row)."""
        with torch.no_grad():
            g = self._module.fuse(self._features)
            for length in range(len(path) + 1):
                out = self._forward(g, [*self._tokens, *path[:length]])
                g = torch.cat([g, self._module.feed_back(out[:, -1:])], 1)
            return self._module.logits(out[:, -1:])[0, 0].numpy()

    def _forward(self, g: Tensor, tokens: list[int]) -> Tensor:
        positions = torch.arange(len(tokens))[None]
        embedding = self._embed(torch.tensor([tokens]))
        out: Tensor = self._module(embedding, g, positions, _causal_attention)
        return out


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _with_int8_weights(module: _AnyHead) -> _AnyHead:
    """A copy whose matrices hold the values that the int8 engine reads."""
    module = copy.deepcopy(module)
    for linear in (m for m in module.modules() if isinstance(m, torch.nn.Linear)):
        weight = linear.weight.float().numpy().T
        block = int8_block(weight.shape[0])
        if block is not None:
            stored, scales = block_int8(np.ascontiguousarray(weight), block)
            values = stored.astype(np.float32) * np.repeat(scales, block, axis=0)
            linear.weight.copy_(torch.from_numpy(values.T.copy()))
    return module


def first_position_acceptance(bundle: Bundle) -> float:
    """Share of the first draft tokens that the target accepts, greedy, on the built-in prompts."""
    engine = Engine(bundle, _threads())
    chat = engine.chat_template is not None
    accepted = proposed = 0.0
    for prompt in PROMPTS:
        ids = engine.encode(prompt, chat=chat)[: engine.plan.max_seq_len // 2]
        stats = engine.generate(
            ids, max_new_tokens=24, draft_top_k=1, draft_depth=2, num_draft_tokens=2
        ).stats
        rounds = stats.rounds - stats.plain_rounds
        proposed += rounds
        accepted += rounds * (stats.accepted_by_position[0] if stats.accepted_by_position else 0.0)
    return accepted / proposed if proposed else 0.0


def _judge(name: str, errors: dict[str, float], tolerance: float) -> None:
    bad = {key: value for key, value in errors.items() if not value <= tolerance}
    if bad:
        listed = ", ".join(f"{key} {value:.2e}" for key, value in bad.items())
        raise SelfCheckFailed(
            f"the exported {name} disagrees with PyTorch: relative error {listed}, tolerance "
            f"{tolerance:.0e}; nothing was written. Please report the target and the versions"
        )


def _summary(name: str, result: dict[str, Any]) -> str:
    errors = result["relative_errors"]
    listed = ", ".join(f"{key} {value:.1e}" for key, value in errors.items())
    return (
        f"{name} against PyTorch, relative errors: {listed} (tolerance {result['tolerance']:.0e})"
    )
