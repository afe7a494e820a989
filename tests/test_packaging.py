"""What `pip install eagle3` brings: the wheel's contents and the package's own names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import eagle3
from eagle3.runtime import errors

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {"tests", "bench", "demo", "docs", "build", "dist"}


def sources() -> Iterator[str]:
    """Every module and preset: the root's and those of its packages, as in the wheel."""
    yield from (path.name for path in ROOT.glob("*.py"))
    for folder in sorted(path for path in ROOT.iterdir() if path.is_dir()):
        if folder.name not in NOT_SHIPPED and not folder.name.startswith("."):
            yield from (str(path.relative_to(ROOT)) for path in folder.rglob("*.py"))
            yield from (str(path.relative_to(ROOT)) for path in folder.rglob("presets/*.toml"))
            yield from (str(path.relative_to(ROOT)) for path in folder.rglob("*.cu"))


def _can_build() -> bool:
    """Whether this environment has the setuptools that pyproject.toml asks for."""
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel that is built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in [*sources(), "pyproject.toml", "py.typed", "README.md", "LICENSE"]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    if not (copy / "README.md").exists():
        (copy / "README.md").write_text("")
    for name in ("tests", "bench", "demo"):  # must stay out although they are there
        (copy / name).mkdir()
        (copy / name / "module.py").write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    if _can_build():
        command += ["--no-build-isolation", "--no-index"]
    command += ["--wheel-dir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: set[str]) -> None:
    """A new subpackage that pyproject.toml does not list fails here."""
    shipped = {name for name in wheel if ".dist-info/" not in name}
    assert shipped == {"eagle3/py.typed", *(f"eagle3/{name}" for name in sources())}


def test_the_wheel_installs_one_command(wheel: set[str]) -> None:
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"eagle3": "eagle3.cli:main"}


def test_the_root_holds_the_package_and_its_command() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "cli.py"}


def test_the_light_install_is_light() -> None:
    """torch and the like stand in extras only; the two engine packages in one each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {entry.split(">")[0].split("=")[0] for entry in project["dependencies"]}
    assert names <= {"click", "jinja2", "numpy", "tokenizers"}
    extras = project["optional-dependencies"]
    owners = [name for name, all in extras.items() for e in all if e.startswith("onnxruntime")]
    assert owners == ["cpu", "gpu"]


def test_the_root_names_are_what_they_say() -> None:
    for name in eagle3.__all__:
        assert getattr(eagle3, name).__module__.startswith("eagle3.runtime.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = eagle3.nothing
    assert (
        eagle3.__version__
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )


def test_every_error_is_a_root_name() -> None:
    defined = {each.__name__ for each in vars(errors).values() if isinstance(each, type)}
    assert defined <= set(eagle3.__all__)


def test_help_is_instant_and_needs_no_engine() -> None:
    """Imports are counted, not milliseconds: a busy machine must not fail this."""
    code = (
        "import sys\n"
        "for name in ('onnxruntime', 'torch', 'transformers', 'numpy', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['eagle3', '--help']\n"
        "from eagle3.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
