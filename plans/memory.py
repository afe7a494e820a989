"""Estimate the memory of a target and a head under a plan, and whether it fits a device.

Letters: B batch, S cache slots, N rows of the widest call, M rows with logits, d hidden size, I
intermediate size, L layers, V vocabulary. `item` is the number of bytes per value.

    weights      parameters * item; in int8, parameters * (1 + item / block), one scale per block;
                 in a target for the CPU, block is the depth of the matrix
    KV cache     B * S * 2 * L * kv_heads * head_dim * item
    activations  B * N * (4 d + 2 I + (heads + 2 kv_heads) * head_dim + features) * item
                 + B * N * S * item for the mask
                 + B * heads * N * S * 4 for the attention scores, unless attention is fused
                 + B * M * V * 4 for the logits

Activations are those of one layer, because layers run one after another and reuse the buffers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle3.plans.backends import TENSORRT_BACKENDS
from eagle3.plans.device_spec import DeviceSpec
from eagle3.plans.facts import Attention, DraftFacts, TargetFacts
from eagle3.plans.plan import ITEM_BYTES, Plan, is_int8_built
from eagle3.runtime.errors import PlanError

# Rows that share one scale. Like the export, the estimate takes the largest that divides d.
_INT8_BLOCKS = (128, 64, 32)


@dataclass(frozen=True)
class Memory:
    """Memory of a target and a draft head, in bytes. No byte is counted in two fields, except that
    `target_file` and `draft_file` are sizes on disk and not part of the total."""

    target_weights: int
    draft_weights: int
    draft_copies: int
    """The draft engine's copies of the target's embedding, and of the target's lm_head if the head
    has none of its own. Zero on the CPU, where both engines map the same file."""
    target_kv: int
    draft_kv: int
    target_activations: int
    draft_activations: int
    target_file: int
    draft_file: int

    @property
    def weights(self) -> int:
        """Bytes of all weights on the device."""
        return self.target_weights + self.draft_weights + self.draft_copies

    @property
    def kv(self) -> int:
        """Bytes of both KV caches."""
        return self.target_kv + self.draft_kv

    @property
    def activations(self) -> int:
        """Bytes of the activations of both engines."""
        return self.target_activations + self.draft_activations

    @property
    def total(self) -> int:
        """Bytes that the device must have free."""
        return self.weights + self.kv + self.activations

    def to_json(self) -> dict[str, int]:
        """Return the fields and the total as a JSON object, in bytes."""
        return {**asdict(self), "total": self.total}


def matrix_bytes(parameters: float, stored: str, dtype: str, hidden_size: int) -> float:
    """Return the bytes of `parameters` parameters of matrices.

    stored: "same" for values of `dtype`, or "int8" for int8 values with scales of `dtype`.
    hidden_size: determines the block of an int8 scale.
    """
    if stored == "same":
        return parameters * ITEM_BYTES[dtype]
    block = next((each for each in _INT8_BLOCKS if hidden_size % each == 0), _INT8_BLOCKS[-1])
    return parameters * (1 + ITEM_BYTES[dtype] / block)


def kv_bytes_per_token(attention: Attention, plan: Plan) -> int:
    """Return the KV cache bytes of one token of one sequence: keys and values of all layers."""
    return attention.kv_values_per_token * ITEM_BYTES[plan.resolved().kv_dtype]


def memory(target: TargetFacts, draft: DraftFacts | None, plan: Plan) -> Memory:
    """Return the memory that the engines of a plan use on the device, all buffers allocated."""
    weights = _target_weights(target, plan)
    own, copies = _draft_weights(target, draft, plan)
    return Memory(
        target_weights=weights,
        draft_weights=own,
        draft_copies=copies,
        target_kv=plan.batch * plan.cache_capacity * kv_bytes_per_token(target.attention, plan),
        draft_kv=_draft_kv(draft, plan),
        target_activations=_target_activations(target, draft, plan),
        draft_activations=_draft_activations(draft, plan),
        target_file=weights,
        draft_file=own + copies,
    )


def check_memory(
    target: TargetFacts, draft: DraftFacts | None, plan: Plan, device: DeviceSpec
) -> Memory:
    """Return `memory(target, draft, plan)` if it fits the device.

    Raises PlanError otherwise, with both sizes and the changes that would make the plan fit.
    """
    needed = memory(target, draft, plan)
    if needed.total <= device.usable_bytes:
        return needed
    parts = (
        f"weights {size_text(needed.weights)}, KV cache {size_text(needed.kv)}, activations"
        f" {size_text(needed.activations)}"
    )
    has = (
        f"{size_text(device.usable_bytes)} ({size_text(device.memory_bytes)} less"
        f" {size_text(device.reserved_bytes)} reserved)"
    )
    raise PlanError(
        f"{target.name} under this plan needs {size_text(needed.total)} ({parts}), but"
        f" {device.name} has {has}; {_what_fits(target, draft, plan, device)}"
    )


def longest_context(
    target: TargetFacts, draft: DraftFacts | None, plan: Plan, device: DeviceSpec
) -> int | None:
    """Return the largest max_seq_len that fits the device, at most the plan's own.

    Returns None if not even the smallest possible max_seq_len fits.
    """
    low, high = _shortest(plan), plan.max_seq_len
    if not _fits(target, draft, _with_context(plan, low), device):
        return None
    while low < high:  # bisection, since memory grows with the context
        middle = (low + high + 1) // 2
        if _fits(target, draft, _with_context(plan, middle), device):
            low = middle
        else:
            high = middle - 1
    return low


def _what_fits(
    target: TargetFacts, draft: DraftFacts | None, plan: Plan, device: DeviceSpec
) -> str:
    """Return the end of an error message: the single changes that would make the plan fit."""
    ways = []
    shorter = longest_context(target, draft, plan, device)
    if shorter is not None:
        ways.append(f"max_seq_len {shorter} or less would fit")
    changes: list[dict[str, Any]] = [{"target_weights": "int8"}]
    if draft is not None:
        changes.insert(0, {"draft_weights": "int8"})
    if plan.dtype == "float32" and "float16" in device.peak_flops:
        changes.append({"dtype": "float16"})
    for change in changes:
        other = replace(plan, **change)
        if _fits(target, draft, other, device):
            ((name, value),) = change.items()
            unbuilt = " (not implemented yet)" if other.unbuilt else ""
            ways.append(f"{name} {value} would fit{unbuilt}")
    if draft is not None and _fits(target, None, plan, device):
        ways.append("the target without a draft would fit")
    return ", ".join(ways) or (
        "neither a shorter context nor int8 weights would make it fit: use a smaller target or a"
        " larger device"
    )


def _fits(target: TargetFacts, draft: DraftFacts | None, plan: Plan, device: DeviceSpec) -> bool:
    return memory(target, draft, plan).total <= device.usable_bytes


def _shortest(plan: Plan) -> int:
    """Return the smallest max_seq_len that holds the widest verification."""
    return max(2, plan.max_draft_tokens + 1, *plan.verify_widths)


def _with_context(plan: Plan, max_seq_len: int) -> Plan:
    chunk = min(plan.prefill_chunk, max_seq_len)
    return replace(plan, max_seq_len=max_seq_len, prefill_chunk=chunk)


def _target_weights(target: TargetFacts, plan: Plan) -> int:
    """Return the bytes of the target's weights.

    The layers and an untied lm_head are stored as `target_weights` specifies. The embedding table,
    and an lm_head that is tied to it, are int8 on the CPU only.
    """
    heads = 0 if target.tied else target.embedding_parameters
    matrices = target.layer_parameters + heads
    if plan.target_weights == "int8" and is_int8_built(plan):
        matrices += target.embedding_parameters
    rest = target.num_parameters - matrices
    return round(target_matrix_bytes(matrices, target, plan) + rest * ITEM_BYTES[plan.dtype])


def target_matrix_bytes(parameters: float, target: TargetFacts, plan: Plan) -> float:
    """Return the bytes of `parameters` parameters of the target's matrices."""
    if plan.target_weights == "int8" and is_int8_built(plan):
        return parameters * (1 + ITEM_BYTES[plan.dtype] / target.hidden_size)
    return matrix_bytes(parameters, plan.target_weights, plan.dtype, target.hidden_size)


def _draft_weights(target: TargetFacts, draft: DraftFacts | None, plan: Plan) -> tuple[int, int]:
    """Return the bytes of the head's own weights, and of its copies of the target's weights."""
    if draft is None:
        return 0, 0
    own = matrix_bytes(draft.num_parameters, plan.draft_weights, plan.dtype, draft.hidden_size)
    if plan.backend == "ort-cpu":
        return round(own), 0
    copies = target.embedding_parameters * ITEM_BYTES[plan.dtype]
    if not draft.own_lm_head and not target.tied:
        copies *= 2
    return round(own), copies


def _draft_kv(draft: DraftFacts | None, plan: Plan) -> int:
    if draft is None:
        return 0
    return plan.batch * plan.draft_capacity * kv_bytes_per_token(draft.attention, plan)


def _widest_verification(plan: Plan) -> int:
    return max(plan.max_draft_tokens + 1, *plan.resolved().verify_widths, 1)


def _target_activations(target: TargetFacts, draft: DraftFacts | None, plan: Plan) -> int:
    verified = _widest_verification(plan)
    rows = max(plan.prefill_chunk, verified)
    features = draft.feature_size if draft is not None else 0
    width = 4 * target.hidden_size + 2 * target.intermediate_size + features
    layer = _layer_bytes(target.attention, width, rows, plan.cache_capacity, plan)
    return plan.batch * (layer + verified * target.vocab_size * 4)


def _draft_activations(draft: DraftFacts | None, plan: Plan) -> int:
    if draft is None:
        return 0
    rows = max(plan.prefill_chunk, plan.max_draft_tokens + 1)
    width = 4 * draft.hidden_size + 2 * draft.intermediate_size + draft.feature_size
    layer = _layer_bytes(draft.attention, width, rows, plan.draft_capacity, plan)
    return plan.batch * (layer + plan.tree.top_k_in_use * draft.draft_vocab_size * 4)


def _layer_bytes(attention: Attention, width: int, rows: int, slots: int, plan: Plan) -> int:
    """Return the bytes of one layer's activations for one sequence."""
    projected = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    values = rows * (width + projected) + rows * slots
    scores = attention.num_heads * rows * slots * 4 if _writes_scores(plan) else 0
    return values * ITEM_BYTES[plan.dtype] + scores


def _writes_scores(plan: Plan) -> bool:
    """Return whether attention writes its scores to memory.

    Fused attention does not. TensorRT fuses attention, and so does the `ort` lowering on ONNX
    Runtime's CUDA provider.
    """
    fused = plan.backend in TENSORRT_BACKENDS or (plan.backend, plan.lowering) == (
        "ort-cuda",
        "ort",
    )
    return not fused


def size_text(size: float) -> str:
    """Format a number of bytes in MB or GB; 1 GB is 10^9 bytes."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
