"""The self-check of an export: the finished engines against the PyTorch model they came from.

The engines run through the runtime's own classes, so what is compared is what will be served.
Errors are relative: the largest difference over the largest reference value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from eagle3.export.checks.check_texts import PROMPTS, TEXT
from eagle3.export.checks.product_check import check_products
from eagle3.export.checks.readings import AnsweredText, Reading
from eagle3.export.checks.reference import (
    Reference,
    judge,
    max_difference,
    num_threads,
    relative_error,
    relative_to,
)
from eagle3.export.int8.int8_reference import Int8Products, ModelWeights, stored_int8
from eagle3.export.targets.target import Target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.engine import Engine
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import NEAR_ZERO_ACCEPTANCE, Clock
from eagle3.runtime.trees.tree import Tree

TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
# int8 weights: the reference has them too, so only the kernel's int8 activations differ.
INT8_TOLERANCE = 1e-1

_NUM_TOKENS = 384
_FEW_TOKENS = 64
_PRODUCT_TOKENS = 40
_ANSWER_TOKENS = 48
# A tree whose branches part at the root and again deeper; node 0 is the root.
_TREE_PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9)


class Checked(Protocol):
    """A draft that can be compared with PyTorch."""

    def check(
        self, bundle: Bundle, name: str, reference: Reference, tolerance: float
    ) -> dict[str, Any]:
        """Return the errors of its engines. Raises SelfCheckFailed."""
        ...

    def readings(self, target: Target, texts: Sequence[AnsweredText]) -> tuple[Reading, ...]:
        """Return its results as it was read, and under other readings."""
        ...


@dataclass
class SelfCheck:
    """The results, as stored in the manifest: `engines` of the target, and each draft."""

    engines: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    readings: dict[str, tuple[Reading, ...]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user although the export succeeded."""
        found = [
            f"only {acceptance:.1%} of the first draft tokens of {name} are accepted on ordinary "
            "prompts: it does not fit this target as it was read. Check a head's fused layers "
            "(--aux-layers counts hidden_states indices), its RoPE, its vocabulary mapping and the "
            "chat template; an LM may simply be too weak"
            for name, check in self.drafts.items()
            if (acceptance := check["first_position_acceptance"]) < NEAR_ZERO_ACCEPTANCE
        ]
        found += [
            f"{name} is read better with {each.name}: the first draft token is right "
            f"{each.acceptance:.1%} of the time instead of {own.acceptance:.1%}. "
            "Export it again with that reading"
            for name, (own, *others) in self.readings.items()
            for each in others
            if each.clearly_better
        ]
        return found


def check_bundle(
    bundle: Bundle,
    target: Target,
    drafts: Mapping[str, Checked],
    report: Callable[[str], None],
) -> SelfCheck:
    """Compare and measure. Raises SelfCheckFailed, with the errors, above the tolerance.

    drafts: the drafts to compare, by name in the bundle.
    """
    plan, check = bundle.manifest.plan, SelfCheck()
    if plan.dtype not in TOLERANCE:
        reason = f"{plan.dtype} engines cannot run on this machine's CPU"
        report(f"not compared with PyTorch: {reason}")
        check.engines["skipped"] = reason
        return check
    bundle = _on_cpu(bundle)
    tokens = _tokens(target, plan.max_seq_len - len(_TREE_PARENTS))
    layers = bundle.manifest.target.aux_layer_ids
    reference = Reference(target, tokens, layers, _int8_products(bundle, target))
    tolerance = TOLERANCE[plan.dtype]
    check.engines = _check_target(bundle, target, reference, tolerance)
    report(_summary("target", check.engines))
    for name, draft in drafts.items():
        is_int8 = bundle.manifest.drafts[name].weights == "int8"
        result = draft.check(bundle, name, reference, INT8_TOLERANCE if is_int8 else tolerance)
        report(_summary(name, result))
        acceptance, texts = first_position_acceptance(bundle, name)
        check.drafts[name] = {**result, "first_position_acceptance": acceptance}
        report(f"{name}: first draft token accepted {acceptance:.1%} on {len(PROMPTS)} prompts")
        if readings := draft.readings(target, texts):
            check.readings[name] = readings
            check.drafts[name]["readings"] = {each.name: each.acceptance for each in readings}
    for warning in check.warnings:
        report(f"warning: {warning}")
    return check


def _int8_products(bundle: Bundle, target: Target) -> Int8Products | None:
    if bundle.manifest.plan.target_weights != "int8":
        return None
    weights = ModelWeights(target.model)
    graph = ir.load(bundle.path(bundle.manifest.engines["target"].file))
    return Int8Products(weights, stored_int8(graph, weights))


def _on_cpu(bundle: Bundle) -> Bundle:
    """Return the same files for ONNX Runtime's CPU provider, whatever backend they are for."""
    gpu_alone: dict[str, Any] = {
        "verify_widths": (),
        "compute_capability": None,
        "workspace_bytes": None,
    }
    plan = replace(bundle.manifest.plan, backend="ort-cpu", **gpu_alone)
    return replace(bundle, manifest=replace(bundle.manifest, plan=plan))


def _tokens(target: Target, limit: int) -> NDArray[np.int64]:
    """Return several hundred token ids of ordinary text, all inside the vocabulary.

    A tokenizer that does not know the words would map all of them to "unknown", and a text of
    equal tokens hides a wrong mask; ids are drawn at random in that case.
    """
    ids = target.tokenizer(TEXT * 4, add_special_tokens=False)["input_ids"]
    known = [i for i in ids if i < target.vocab_size]
    if len(set(known)) < min(_FEW_TOKENS, target.vocab_size // 2):
        known = np.random.default_rng(0).integers(0, target.vocab_size, _NUM_TOKENS).tolist()
    repeated = (known * (_NUM_TOKENS // len(known) + 1))[: min(_NUM_TOKENS, limit)]
    return np.asarray(repeated, np.int64)


def _check_target(
    bundle: Bundle, target: Target, reference: Reference, tolerance: float
) -> dict[str, Any]:
    engine = TargetEngine(bundle, num_threads(), Clock())
    tree = _check_tree(reference.tokens, engine.max_verify_rows)
    if bundle.manifest.plan.target_weights == "int8":
        text = reference.tokens[:_PRODUCT_TOKENS]
        errors = check_products(bundle, target, text, tree)
    else:
        errors = {
            **_teacher_forced(engine, reference),
            "prefill_logits": _prefill_error(engine, reference),
            "tree_logits": _tree_error(engine, reference, tree),
        }
    judge("target", errors, tolerance)
    return {"tokens": len(reference.tokens), "tolerance": tolerance, "relative_errors": errors}


def _teacher_forced(engine: TargetEngine, reference: Reference) -> dict[str, float]:
    """Compare the text, verified as accepted chains in one call after the other."""
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
            # np.maximum propagates NaN.
            worst[name] = float(np.maximum(worst[name], max_difference(getattr(out, name), rows)))
    return {name: relative_to(worst[name], whole) for name, whole in expected.items()}


def _prefill_error(engine: TargetEngine, reference: Reference) -> float:
    """Compare the last row of the text, prefilled in chunks."""
    tokens, chunk = reference.tokens, engine.prefill_chunk
    for past in range(0, len(tokens), chunk):
        out = engine.prefill(tokens[past : past + chunk], past, want_logits=True)
    assert out.logits is not None
    return relative_error(out.logits[0], reference.logits[-1])


def _check_tree(text: NDArray[np.int64], max_nodes: int) -> Tree:
    """Return a tree of tokens of the text that branches several times."""
    # Equal siblings would hide an exchange of rows.
    different = np.random.default_rng(0).permutation(np.unique(text))
    num_nodes = min(len(_TREE_PARENTS), max_nodes)
    tokens = np.resize(different, len(_TREE_PARENTS))[:num_nodes]
    return Tree(tokens, np.asarray(_TREE_PARENTS[:num_nodes], np.int32))


def _tree_error(engine: TargetEngine, reference: Reference, tree: Tree) -> float:
    """Compare one tree call after the prefilled text with a separate PyTorch call for
    every path.
    """
    past = len(reference.tokens)
    out = engine.verify(tree, past, want_logits=True)
    assert out.logits is not None
    errors = []
    for leaf in (node for node in range(tree.num_nodes) if not tree.children(node)):
        path = [0, *tree.path(leaf)]
        text = np.concatenate([reference.tokens, tree.tokens[path]])
        errors.append(relative_error(out.logits[path], reference.run(text)[0][past:]))
    return max(errors)


def first_position_acceptance(bundle: Bundle, name: str) -> tuple[float, list[AnsweredText]]:
    """Return the fraction of first tokens of draft `name` that the target accepts, greedy, on
    PROMPTS, and the texts it was measured on.
    """
    engine = Engine(bundle, num_threads())
    chat = engine.chat_template is not None
    accepted = proposed = 0.0
    texts = []
    for prompt in PROMPTS:
        ids = engine.encode(prompt, chat=chat)[: engine.plan.max_seq_len // 2]
        result = engine.generate(
            ids,
            max_new_tokens=_ANSWER_TOKENS,
            draft_top_k=1,
            draft_depth=2,
            num_draft_tokens=2,
            tree="dynamic",
            drafter=name,
        )
        texts.append(AnsweredText(np.array([*ids, *result.token_ids], np.int64), len(ids)))
        stats = result.stats
        rounds = stats.rounds - stats.plain_rounds
        proposed += rounds
        accepted += rounds * (stats.accepted_by_position[0] if stats.accepted_by_position else 0.0)
    return accepted / proposed if proposed else 0.0, texts


def _summary(name: str, result: dict[str, Any]) -> str:
    errors = result["relative_errors"]
    listed = ", ".join(f"{key} {value:.1e}" for key, value in errors.items())
    return (
        f"{name} against PyTorch, relative errors: {listed} (tolerance {result['tolerance']:.0e})"
    )
