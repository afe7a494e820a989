"""The structure of the package, held from its own imports: rooms, floors, names, docstrings.

A room is a folder of the package, or a file that stands directly in `runtime/` or at the root.
`FLOORS` is the whole order: a room imports from rooms on lower floors and from itself, never from
a room beside or above it. Imports count wherever they stand: at the top of a file, within a
function, and under TYPE_CHECKING. docs/architecture.md draws the same order.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("runtime", "plans", "export", "train")
MAX_FILES = 14

FLOORS: tuple[tuple[str, ...], ...] = (
    ("runtime/errors.py",),
    ("runtime/params.py", "runtime/stats.py"),
    ("plans",),
    ("runtime/request.py", "runtime/bundle", "plans/lint"),
    ("plans/tensorrt", "runtime/text", "runtime/trees"),
    ("runtime/acceptance",),
    ("runtime/ort",),
    ("runtime/drafters",),
    ("runtime/rounds",),
    ("runtime/gpu",),
    ("runtime/request_lock.py",),
    ("runtime/engine.py",),
    ("__init__.py", "runtime/checks", "runtime/terminal"),
    ("export/graphs", "export/heads/dialects"),
    ("export/heads",),
    ("export/targets",),
    ("plans/commands", "export/draft_graphs", "export/int8"),
    ("export/checks",),
    ("export/drafts",),
    ("export",),
    ("export/commands", "train/requests", "train/jobs"),
    ("train/batches",),
    ("train/data", "train/losses"),
    ("train/loop",),
    ("train/evaluation",),
    ("train/commands",),
    ("cli.py",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules(root: Path) -> dict[str, Path]:
    """Module name -> file, for every module below the package's root."""
    files = [
        *root.glob("*.py"),
        *(file for stage in STAGES for file in root.glob(f"{stage}/**/*.py")),
    ]
    return {_module(file.relative_to(root)): file for file in files}


def _module(file: Path) -> str:
    parts = ["eagle3", *file.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, or names in a string to be imported."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                yield from (
                    name for name in [whole if whole in known else node.module] if name in known
                )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (name for name in [node.value] if name in known and name != "eagle3")


def import_graph(root: Path) -> dict[Path, set[Path]]:
    """File -> the files that it imports, relative to the root."""
    known = modules(root)
    return {
        file.relative_to(root): {known[name].relative_to(root) for name in imports(file, known)}
        - {file.relative_to(root)}
        for file in known.values()
    }


def room_of(file: Path) -> str:
    """A folder, but for the files that stand in `runtime/` itself or at the root."""
    folder = file.parent.as_posix()
    if folder == "." or (folder == "runtime" and file.name != "__init__.py"):
        return file.as_posix()
    return folder


def wrong_way(graph: Mapping[Path, Iterable[Path]]) -> list[str]:
    """Every import that does not lead to a lower floor or stay in its room."""
    faults = []
    for file, targets in graph.items():
        for target in targets:
            here, there = room_of(file), room_of(target)
            if here != there and FLOOR_OF[here] <= FLOOR_OF[there]:
                faults.append(f"{file} imports {target}: {there} is not below {here}")
    return sorted(faults)


def circle(graph: Mapping[Path, Iterable[Path]]) -> list[str]:
    """Files that import each other in a circle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(file) for file in error.args[1]]
    return []


@pytest.fixture(scope="module")
def graph() -> dict[Path, set[Path]]:
    return import_graph(ROOT)


def test_every_room_has_a_floor(graph: dict[Path, set[Path]]) -> None:
    rooms = {room_of(file) for file in graph if file.name != "__init__.py"} | {"__init__.py"}
    assert rooms == set(FLOOR_OF)


def test_imports_lead_to_lower_floors(graph: dict[Path, set[Path]]) -> None:
    assert wrong_way(graph) == []


def test_no_files_import_each_other_in_a_circle(graph: dict[Path, set[Path]]) -> None:
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("runtime/trees/tree.py", "from eagle3.runtime.engine import Engine", "wrong way"),
        ("plans/plan.py", "from eagle3.runtime.bundle import manifest", "wrong way"),
        ("runtime/text/stop_strings.py", "import eagle3.runtime.trees.tree", "wrong way"),
        ("runtime/errors.py", "def late():\n    import eagle3.runtime.params", "wrong way"),
        ("runtime/stats.py", "STAGE = 'eagle3.export.exporter'", "wrong way"),
        (
            "runtime/trees/tree.py",
            "if TYPE_CHECKING:\n    from eagle3.runtime.trees.builder import TreeBuilder",
            "circle",
        ),
    ],
)
def test_an_import_that_is_added_wrongly_is_found(
    graph: dict[Path, set[Path]], tmp_path: Path, file: str, line: str, fault: str
) -> None:
    added = tmp_path / "added.py"
    added.write_text(line)
    known = modules(ROOT)
    targets = {known[name].relative_to(ROOT) for name in imports(added, known)}
    assert targets
    changed = {**graph, Path(file): graph[Path(file)] | targets}
    assert wrong_way(changed) if fault == "wrong way" else circle(changed)


def test_no_file_name_stands_for_two_things(graph: dict[Path, set[Path]]) -> None:
    counts = Counter(file.name for file in graph if file.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def _folders() -> list[Path]:
    return sorted({file.parent for stage in STAGES for file in (ROOT / stage).rglob("*.py")})


@pytest.mark.parametrize("folder", _folders(), ids=lambda each: str(each.relative_to(ROOT)))
def test_a_room_is_small_and_says_what_belongs_there(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MAX_FILES
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    assert len(tree.body) == 1, "a room's __init__.py holds its docstring and nothing else"
    sentences = re.findall(r"[^.]\.(?=\s|$)", " ".join((ast.get_docstring(tree) or "").split()))
    assert 2 <= len(sentences) <= 4
