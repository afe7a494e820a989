"""What contradicts what in a plan, and what no backend does yet.

A contradiction can never be built and is refused when a `Plan` is made. What is merely not built
yet (`unbuilt_reasons`) may be planned and reckoned with, and is refused by whoever builds or loads.
"""

from __future__ import annotations

import re
from numbers import Integral
from typing import TYPE_CHECKING

from eagle3.runtime.errors import PlanError

if TYPE_CHECKING:
    from eagle3.plans.plan import Plan

TENSORRT_BACKENDS = ("tensorrt", "tensorrt-rtx")
PADDED_BACKENDS = ("ort-cuda", *TENSORRT_BACKENDS)
"""Backends that replay a recorded call, whose shapes are fixed: one recording a width."""

_FIRST_WIDTH = 8  # below it, a GPU call costs what one row costs: only plain decoding has its own


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises PlanError unless `value` is one of `choices`."""
    if value not in choices:
        raise PlanError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def widths_up_to(rows: int) -> tuple[int, ...]:
    """Widths that cover 1 .. `rows`: 1 for plain decoding, 8 and its doubles, and `rows` itself."""
    doubles = []
    width = _FIRST_WIDTH
    while width < rows:
        doubles.append(width)
        width *= 2
    return tuple(sorted({1, *doubles, rows}))


def widths_of(value: object, cover: int, max_seq_len: int) -> tuple[int, ...]:
    """`verify_widths` as a tuple of int; empty stays empty.

    cover: rows of the largest verification, the root and `max_draft_tokens`. Raises PlanError
    unless they are ascending, cover it and fit the context.
    """
    if not isinstance(value, tuple | list) or any(
        not isinstance(each, Integral) or isinstance(each, bool) for each in value
    ):
        raise PlanError(f"verify_widths is {value!r}: give a list of integers, as [1, 16, {cover}]")
    widths = tuple(int(each) for each in value)
    if not widths:
        return widths
    if widths[0] < 1 or any(a >= b for a, b in zip(widths, widths[1:], strict=False)):
        raise PlanError(f"verify_widths is {list(widths)}: each must be above the last, from 1 on")
    if widths[-1] < cover:
        raise PlanError(
            f"verify_widths end at {widths[-1]}, but a verification may have {cover} rows, the root"
            f" and max_draft_tokens {cover - 1}: add {cover}, or lower max_draft_tokens"
        )
    if widths[-1] > max_seq_len:
        raise PlanError(
            f"verify_widths end at {widths[-1]}, more than max_seq_len {max_seq_len}: drop it"
        )
    return widths


def check_compute_capability(value: object) -> None:
    """Raises PlanError unless `value` is None or reads like "8.9"."""
    if value is None:
        return
    if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d?\.\d", value):
        raise PlanError(
            f"compute_capability is {value!r}: give it as NVIDIA writes it, as in '8.9'"
        )


def check_backend(plan: Plan) -> None:
    """Raises PlanError, naming both fields, for what a backend can never do."""
    backend = plan.backend
    # ONNX Runtime's CPU provider has no bfloat16 MatMul: such a graph fails to load.
    if backend == "ort-cpu" and plan.dtype == "bfloat16":
        raise PlanError("dtype is bfloat16, which backend ort-cpu cannot run: choose float32")
    if backend not in PADDED_BACKENDS and plan.verify_widths:
        raise PlanError(
            f"verify_widths is {list(plan.verify_widths)}, but backend {backend} pads nothing, a"
            " call has the rows of its tree: leave it empty"
        )
    if backend in PADDED_BACKENDS and plan.lowering != "portable":
        raise PlanError(
            f"lowering is {plan.lowering}, whose attention backend {backend} does not know:"
            " choose portable"
        )
    if backend == "ort-cuda" and plan.draft_weights == "int8":
        raise PlanError(
            "draft_weights is int8, whose blocks backend ort-cuda has no kernel for: choose same,"
            f" or backend {' or '.join(TENSORRT_BACKENDS)}"
        )
    if backend in TENSORRT_BACKENDS:
        return
    for name in ("compute_capability", "workspace_bytes"):
        value = getattr(plan, name)
        if value is not None:
            raise PlanError(
                f"{name} is {value}, but backend {backend} compiles no plan files: leave it out,"
                f" or choose {' or '.join(TENSORRT_BACKENDS)}"
            )


def unbuilt_reasons(plan: Plan) -> tuple[str, ...]:
    """One sentence for each value that no export writes and no runtime reads yet."""
    reasons = []
    if plan.batch > 1:
        reasons.append(
            f"batch is {plan.batch}, but every backend drafts for one sequence a call: build 1"
            " (many requests at once, without a draft, need no other plan: runtime/batch.py)"
        )
    if plan.target_weights != "same":
        reasons.append(
            f"target_weights is {plan.target_weights}, but only a draft's weights can be stored"
            " otherwise than as dtype says: choose same"
        )
    if plan.kv_dtype not in ("same", plan.dtype):
        reasons.append(
            f"kv_dtype is {plan.kv_dtype}, but caches have the dtype of the activations,"
            f" {plan.dtype}: choose same"
        )
    return tuple(reasons)
