"""The numbers of int8: rotation, scales, and rounding for given inputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.export.int8.columns import LARGEST, hadamard, int8_rows, rotated, rotation_block
from eagle3.export.int8.rounding import _compensated, _inverse_factor, calibration_tokens
from eagle3.runtime.errors import ExportError


@pytest.mark.parametrize(
    ("depth", "width"), [(576, 64), (1536, 64), (80, 16), (64, 64), (36, 4), (7, 1), (6, 2)]
)
def test_rotation_blocks_divide_the_rows(depth: int, width: int) -> None:
    assert rotation_block(depth) == width
    rows = np.random.default_rng(0).standard_normal((3, depth)).astype(np.float32)
    turned = rotated(rows)
    np.testing.assert_allclose(rotated(turned), rows, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(rows, axis=1), 1e-5)
    np.testing.assert_allclose(hadamard(width) @ hadamard(width), np.eye(width), atol=1e-6)


def test_rotation_spreads_an_outlier() -> None:
    row = np.zeros((1, 64), np.float32)
    row[0, 5] = 64.0
    np.testing.assert_allclose(np.abs(rotated(row)), 8.0, rtol=1e-6)


@pytest.mark.parametrize("rotate", [True, False])
def test_int8_rows_are_within_half_a_step(rotate: bool) -> None:
    weight = np.random.default_rng(1).standard_normal((70, 96)).astype(np.float32)
    weight[3] = 0
    values, scales = int8_rows(weight, rotate=rotate)
    expected = rotated(weight) if rotate else weight
    assert np.abs(values).max() == LARGEST and values.dtype == np.int8
    error = np.abs(values * scales[:, None] - expected)
    assert (error <= 0.5001 * scales[:, None]).all()
    assert not values[3].any() and scales[3] == 1


def test_rounding_in_parts_is_rounding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(2).standard_normal((9, 32)).astype(np.float32)
    before = weight.copy()
    whole = int8_rows(weight)
    monkeypatch.setattr("eagle3.export.int8.columns._VALUES_AT_ONCE", 64)
    for found, expected in zip(int8_rows(weight), whole, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(weight, before)


def test_compensated_rounding_changes_products_less_than_rounding_to_the_nearest() -> None:
    """On inputs that are correlated, also on ones that it has not seen."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(128, 128, generator=generator)
    seen, unseen = (torch.randn(1000, 128, generator=generator) @ mix for _ in range(2))
    weight = torch.randn(40, 128, generator=generator)

    def error(values: Any, scales: Any, rows: torch.Tensor) -> float:
        floats = torch.from_numpy(values).float() * torch.from_numpy(scales)[:, None]
        return float((rows @ (floats - weight).T).norm() / (rows @ weight.T).norm())

    nearest = int8_rows(weight.numpy(), rotate=False)
    found = _compensated(weight, _inverse_factor(seen))
    np.testing.assert_array_equal(found[1], nearest[1])
    assert np.abs(found[0]).max() <= LARGEST
    for rows in (seen, unseen):
        assert error(*found, rows) < 0.8 * error(*nearest, rows)


def test_inputs_that_are_always_zero_are_no_fault() -> None:
    values, scales = _compensated(torch.randn(4, 16), _inverse_factor(torch.zeros(5, 16)))
    assert np.isfinite(scales).all() and values.any()


def test_a_calibration_file_without_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("x\n")
    target: Any = SimpleNamespace(
        tokenizer=lambda *_, **__: {"input_ids": [3]}, vocab_size=64, config=SimpleNamespace()
    )
    with pytest.raises(ExportError, match=r"prompts\.txt has 1 tokens of the target"):
        calibration_tokens(target, file)


def test_calibration_text_is_cut_into_windows() -> None:
    ids = [*range(64)] * 10
    target: Any = SimpleNamespace(
        tokenizer=lambda *_, **__: {"input_ids": ids},
        vocab_size=60,
        config=SimpleNamespace(max_position_embeddings=100),
    )
    tokens = calibration_tokens(target)
    assert tokens.shape == (6, 100) and int(tokens.max()) == 59
