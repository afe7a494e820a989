"""Backend names, and checks of the plan fields that depend on the backend.

These checks run when a `Plan` is created and reject values that no backend can ever build. Values
that are valid but not implemented yet are allowed in a `Plan`, so that their memory and cost can be
estimated; see `Plan.unbuilt`. Building or loading such a plan raises PlanError.
"""

from __future__ import annotations

import re
from numbers import Integral

from eagle3.runtime.errors import PlanError

TENSORRT_BACKENDS = ("tensorrt", "tensorrt-rtx")
PADDED_BACKENDS = ("ort-cuda", *TENSORRT_BACKENDS)
"""Backends that replay captured calls. A captured call has fixed shapes, so there is one per
width, and a verification is padded to the next width."""

# A GPU call of 2 to 8 rows costs as much as a call of one row, so no width in between is needed.
_FIRST_WIDTH = 8


def widths_up_to(rows: int) -> tuple[int, ...]:
    """Return widths that cover calls of 1 to `rows` rows.

    These are 1 for plain decoding, then 8, 16, 32, ... below `rows`, and `rows` itself.
    """
    doubles = []
    width = _FIRST_WIDTH
    while width < rows:
        doubles.append(width)
        width *= 2
    return tuple(sorted({1, *doubles, rows}))


def widths_of(value: object, cover: int, max_seq_len: int) -> tuple[int, ...]:
    """Return `verify_widths` as a tuple of int; an empty value stays empty.

    cover: number of rows of the largest verification, that is the root and `max_draft_tokens`.
    Raises PlanError unless the widths are ascending, reach `cover` and do not exceed `max_seq_len`.
    """
    if not isinstance(value, tuple | list) or any(
        not isinstance(each, Integral) or isinstance(each, bool) for each in value
    ):
        raise PlanError(
            f"verify_widths must be a list of integers such as [1, 16, {cover}], got {value!r}"
        )
    widths = tuple(int(each) for each in value)
    if not widths:
        return widths
    if widths[0] < 1 or any(a >= b for a, b in zip(widths, widths[1:], strict=False)):
        raise PlanError(
            f"verify_widths must be strictly ascending and start at 1 or more, got {list(widths)}"
        )
    if widths[-1] < cover:
        raise PlanError(
            f"verify_widths ends at {widths[-1]}, but a verification can have {cover} rows (the"
            f" root and max_draft_tokens = {cover - 1}): add {cover}, or lower max_draft_tokens"
        )
    if widths[-1] > max_seq_len:
        raise PlanError(
            f"verify_widths ends at {widths[-1]}, which exceeds max_seq_len {max_seq_len}: remove"
            f" {widths[-1]}, or raise max_seq_len"
        )
    return widths


def check_compute_capability(value: object) -> None:
    """Raise PlanError unless `value` is None or a string such as "8.9"."""
    if value is None:
        return
    if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d?\.\d", value):
        raise PlanError(
            f"compute_capability must be a string in NVIDIA's notation such as '8.9', got {value!r}"
        )
