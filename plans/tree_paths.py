"""Static trees (EAGLE-1): a fixed list of paths, each made of ranks of the draft's candidates.

A path is a tuple of child ranks from the root down: (0, 2) is the third best token under the best
one. `TreePlan.static` holds the paths, and `trees/static.py` grows the tree in each round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard

from eagle3.runtime.errors import PlanError

DYNAMIC = "dynamic"
"""Name of the dynamic tree (EAGLE-2), whose shape depends on the draft's scores."""


@dataclass(frozen=True)
class TreePaths:
    """The nodes of a static tree in order of priority; a smaller budget keeps the first ones.

    The path of a node must follow the path of its parent and that of its sibling of the next better
    rank. Every prefix is then a tree, and no prefix omits a token that the draft ranks higher than
    one it keeps. Raises PlanError, with the path, if this does not hold.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(_checked(self.paths)))

    @property
    def name(self) -> str | None:
        """The key of this tree in `STATIC_TREES`, or None."""
        return next((name for name, each in STATIC_TREES.items() if each == self), None)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root excluded."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(map(len, self.paths))

    @property
    def top_k(self) -> int:
        """Largest number of children of a node."""
        return 1 + max(map(max, self.paths))

    @property
    def num_draft_rows(self) -> int:
        """Number of nodes with children, root excluded; the draft runs one row for each."""
        return len({path[:-1] for path in self.paths}) - 1

    def cut(self, top_k: int, depth: int, num_nodes: int) -> TreePaths:
        """Return the first `num_nodes` paths within `depth` levels and `top_k` children per node.

        All arguments must be at least 1. The result is a tree: each of the three limits that keeps
        a node also keeps its parent.
        """
        kept = [path for path in self.paths if len(path) <= depth and max(path) < top_k]
        kept = kept[:num_nodes]
        return self if len(kept) == len(self.paths) else TreePaths(tuple(kept))

    @classmethod
    def from_json(cls, data: object) -> TreePaths:
        """Read an object such as {"paths": [[0], [0, 0], ...]}. Raises PlanError otherwise."""
        names = [each.name for each in fields(cls)]
        if not isinstance(data, Mapping) or sorted(data) != names:
            raise PlanError(
                f"tree.static must be an object with exactly the keys {names}, got {data!r:.80}"
            )
        return cls(data["paths"])


def _checked(paths: object) -> Iterator[tuple[int, ...]]:
    """Yield the paths as tuples of int. Raises PlanError if they do not form a tree."""
    if not _is_list(paths) or not paths:
        raise PlanError(
            "a static tree must be a list of one or more paths, each a list of child ranks, such"
            f" as [[0], [1], [0, 0]], got {paths!r:.80}"
        )
    seen: set[tuple[int, ...]] = set()
    for path in paths:
        ranks = _ranks(path)
        if ranks in seen:
            raise PlanError(f"path {[*ranks]} occurs twice in the static tree: remove one of them")
        for needed, role in _needed(ranks):
            if needed not in seen:
                raise PlanError(
                    f"path {[*ranks]} of the static tree does not follow its {role} {[*needed]}:"
                    f" put {[*needed]} in front of it"
                )
        seen.add(ranks)
        yield ranks


def _needed(ranks: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the paths that must precede `ranks`, each with its role for the error message."""
    *above, rank = ranks
    if above:
        yield tuple(above), "parent"
    if rank:
        yield (*above, rank - 1), "better sibling"


def _ranks(path: object) -> tuple[int, ...]:
    ranks = tuple(path) if _is_list(path) else ()
    if not ranks or not all(map(_is_rank, ranks)):
        raise PlanError(
            "a path of the static tree must be a list of one or more child ranks (integers from 0"
            f" on), got {path!r:.80}"
        )
    return tuple(map(int, ranks))


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _is_rank(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def read_paths(name_or_file: str | os.PathLike[str]) -> TreePaths:
    """Return the tree of this name in `STATIC_TREES`, or read a JSON file with a list of paths.

    Raises PlanError if there is neither, if the file cannot be read, or if its paths form no tree.
    """
    known = STATIC_TREES.get(os.fspath(name_or_file))
    return known if known is not None else _from_file(Path(name_or_file))


def named_paths(name: str) -> TreePaths:
    """Return the tree of this name in `STATIC_TREES`. Raises PlanError for an unknown name."""
    if name not in STATIC_TREES:
        raise PlanError(f"tree '{name}' is unknown: use one of {_NAMES}, or a list of paths")
    return STATIC_TREES[name]


def _from_file(path: Path) -> TreePaths:
    if not path.exists():
        raise PlanError(
            f"tree '{path}' not found: use one of {_NAMES}, or the path of an existing JSON file"
        )
    try:
        return TreePaths(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"the tree in {path} cannot be read: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _eagle1() -> Iterator[tuple[int, ...]]:
    """Yield the paths: 4, 8, 8, 3 and 2 nodes per level, most of them under the best ranks."""
    for prefix, num_children in {
        (): 4,
        (0,): 3,
        (1,): 2,
        (2,): 2,
        (3,): 1,
        (0, 0): 3,
        (0, 1): 2,
        (0, 2): 2,
        (1, 0): 1,
        (0, 0, 0): 3,
        (0, 0, 0, 0): 2,
    }.items():
        yield from ((*prefix, rank) for rank in range(num_children))


STATIC_TREES = {"eagle1": TreePaths(tuple(_eagle1()))}
"""Name -> static tree. `eagle1` is the tree of the EAGLE-1 reference with 25 nodes."""
_NAMES = ", ".join([DYNAMIC, *STATIC_TREES])
TREE_CHOICES = f"{_NAMES}, or a JSON file of child-rank paths"
"""Description of the values of an option that takes a tree."""
