"""What a training run measured, as CSV that grows with it, and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.runtime.errors import TrainingError


class Curves:
    """A CSV with a row for each measurement; columns are fixed by the first run that writes it."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, ("step", *columns)

    def truncate(self, step: int) -> None:
        """Drops what was measured after `step`: a resumed run measures it again.

        Raises TrainingError.
        """
        rows = [row for row in read_curves(self._path) if int(row["step"]) <= step]
        part = self._path.with_suffix(".part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            part.replace(self._path)
        except OSError as error:
            raise TrainingError(f"{self._path} cannot be written: {error.strerror}") from error

    def largest(self, column: str) -> float:
        """The largest number that stands in a column; 0 in an empty one."""
        return max(
            (float(row[column]) for row in read_curves(self._path) if row.get(column)), default=0
        )

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a row; columns that are not measured stay empty. Raises TrainingError."""
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow({"step": step, **values})
        except OSError as error:
            raise TrainingError(f"{self._path} cannot be written: {error.strerror}") from error


def read_curves(path: Path) -> list[dict[str, str]]:
    """The whole rows of a curves file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]


def plot_curves(path: Path, picture: Path) -> bool:
    """Draws loss and agreement by draft step; False where matplotlib is not installed.

    Raises TrainingError when the picture cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_curves(path)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    _lines(left, rows, "loss", {"loss": "all steps"})
    names = sorted(name for name in (rows[0] if rows else {}) if name.startswith("held_agree_"))
    shown = {name: f"step {name.rsplit('_', 1)[1]}" for name in names}
    _lines(right, rows, "agreement with the target, held out", shown)
    figure.tight_layout()
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        raise TrainingError(f"{picture} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
    return True


def _lines(
    axes: Any, rows: Sequence[Mapping[str, str]], title: str, names: Mapping[str, str]
) -> None:
    for name, label in names.items():
        points = [(int(r["step"]), float(r[name])) for r in rows if r.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("optimizer step")
    axes.set_title(title)
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
