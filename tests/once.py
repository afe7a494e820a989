"""What several workers of a run need, made by the one that asks first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from filelock import FileLock

from eagle3.plans.plan import Plan
from eagle3.runtime.bundle.folder import Bundle


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """`name` in a folder of the whole run, where `make` puts it, whole or not at all.

    Everyone reads it: nobody may write into it.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's own folder is in that of the run
        folder = folder.parent
    place = folder / "shared" / name
    place.parent.mkdir(exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():
            make(place)
    return place


def exported_once(
    factory: pytest.TempPathFactory,
    name: str,
    target: Path,
    draft: Path | None,
    plan: Plan | None = None,
) -> Bundle:
    """What `tiny.export_tiny` exports of checkpoints that are the same in every worker."""
    return Bundle.open(
        made_once(factory, name, lambda to: tiny.export_tiny(target, draft, to, plan))
    )
