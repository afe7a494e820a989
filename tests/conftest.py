"""Bundles that many tests share; each is exported once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import eagle3
from eagle3.runtime.bundle import Bundle


@pytest.fixture(scope="session")
def llama() -> Any:
    """A tiny random Llama, vocabulary 64."""
    return tiny.tiny_model("llama", scale=2.0)


@pytest.fixture(scope="session")
def llama_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("llama"), llama)


@pytest.fixture(scope="session")
def head_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for `llama` with a draft vocabulary of 40."""
    return tiny.save_head(tmp_path_factory.mktemp("head"), llama, draft_vocab_size=40)


@pytest.fixture(scope="session")
def bundle(
    llama_folder: Path, head_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """`llama` with its random, that is hostile, head. Tests must not write into it."""
    return tiny.export_tiny(llama_folder, head_folder, tmp_path_factory.mktemp("bundles") / "llama")


@pytest.fixture(scope="session")
def engine(bundle: Bundle) -> Iterator[eagle3.Engine]:
    """The engine of `bundle`."""
    yield eagle3.load(bundle.root, threads=1)
