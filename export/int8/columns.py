"""The numbers of int8 products: rotation of inputs, and weights with one scale per column.

An input row is rotated by small Hadamard blocks, which spreads its outliers, and quantized to
integers with one scale: q = round(x H / s), s = max|x H| / 127. The weights are rotated the same
way and quantized with one scale per output column. The sums are sums of integers and therefore
exact, so the result of a row does not depend on the other rows of its call.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

LARGEST = 127
"""Largest quantized value. -128 is not used, so that the range is symmetric."""
_LARGEST_BLOCK = 64


def rotation_block(depth: int) -> int:
    """Return the width of the Hadamard blocks that rotate rows of `depth` values: the largest
    power of two that divides it, at most 64. With a width of 1, nothing is rotated.
    """
    return min(depth & -depth, _LARGEST_BLOCK)


@cache
def hadamard(width: int) -> NDArray[np.float32]:
    """Return the Hadamard matrix [width,width] with orthonormal rows; it is symmetric.

    width: a power of two.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    orthonormal: NDArray[np.float32] = (matrix / np.sqrt(width)).astype(np.float32)
    return orthonormal


def rotated(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotate the last dimension of rows [..,K] block by block. The inverse is the same rotation."""
    width = rotation_block(rows.shape[-1])
    blocks = rows.reshape(*rows.shape[:-1], -1, width)
    return (blocks @ hadamard(width)).reshape(rows.shape)


Int8Rows = tuple[NDArray[np.int8], NDArray[np.float32]]
"""A weight [N,K]: int8 values [N,K], and one scale for each row, float32 [N]."""


def row_scales(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scales [N] of rotated weights [N,K]."""
    largest = np.abs(rows).max(-1)
    scales: NDArray[np.float32] = np.where(largest > 0, largest / np.float32(LARGEST), 1)
    return scales.astype(np.float32)


def int8_rows(weight: NDArray[np.floating], *, rotate: bool = True) -> Int8Rows:
    """Round weight [N,K] to the nearest int8 values.

    rotate: rotate the rows first, as for a product with rotated inputs.
    """
    num_rows, depth = weight.shape
    quantized, scales = np.empty((num_rows, depth), np.int8), np.empty(num_rows, np.float32)
    step = max(1, _VALUES_AT_ONCE // depth)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        rows = np.ascontiguousarray(weight[part], np.float32)
        if rotate:
            rows = rotated(rows)
        scales[part] = row_scales(rows)
        steps = rows / scales[part, None]
        quantized[part] = np.clip(np.rint(steps, out=steps), -LARGEST, LARGEST)
    return quantized, scales


# Values that are rounded at once, which bounds the memory of temporary arrays.
_VALUES_AT_ONCE = 1 << 22
