"""`dataset.json`: the origin of the data, what was left out and why, and how to reproduce it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle3.runtime.errors import DataError
from eagle3.train.data.prompt_selection import Selection
from eagle3.train.data.tasks import Tasks
from eagle3.train.jobs.journal import write_json
from eagle3.train.requests.data_request import DataRequest

SCHEMA_VERSION = 1
_PACKAGES = ("eagle3", "torch", "transformers", "onnxruntime", "onnxruntime-gpu", "tokenizers")


def write_summary(request: DataRequest, vocab_size: int, counts: Mapping[str, Any]) -> None:
    """Write dataset.json atomically. Raises DataError if it cannot be written."""
    write_json(
        request.output / "dataset.json",
        {
            "schema_version": SCHEMA_VERSION,
            "target": request.target,
            "vocab_size": vocab_size,
            "counts": counts,
            "recipe": request.recipe(),
            "versions": _versions(),
        },
    )


def counts_of(selection: Selection, tasks: Tasks) -> dict[str, Any]:
    """Return how many prompts were read, left out (by reason), answered, and given with answers."""
    counts = selection.counts
    given = sum(task.entry.answer is not None for task in tasks.tasks)
    return {
        "read": counts.read,
        "broken": dict(counts.broken),
        "duplicates": counts.duplicates,
        "evaluation": counts.evaluation,
        "over_limit": counts.over_limit,
        "too_long": tasks.too_long,
        "refused": dict(tasks.refused),
        "answered": len(tasks.tasks) - given,
        "given": given,
    }


def read_counts(folder: Path) -> dict[str, Any]:
    """Return the counts of a finished data folder. Raises DataError if they cannot be read."""
    path = folder / "dataset.json"
    try:
        counts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["counts"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return counts


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
