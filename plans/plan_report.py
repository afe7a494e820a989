"""The report of `eagle3 plan check`: memory, costs of the calls, and expected speedup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.facts import DraftFacts, TargetFacts
from eagle3.plans.memory import Memory, check_memory, size_text
from eagle3.plans.plan import Plan
from eagle3.plans.preset import Preset
from eagle3.plans.roofline import Call, RoundEstimate, expected_round
from eagle3.runtime.errors import PlanError


@dataclass(frozen=True)
class PlanReport:
    """Estimates for one target and draft under one plan on one device.

    taus: acceptance lengths for which the report lists the speedup.
    """

    target: TargetFacts
    draft: DraftFacts | None
    plan: Plan
    device: DeviceSpec
    memory: Memory
    round: RoundEstimate
    taus: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, in bytes, operations and ms."""
        cost = self.round
        return {
            "target": asdict(self.target),
            "draft": None if self.draft is None else asdict(self.draft),
            "plan": self.plan.to_json(),
            "unbuilt": list(self.plan.unbuilt),
            "device": {**asdict(self.device), "usable_bytes": self.device.usable_bytes},
            "memory": self.memory.to_json(),
            "context": cost.context,
            "calls": {str(rows): _call_json(call) for rows, call in cost.verify.items()},
            "draft_calls": [_call_json(call) for call in cost.draft],
            "round": self._round_json(),
        }

    def lines(self) -> list[str]:
        """Return the report as text, one fact per line."""
        rows = [
            ("target", _target_text(self.target)),
            ("draft", _draft_text(self.draft)),
            ("device", _device_text(self.device, self.plan)),
            ("plan", _plan_text(self.plan)),
            *self._memory_rows(),
            *(("call", _call_text(n, each, self.plan)) for n, each in self.round.verify.items()),
            *self._round_rows(),
            *(("note", text) for text in self.target.notes),
        ]
        return [f"{name:11}  {text}" for name, text in rows]

    def _round_json(self) -> dict[str, Any] | None:
        cost = self.round
        if self.draft is None:
            return None
        return {
            "verify_width": cost.verify_width,
            "draft_ms": cost.draft_ms,
            "verify_ms": cost.verify_ms,
            "ms": cost.round_ms,
            "serial_ms": cost.serial_round_ms,
            "break_even_tau": cost.break_even_tau,
            "speedup": {f"{tau:g}": cost.speedup(tau) for tau in self.taus},
            "serial_speedup": {f"{tau:g}": cost.serial_speedup(tau) for tau in self.taus},
        }

    def _memory_rows(self) -> list[tuple[str, str]]:
        m, usable = self.memory, self.device.usable_bytes
        left = size_text(usable - m.total)
        copies = f", the draft's copy of target weights {size_text(m.draft_copies)}"
        weights = self._of_each(m.target_weights, m.draft_weights)
        return [
            ("weights", f"{weights}{copies if m.draft_copies else ''}"),
            ("kv cache", self._of_each(m.target_kv, m.draft_kv)),
            ("activations", self._of_each(m.target_activations, m.draft_activations)),
            ("total", f"{size_text(m.total)} of {size_text(usable)}: fits, {left} free"),
            ("files", f"{self._of_each(m.target_file, m.draft_file)} on disk"),
        ]

    def _of_each(self, target: int, draft: int) -> str:
        of_draft = "" if self.draft is None else f", draft {size_text(draft)}"
        return f"target {size_text(target)}{of_draft}"

    def _round_rows(self) -> list[tuple[str, str]]:
        cost = self.round
        if not cost.draft:
            return []
        bounds = " and ".join(sorted({call.bound for call in cost.draft}))
        table = ", ".join(
            f"tau {tau:g}: {cost.serial_speedup(tau):.2f}-{cost.speedup(tau):.2f}x"
            if abs(cost.serial_speedup(tau) - cost.speedup(tau)) >= 0.005
            else f"tau {tau:g}: {cost.speedup(tau):.2f}x"
            for tau in self.taus
        )
        return [
            ("drafting", f"{len(cost.draft)} calls, {cost.draft_ms:.2f} ms, bound by {bounds}"),
            (
                "round",
                f"{cost.round_ms:.2f} ms, verifying {cost.verify_width} rows; faster than plain"
                f" decoding if the acceptance length tau is above {cost.break_even_tau:.2f}",
            ),
            (
                "speedup",
                f"{table} (from no overlap of memory traffic and arithmetic to full overlap)",
            ),
        ]


def plan_report(
    target: TargetFacts,
    draft: DraftFacts | None,
    preset: Preset,
    context: int | None = None,
    taus: Sequence[float] = (),
) -> PlanReport:
    """Estimate memory and latency of a target and draft under a preset's plan on its device.

    context: tokens in the KV cache, see `expected_round`. taus: acceptance lengths for the speedup;
    by default 1 to depth + 1, the most that a round of the tree can commit. Raises PlanError, with
    both numbers, if the plan does not fit the device or exceeds the target's positions, or if the
    context or a tau is out of range.
    """
    plan, device = preset.plan, preset.device
    limit = target.max_position_embeddings
    if limit is not None and plan.max_seq_len > limit:
        raise PlanError(
            f"max_seq_len is {plan.max_seq_len}, but {target.name} supports only {limit} positions:"
            f" use --max-seq-len {limit} or less"
        )
    most = plan.tree.depth_in_use + 1
    beyond = [tau for tau in taus if not 1 <= tau <= most]
    if beyond:
        raise PlanError(
            f"tau must be from 1 to {most}, the tokens per round with a tree of"
            f" {plan.tree.depth_in_use} levels, got {beyond[0]:g}"
        )
    return PlanReport(
        target,
        draft,
        plan,
        device,
        check_memory(target, draft, plan, device),
        expected_round(target, draft, plan, device, context),
        tuple(taus) or tuple(float(n) for n in range(1, most + 1)),
    )


def _call_json(call: Call) -> dict[str, Any]:
    return {**asdict(call), "ms": call.ms, "serial_ms": call.serial_ms, "bound": call.bound}


def _call_text(rows: int, call: Call, plan: Plan) -> str:
    what = "1 row (plain decoding)" if rows == 1 else f"{rows} rows"
    each = f" for each of {plan.batch} sequences" if plan.batch > 1 else ""
    return (
        f"{what}{each}: {call.ms:.2f} ms, bound by {call.bound} ({call.num_bytes / 1e9:.3f} GB"
        f" in {call.memory_ms:.2f} ms, {call.flops / 1e9:.1f} GFLOP in {call.compute_ms:.2f} ms)"
    )


def _target_text(target: TargetFacts) -> str:
    a, experts = target.attention, target.experts
    mixture = f", {experts.per_token} of {experts.num_experts} experts per token" if experts else ""
    return (
        f"{target.name}: {_count(target.num_parameters)} parameters, {a.num_layers} layers, hidden"
        f" size {target.hidden_size}, {a.num_kv_heads} KV heads of size {a.head_dim}{mixture}"
    )


def _draft_text(draft: DraftFacts | None) -> str:
    if draft is None:
        return "none: plain decoding only (add a head with --draft)"
    return (
        f"{draft.name}: {_count(draft.num_parameters)} parameters, draft vocabulary"
        f" {draft.draft_vocab_size}"
    )


def _device_text(device: DeviceSpec, plan: Plan) -> str:
    usable, all_of_it = size_text(device.usable_bytes), size_text(device.memory_bytes)
    peak = device.flops_per_s(plan.dtype) / 1e12
    return (
        f"{device.name}: {usable} of {all_of_it} usable,"
        f" {device.bandwidth_bytes_per_s / 1e9:g} GB/s, {peak:g} TFLOP/s in {plan.dtype}"
    )


def _plan_text(plan: Plan) -> str:
    tree, stored = plan.tree, plan.draft_weights
    weights = "" if stored == "same" else f", draft weights {stored}"
    target = "" if plan.target_weights == "same" else f", target weights {plan.target_weights}"
    return (
        f"{plan.backend}, {plan.dtype}{target}{weights}, batch {plan.batch}, context"
        f" {plan.max_seq_len}, prefill chunk {plan.prefill_chunk}; tree with top-k"
        f" {tree.draft_top_k}, depth {tree.draft_depth}, {tree.num_draft_tokens} draft tokens"
    )


def _count(parameters: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6)):
        if parameters >= factor:
            return f"{parameters / factor:.2f}{unit}"
    return str(parameters)
