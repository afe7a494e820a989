"""A portable bundle on the stand-in, beside the same bundle on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from on_device import OnDevice, on_device

import eagle3
from eagle3.runtime.bundle.folder import Bundle


@pytest.fixture(scope="session")
def portable(portable_bundle: Bundle) -> Bundle:
    """The tiny Llama and its random head in the lowering that GPUs run."""
    return portable_bundle


@pytest.fixture(scope="session", params=["tensorrt", "ort-cuda"])
def device(
    portable: Bundle, tmp_path_factory: Any, request: pytest.FixtureRequest
) -> Iterator[OnDevice]:
    """`portable` on the stand-in, under either library."""
    yield on_device(portable, tmp_path_factory.mktemp("device"), library=request.param)


@pytest.fixture(scope="session")
def cpu(portable: Bundle) -> Iterator[eagle3.Engine]:
    """`portable` on the CPU."""
    yield eagle3.load(portable.root, threads=1)


@pytest.fixture(scope="session")
def narrow(portable: Bundle, tmp_path_factory: Any) -> OnDevice:
    """`portable` with plan files that were built for many widths."""
    widths = (1, 2, 4, 8, 33)
    return on_device(portable, tmp_path_factory.mktemp("narrow"), verify_widths=widths)
