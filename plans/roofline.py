"""Roofline estimate of a round: lower bounds of latency from memory traffic and arithmetic.

    bytes   weights of every matrix, once, + KV cache read and written + logits written
    FLOPs   2 * parameters * tokens + 4 * L * heads * head_dim * tokens * keys
    ms      max(bytes / bandwidth, FLOPs / peak): full overlap, the lower bound
    serial  bytes / bandwidth + FLOPs / peak: no overlap, as on a small CPU

Activations, kernel launches and work on the host are not included. A speedup is a ratio of two
estimates: it shows what a plan can gain, and only a measurement shows what it does gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.facts import Attention, DraftFacts, TargetFacts
from eagle3.plans.memory import kv_bytes_per_token, matrix_bytes, target_matrix_bytes
from eagle3.plans.plan import Plan, is_int8_built
from eagle3.runtime.errors import PlanError

_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Call:
    """Cost of one engine call: bytes moved, operations, and the time of each in ms."""

    num_bytes: float
    flops: float
    memory_ms: float
    compute_ms: float

    @property
    def ms(self) -> float:
        """Lower bound in ms: memory traffic and arithmetic overlap completely."""
        return max(self.memory_ms, self.compute_ms)

    @property
    def serial_ms(self) -> float:
        """Time in ms if memory traffic and arithmetic do not overlap."""
        return self.memory_ms + self.compute_ms

    @property
    def bound(self) -> str:
        """The longer of the two: "memory" or "compute"."""
        return "memory" if self.memory_ms >= self.compute_ms else "compute"


@dataclass(frozen=True)
class RoundEstimate:
    """Costs of the calls of one round, and of plain decoding for comparison.

    context: tokens in the KV cache. verify: rows of a target call -> its cost; 1 row is plain
    decoding. verify_width: rows of this plan's verification, padding included. draft: the draft
    calls of the round in order; empty without a draft.
    """

    context: int
    verify: Mapping[int, Call]
    verify_width: int
    draft: tuple[Call, ...]

    @property
    def plain(self) -> Call:
        """The target call of plain decoding, one token without a draft."""
        return self.verify[1]

    @property
    def draft_ms(self) -> float:
        """Lower bound of the draft calls in ms."""
        return sum(call.ms for call in self.draft)

    @property
    def verify_ms(self) -> float:
        """Lower bound of the verification in ms."""
        return self.verify[self.verify_width].ms

    @property
    def round_ms(self) -> float:
        """Lower bound of drafting plus verification in ms."""
        return self.draft_ms + self.verify_ms

    @property
    def serial_round_ms(self) -> float:
        """`round_ms` if memory traffic and arithmetic of a call do not overlap."""
        drafting = sum(call.serial_ms for call in self.draft)
        return drafting + self.verify[self.verify_width].serial_ms

    @property
    def break_even_tau(self) -> float:
        """Acceptance length above which speculation is faster than plain decoding."""
        return self.round_ms / self.plain.ms

    def speedup(self, tau: float) -> float:
        """Return the speedup over plain decoding at acceptance length tau.

        A round yields tau tokens in `round_ms`, a plain call one token in `plain.ms`.
        """
        return tau * self.plain.ms / self.round_ms

    def serial_speedup(self, tau: float) -> float:
        """Return `speedup` computed from the serial times."""
        return tau * self.plain.serial_ms / self.serial_round_ms


def expected_round(
    target: TargetFacts,
    draft: DraftFacts | None,
    plan: Plan,
    device: DeviceSpec,
    context: int | None = None,
) -> RoundEstimate:
    """Return the costs of a round with `context` tokens in the KV cache.

    context: by default 512, limited to half of max_seq_len and to what fits the plan. Raises
    PlanError if the context does not fit the plan, or if the device has no peak for its dtype.
    """
    plan = plan.resolved()
    filled = _context(plan, context)
    width = _verify_width(plan)
    verify = {
        rows: target_call(target, plan, device, rows, filled) for rows in _widths(plan, width)
    }
    growth = draft_growth(draft, plan, device, filled) if draft is not None else ()
    return RoundEstimate(filled, verify, width if draft is not None else 1, growth)


def target_call(
    target: TargetFacts, plan: Plan, device: DeviceSpec, rows: int, context: int
) -> Call:
    """Return the cost of a target call on `rows` rows of each of B sequences.

    Logits are computed for all rows. context: tokens in the KV cache before the call.
    """
    tokens = plan.batch * rows
    keys = _keys(plan, plan.cache_capacity, context + rows)
    read, active = float(target.dense_parameters), float(target.dense_parameters)
    if target.experts is not None:
        read += target.experts.read_parameters(tokens)
        active += target.experts.active_parameters
    head = target.embedding_parameters  # the lm_head has the size of the embedding, tied or not
    weights = target_matrix_bytes(read, target, plan)
    if target.tied and not is_int8_built(plan):  # the lm_head is stored as the embedding is
        weights += matrix_bytes(head, "same", plan.dtype, target.hidden_size)
    else:
        weights += target_matrix_bytes(head, target, plan)
    logits = tokens * target.vocab_size * _LOGIT_BYTES
    products = 2.0 * tokens * (active + head)
    is_int8 = plan.target_weights == "int8" and is_int8_built(plan) and "int8" in device.peak_flops
    dtype = "int8" if is_int8 else plan.dtype
    return _call(plan, device, target.attention, rows, keys, weights + logits, products, dtype)


def draft_growth(
    draft: DraftFacts, plan: Plan, device: DeviceSpec, context: int
) -> tuple[Call, ...]:
    """Return the costs of the draft calls of a round: committed rows, then one frontier per level.

    The first call runs depth + 1 rows, the most that a round commits, and includes fc.
    """
    depth = plan.tree.depth_in_use
    first = _draft_call(draft, plan, device, depth + 1, 1, context, fuse=True)
    if depth == 1:
        return (first,)
    rows = ceil(plan.tree.num_draft_rows / (depth - 1))
    step = _draft_call(draft, plan, device, rows, rows, context, fuse=False)
    return (first, *[step] * (depth - 1))


def _draft_call(
    draft: DraftFacts,
    plan: Plan,
    device: DeviceSpec,
    rows: int,
    logit_rows: int,
    context: int,
    *,
    fuse: bool,
) -> Call:
    keys = _keys(plan, plan.draft_capacity, context + rows)
    layer = draft.step_parameters + (draft.fuse_parameters if fuse else 0)
    read = layer + draft.lm_head_parameters
    weights = matrix_bytes(read, plan.draft_weights, plan.dtype, draft.hidden_size)
    logits = plan.batch * logit_rows * draft.draft_vocab_size * _LOGIT_BYTES
    products = 2.0 * plan.batch * (rows * layer + logit_rows * draft.lm_head_parameters)
    return _call(plan, device, draft.attention, rows, keys, weights + logits, products)


def _call(
    plan: Plan,
    device: DeviceSpec,
    attention: Attention,
    rows: int,
    keys: int,
    other_bytes: float,
    products: float,
    dtype: str | None = None,
) -> Call:
    """Return the cost of a call, with its KV cache traffic and the products of attention added.

    The cache is read for `keys` tokens and written for `rows` tokens per sequence. dtype: that of
    `products`; None: the plan's, which attention always has.
    """
    cache = plan.batch * (keys + rows) * kv_bytes_per_token(attention, plan)
    num_bytes = other_bytes + cache
    of_attention = plan.batch * attention.flops(rows, keys)
    compute_s = products / device.flops_per_s(dtype or plan.dtype)
    compute_s += of_attention / device.flops_per_s(plan.dtype)
    return Call(
        num_bytes,
        products + of_attention,
        memory_ms=1e3 * num_bytes / device.bandwidth_bytes_per_s,
        compute_ms=1e3 * compute_s,
    )


def _keys(plan: Plan, capacity: int, filled: int) -> int:
    """Return the keys that attention reads per row.

    The `portable` lowering reads the whole static cache with a mask, `ort` only its filled slots.
    """
    return capacity if plan.lowering == "portable" else filled


def _context(plan: Plan, context: int | None) -> int:
    most = plan.max_seq_len - plan.max_draft_tokens - 1
    if context is None:
        return min(512, plan.max_seq_len // 2, most)
    if not 0 <= context <= most:
        raise PlanError(
            f"context must be from 0 to {most} (max_seq_len {plan.max_seq_len} minus the root and"
            f" max_draft_tokens {plan.max_draft_tokens}), got {context}"
        )
    return context


def _verify_width(plan: Plan) -> int:
    """Return the rows of the default tree's verification: the root and the nodes, padded."""
    nodes = min(plan.tree.num_draft_tokens, plan.tree.num_candidates)
    return next((w for w in plan.verify_widths if w > nodes), nodes + 1)


def _widths(plan: Plan, width: int) -> list[int]:
    """Return the row counts to estimate.

    These are plain decoding, the default tree, the largest tree, and the plan's verify_widths or,
    if there are none, powers of two.
    """
    most = plan.max_draft_tokens + 1
    widths = plan.verify_widths or tuple(2**i for i in range(most.bit_length()) if 2**i < most)
    return sorted({1, width, most, *widths})
