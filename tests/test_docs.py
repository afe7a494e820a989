"""The documentation and the comments name files that exist, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "demo/head/README.md"]
CODE = [
    path
    for stage in ("runtime", "plans", "export", "train", "bench")
    for path in sorted((ROOT / stage).rglob("*.py"))
]
# What a checkpoint or another project calls its files, and examples of a user's own.
FOREIGN = {"train.py", "conftest.py"}
MENTION = re.compile(r"(?<![\w./<{*-])((?:[a-z_0-9]+/)*[a-z_][a-z_0-9]*\.(?:py|cu))\b")


def _files() -> list[str]:
    """Every Python and CUDA file of the checkout, relative to its root."""
    found = [
        *ROOT.glob("*.py"),
        *(p for d in ROOT.iterdir() if _is_source(d) for p in d.rglob("*")),
    ]
    return [path.relative_to(ROOT).as_posix() for path in found if path.suffix in (".py", ".cu")]


def _is_source(folder: Path) -> bool:
    return folder.is_dir() and not folder.name.startswith(".") and folder.name != "build"


FILES = _files()


@pytest.mark.parametrize("page", [*PAGES, *CODE], ids=lambda each: str(each.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for mention in MENTION.findall(page.read_text(encoding="utf-8")):
        known = any(file == mention or file.endswith(f"/{mention}") for file in FILES)
        assert known or mention in FOREIGN, mention


@pytest.mark.parametrize("page", PAGES, ids=lambda each: str(each.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
