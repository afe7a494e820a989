"""Pearson's chi-square test of counts against a distribution, implemented without scipy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MIN_EXPECTED = 5.0  # cells that expect fewer draws are pooled: their statistic is not chi-square

_EPSILON = 1e-15
_TINY = 1e-300  # replaces a zero denominator in Lentz's method


def p_value(counts: NDArray[np.int64], p: NDArray[np.floating]) -> tuple[float, int]:
    """Return (p-value, number of cells) of a test that `counts` [V] were drawn from `p` [V].

    `p` need not be normalized. Cells that expect fewer than MIN_EXPECTED draws are pooled. If a
    token of probability 0 was drawn, the p-value is 0. If only one cell is left, there is nothing
    to test and the p-value is 1.
    """
    expected = p.astype(np.float64) * (counts.sum() / p.sum(dtype=np.float64))
    if counts[expected == 0.0].any():
        return 0.0, 1
    observed, wanted = _pooled(counts, expected)
    if wanted.size < 2:
        return 1.0, int(wanted.size)
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return survival(statistic, wanted.size - 1), int(wanted.size)


def survival(statistic: float, degrees: int) -> float:
    """Return P(X >= statistic) for a chi-square variable X: Q(degrees / 2, statistic / 2).

    Q is the regularized upper incomplete gamma function. It is computed as one minus the series of
    P where that series converges fast, and as a continued fraction otherwise (Abramowitz & Stegun
    6.5.29 and 6.5.31).
    """
    a, x = degrees / 2, statistic / 2
    if x <= 0.0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        return max(0.0, 1.0 - scale * _series(a, x))
    return scale * _fraction(a, x)


def _pooled(
    counts: NDArray[np.int64], expected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the observed and expected counts per cell, with all rare cells pooled into one.

    If the pooled cell is still too small, the smallest of the other cells is added to it.
    """
    order = np.argsort(-expected, kind="stable")
    num_whole = int((expected >= MIN_EXPECTED).sum())
    rare = float(expected[order[num_whole:]].sum())
    if 0.0 < rare < MIN_EXPECTED and num_whole:
        num_whole -= 1
    edges = np.arange(num_whole + (num_whole < order.size and expected[order[num_whole]] > 0.0))
    return (
        np.add.reduceat(counts[order].astype(np.float64), edges),
        np.add.reduceat(expected[order], edges),
    )


def _series(a: float, x: float) -> float:
    """Return the sum over k of x^k / (a (a+1) ... (a+k)), which is P(a, x) / scale."""
    term = total = 1.0 / a
    k = a
    while term > total * _EPSILON:
        k += 1.0
        term *= x / k
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    """Return the continued fraction of Q(a, x) / scale, by the modified method of Lentz."""
    b = x + 1.0 - a
    c, d = 1.0 / _TINY, 1.0 / b
    value, change, k = d, 0.0, 0
    while abs(change - 1.0) > _EPSILON and k < 100_000:
        k += 1
        numerator = -k * (k - a)
        b += 2.0
        d = 1.0 / ((numerator * d + b) or _TINY)
        c = (b + numerator / c) or _TINY
        change = c * d
        value *= change
    return value
