"""The self-check of an export: the finished engines against the PyTorch model they came from.

The engines run through the runtime's own classes, so what is compared is what will be served.
Errors are relative: the largest difference over the largest reference value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.export.checks.check_texts import PROMPTS, TEXT
from eagle3.export.checks.readings import Reading, Text, causal_attention
from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead
from eagle3.export.graphs.weights import block_int8, int8_block
from eagle3.export.targets.target import Target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.engine import Engine
from eagle3.runtime.errors import SelfCheckFailed
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.ort.session import Clock
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import NEAR_ZERO_ACCEPTANCE
from eagle3.runtime.trees.tree import Tree

TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
# int8 weights: the reference has them too, what is left is the kernel's int8 activations.
INT8_TOLERANCE = 1e-1

_NUM_TOKENS = 384
_FEW_TOKENS = 64
_ANSWER_TOKENS = 48
_DRAFT_STEPS = 3
# A tree whose branches part at the root and again deep down: node 0 is the root.
_TREE_PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9)

Array = NDArray[Any]
_AnyHead = EagleHead | Eagle1Head
_Module = TypeVar("_Module", bound=torch.nn.Module)


class Checked(Protocol):
    """A draft that can be compared with PyTorch."""

    def check(
        self, bundle: Bundle, name: str, reference: Reference, tolerance: float
    ) -> dict[str, Any]:
        """Its engines' errors. Raises SelfCheckFailed."""
        ...

    def readings(self, target: Target, texts: Sequence[Text]) -> tuple[Reading, ...]:
        """How it does as it was read, and as it might have been."""
        ...


@dataclass
class SelfCheck:
    """What was measured, as it stands in the manifest: `engines` of the target, each draft."""

    engines: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    readings: dict[str, tuple[Reading, ...]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """What the user should know although the export succeeded."""
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
    """Compares and measures; raises SelfCheckFailed, with the errors, above the tolerance.

    drafts: by name in the bundle, those that are to be compared.
    """
    plan, check = bundle.manifest.plan, SelfCheck()
    if plan.dtype not in TOLERANCE:
        reason = f"{plan.dtype} engines cannot run on this machine's CPU"
        report(f"not compared with PyTorch: {reason}")
        check.engines["skipped"] = reason
        return check
    bundle = _on_cpu(bundle)
    tokens = _tokens(target, plan.max_seq_len - len(_TREE_PARENTS))
    reference = Reference(target, tokens, bundle.manifest.target.aux_layer_ids)
    tolerance = TOLERANCE[plan.dtype]
    check.engines = _check_target(bundle, reference, tolerance)
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


def _on_cpu(bundle: Bundle) -> Bundle:
    """The same files for ONNX Runtime's CPU provider, whatever backend they are for."""
    gpu_alone: dict[str, Any] = {
        "verify_widths": (),
        "compute_capability": None,
        "workspace_bytes": None,
    }
    plan = replace(bundle.manifest.plan, backend="ort-cpu", **gpu_alone)
    return replace(bundle, manifest=replace(bundle.manifest, plan=plan))


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


class Reference:
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


def _check_target(bundle: Bundle, reference: Reference, tolerance: float) -> dict[str, Any]:
    engine = TargetEngine(bundle, num_threads(), Clock())
    errors = {
        **_teacher_forced(engine, reference),
        "prefill_logits": _prefill_error(engine, reference),
        "tree_logits": _tree_error(engine, reference),
    }
    judge("target", errors, tolerance)
    return {"tokens": len(reference.tokens), "tolerance": tolerance, "relative_errors": errors}


def num_threads() -> int:
    return max(1, torch.get_num_threads())


def _teacher_forced(engine: TargetEngine, reference: Reference) -> dict[str, float]:
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


def _prefill_error(engine: TargetEngine, reference: Reference) -> float:
    """The text prefilled in chunks: the last row."""
    tokens, chunk = reference.tokens, engine.prefill_chunk
    for past in range(0, len(tokens), chunk):
        out = engine.prefill(tokens[past : past + chunk], past, want_logits=True)
    assert out.logits is not None
    return relative_error(out.logits[0], reference.logits[-1])


def _tree_error(engine: TargetEngine, reference: Reference) -> float:
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


def check_head(
    bundle: Bundle,
    name: str,
    module: _AnyHead,
    table: Tensor,
    reference: Reference,
    tolerance: float,
) -> dict[str, Any]:
    """Per-step logits: rows with the target's features, then what the head feeds back, K = 2."""
    engine = DraftEngine(bundle, num_threads(), Clock(), name)
    if bundle.manifest.drafts[name].weights == "int8":
        module = with_int8_weights(module)
    assert reference.features is not None
    count = min(48, len(reference.tokens) - 1, engine.max_rows)
    features = reference.features[:count, engine.columns]
    engine.feature_slots(count)[:] = features
    next_ids = reference.tokens[1 : count + 1]
    out = engine.extend(next_ids, top_k=2, want_logits=True)
    path = _DraftPath(module, reference, features, table)
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
    judge(name, errors, tolerance)
    return {"tolerance": tolerance, "relative_errors": errors}


class _DraftPath:
    """The head in plain PyTorch, without cache or tree: one path at a time, from the start.

    table [V,d]: the embedding that it reads.
    """

    def __init__(
        self, module: _AnyHead, reference: Reference, features: Array, table: Tensor
    ) -> None:
        self._module, self._table = module, table
        self._features = torch.from_numpy(features)[None].to(module.fc.weight)
        self._tokens = reference.tokens[1 : len(features) + 1].tolist()

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
        embedding = torch.nn.functional.embedding(torch.tensor([tokens]), self._table)
        out: Tensor = self._module(embedding, g, positions, causal_attention)
        return out


def with_int8_weights(module: _Module) -> _Module:
    """A copy whose matrices hold the values that the int8 engine reads."""
    module = copy.deepcopy(module)
    for linear in (m for m in module.modules() if isinstance(m, torch.nn.Linear)):
        weight = linear.weight.numpy().T
        block = int8_block(weight.shape[0])
        if block is not None:
            stored, scales = block_int8(np.ascontiguousarray(weight), block)
            values = stored.astype(np.float32) * np.repeat(scales, block, axis=0)
            linear.weight.copy_(torch.from_numpy(values.T.copy()))
    return module


def first_position_acceptance(bundle: Bundle, name: str) -> tuple[float, list[Text]]:
    """Share of the first tokens of draft `name` that the target accepts, greedy, on PROMPTS.

    With the texts that it was measured on.
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
        texts.append(Text(np.array([*ids, *result.token_ids], np.int64), len(ids)))
        stats = result.stats
        rounds = stats.rounds - stats.plain_rounds
        proposed += rounds
        accepted += rounds * (stats.accepted_by_position[0] if stats.accepted_by_position else 0.0)
    return accepted / proposed if proposed else 0.0, texts


def judge(name: str, errors: dict[str, float], tolerance: float) -> None:
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
