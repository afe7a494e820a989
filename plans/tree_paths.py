"""Static trees (EAGLE-1): which ranks of the draft's candidates a round verifies, said beforehand.

A path is a tuple of child ranks from the root down: (0, 2) is the third best token under the best
one. `TreePlan.static` carries the description; `runtime/static_tree.py` grows the tree it names.
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
"""What a caller asks for to get the tree that the draft's own scores shape (EAGLE-2)."""


@dataclass(frozen=True)
class TreePaths:
    """The nodes of a static tree by priority: a smaller budget keeps the first ones.

    A path stands behind that of its parent and behind its sibling of the rank before, so that
    every prefix is a tree, and none leaves out a token that the draft likes better. Raises
    PlanError, naming the path, where that does not hold.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(_checked(self.paths)))

    @property
    def name(self) -> str | None:
        """Its key in `STATIC_TREES`, if it is one of those."""
        return next((name for name, each in STATIC_TREES.items() if each == self), None)

    @property
    def num_nodes(self) -> int:
        """The root excluded."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(map(len, self.paths))

    @property
    def top_k(self) -> int:
        """The most children that a node has."""
        return 1 + max(map(max, self.paths))

    @property
    def num_draft_rows(self) -> int:
        """Nodes that have children: the draft runs one row for each; the root's is not counted."""
        return len({path[:-1] for path in self.paths}) - 1

    def cut(self, top_k: int, depth: int, num_nodes: int) -> TreePaths:
        """The first `num_nodes` paths within `depth` levels and `top_k` children a node.

        All at least 1. What is left has every node's parent, since each of the three goes with it.
        """
        kept = [path for path in self.paths if len(path) <= depth and max(path) < top_k]
        kept = kept[:num_nodes]
        return self if len(kept) == len(self.paths) else TreePaths(tuple(kept))

    @classmethod
    def from_json(cls, data: object) -> TreePaths:
        """Reads {"paths": [[0], [0, 0], ...]}; PlanError for anything else."""
        names = [each.name for each in fields(cls)]
        if not isinstance(data, Mapping) or sorted(data) != names:
            raise PlanError(f"tree.static is {data!r:.80}, not an object with {names}: mend it")
        return cls(data["paths"])


def _checked(paths: object) -> Iterator[tuple[int, ...]]:
    """The paths as tuples of int. Raises PlanError."""
    if not _is_list(paths) or not paths:
        raise PlanError(
            f"a static tree is {paths!r:.80}: give a list of one or more paths, each a list of"
            " child ranks, as in [[0], [1], [0, 0]]"
        )
    seen: set[tuple[int, ...]] = set()
    for path in paths:
        ranks = _ranks(path)
        if ranks in seen:
            raise PlanError(f"the static tree names path {[*ranks]} twice: remove one")
        for needed, role in _needed(ranks):
            if needed not in seen:
                raise PlanError(
                    f"path {[*ranks]} of the static tree has no {role} {[*needed]} in front of it:"
                    f" put {[*needed]} there"
                )
        seen.add(ranks)
        yield ranks


def _needed(ranks: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """The paths that must stand before one, and what they are to it."""
    *above, rank = ranks
    if above:
        yield tuple(above), "parent"
    if rank:
        yield (*above, rank - 1), "better sibling"


def _ranks(path: object) -> tuple[int, ...]:
    ranks = tuple(path) if _is_list(path) else ()
    if not ranks or not all(map(_is_rank, ranks)):
        raise PlanError(
            f"path {path!r:.80} of the static tree: give one or more child ranks, integers from 0"
        )
    return tuple(map(int, ranks))


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _is_rank(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def read_paths(name_or_file: str | os.PathLike[str]) -> TreePaths:
    """A tree of `STATIC_TREES` by its name, or the one in a JSON file (a list of paths).

    Raises PlanError for a name that is neither, a file that cannot be read, and its contents.
    """
    known = STATIC_TREES.get(os.fspath(name_or_file))
    return known if known is not None else _from_file(Path(name_or_file))


def named_paths(name: str) -> TreePaths:
    """A tree of `STATIC_TREES`. Raises PlanError for another name."""
    if name not in STATIC_TREES:
        raise PlanError(f"tree '{name}' is unknown: choose one of {_NAMES}, or give paths")
    return STATIC_TREES[name]


def _from_file(path: Path) -> TreePaths:
    if not path.exists():
        raise PlanError(f"tree '{path}' is neither a file nor one of {_NAMES}: check the spelling")
    try:
        return TreePaths(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"the tree in {path} cannot be read: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _eagle1() -> Iterator[tuple[int, ...]]:
    """4, 8, 8, 3 and 2 nodes a level; most of them where the draft is surest."""
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
"""Name -> tree. `eagle1`: the 25 nodes of the EAGLE-1 reference."""
_NAMES = ", ".join([DYNAMIC, *STATIC_TREES])
TREE_CHOICES = f"{_NAMES}, or a JSON file of child-rank paths"
"""What may be given where a tree is asked for, in words."""
