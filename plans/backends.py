"""What contradicts what in a plan, and what no backend does yet.

A contradiction can never be built and is refused when a `Plan` is made. What is merely not built
yet (`unbuilt_reasons`) may be planned and reckoned with, and is refused by whoever builds or loads.
"""

from __future__ import annotations

import re
from numbers import Integral

from eagle3.runtime.errors import PlanError

TENSORRT_BACKENDS = ("tensorrt", "tensorrt-rtx")
PADDED_BACKENDS = ("ort-cuda", *TENSORRT_BACKENDS)
"""Backends that replay a recorded call, whose shapes are fixed: one recording a width."""

_FIRST_WIDTH = 8  # below it, a GPU call costs what one row costs: only plain decoding has its own


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
