"""Compare the chi-square test with scipy, and check that it detects a wrong distribution."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from eagle3.runtime.checks import chi_square


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 30, 200, 5000])
def test_survival_is_scipys(degrees: int) -> None:
    for factor in (1e-6, 0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 5.0, 20.0):
        statistic = factor * degrees
        expected = stats.chi2.sf(statistic, degrees)
        assert chi_square.survival(statistic, degrees) == pytest.approx(expected, rel=1e-9)


def test_survival_at_zero_is_one() -> None:
    assert chi_square.survival(0.0, 4) == 1.0


def test_p_value_is_scipys_where_no_cell_is_rare() -> None:
    p = np.array([0.5, 0.3, 0.2])
    counts = np.array([520, 270, 210])
    value, cells = chi_square.p_value(counts, p)
    assert cells == 3
    assert value == pytest.approx(stats.chisquare(counts, p * 1000).pvalue)


def test_rare_cells_are_pooled() -> None:
    p = np.array([0.6, 0.4 - 1e-3, *[1e-4] * 10, 0.0])
    counts = np.array([620, 378, 1, 1, *[0] * 9])
    value, cells = chi_square.p_value(counts, p)
    # Together, the rare cells expect 1 draw of 1000. That is too few, so the second cell is added.
    assert cells == 2
    assert value == pytest.approx(stats.chisquare([620, 380], [600, 400]).pvalue, rel=1e-6)


def test_a_draw_of_probability_zero_fails() -> None:
    assert chi_square.p_value(np.array([99, 1]), np.array([1.0, 0.0])) == (0.0, 1)


def test_one_cell_has_nothing_to_test() -> None:
    assert chi_square.p_value(np.array([100, 0]), np.array([1.0, 0.0])) == (1.0, 1)


def test_p_values_are_uniform_under_the_null_and_tiny_under_another_law() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(50, 0.3))
    values = [chi_square.p_value(rng.multinomial(5000, p), p)[0] for _ in range(300)]
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    other = 0.9 * p + 0.1 / 50
    assert chi_square.p_value(rng.multinomial(5000, other), p)[0] < 1e-9
