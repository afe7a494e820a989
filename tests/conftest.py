"""Bundles that many tests share; each is exported once a run."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from once import exported_once
from torch.onnx._internal.exporter._registration import ONNXRegistry
from trace_cache import equal_traces_made_once

import eagle3
from eagle3.runtime.bundle.folder import Bundle


def pytest_configure() -> None:
    """Run the garbage collector less often, which is 6% of a run, and trace small graphs faster."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    torch._dynamo.config.fake_tensor_cache_enabled = False  # slower for graphs of few layers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slow files and end with the quick ones, so that all workers end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, "runtime" in item.path.parts))


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Matrices this small are far slower on more threads, most of all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _one_operator_registry() -> Iterator[None]:
    """PyTorch's exporter reads the sources of 500 functions anew for every graph: 0.4 s each."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(ONNXRegistry.from_torchlib)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(once))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_trace_of_equal_modules() -> Iterator[None]:
    with equal_traces_made_once():
        yield


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
    return exported_once(tmp_path_factory, "llama", llama_folder, head_folder)


@pytest.fixture(scope="session")
def portable_bundle(
    llama_folder: Path, head_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """`bundle` in the other lowering."""
    return exported_once(
        tmp_path_factory,
        "llama-portable",
        llama_folder,
        head_folder,
        tiny.tiny_plan(lowering="portable"),
    )


@pytest.fixture(scope="session")
def engine(bundle: Bundle) -> Iterator[eagle3.Engine]:
    """The engine of `bundle`."""
    yield eagle3.load(bundle.root, threads=1)


@pytest.fixture(scope="session")
def shallow() -> Any:
    """`llama` of two layers, quicker to export: for tests of a head alone, whatever its target."""
    return tiny.tiny_model("llama", num_layers=2, scale=2.0)


@pytest.fixture(scope="session")
def shallow_folder(shallow: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("shallow"), shallow)


@pytest.fixture(scope="session")
def small() -> Any:
    """A tiny random Llama, vocabulary 16: sequences of three tokens can be enumerated."""
    return tiny.tiny_model("llama", vocab_size=16, num_layers=3, scale=0.5)


@pytest.fixture(scope="session")
def small_folder(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("small"), small)


@pytest.fixture(scope="session")
def small_bundle(
    small: Any, small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """`small` with a random head whose draft vocabulary is 8."""
    folder = tmp_path_factory.mktemp("small_head")
    head = tiny.save_head(folder, small, draft_vocab_size=8, aux_layer_ids=(0, 1, 2))
    return exported_once(tmp_path_factory, "small", small_folder, head)


@pytest.fixture(scope="session")
def small_engine(small_bundle: Bundle) -> Iterator[eagle3.Engine]:
    """The engine of `small_bundle`."""
    yield eagle3.load(small_bundle.root, threads=1)


@pytest.fixture(scope="session")
def windowed() -> Any:
    """A tiny random Mistral that attends to 16 tokens, vocabulary 32."""
    return tiny.tiny_model("mistral", vocab_size=32, num_layers=3, scale=1.5, seed=3)


@pytest.fixture(scope="session")
def windowed_bundle(windowed: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """On the portable lowering; the head's vocabulary is whole, its trained context 16."""
    folder = tmp_path_factory.mktemp("windowed")
    target = tiny.save_target(folder / "target", windowed)
    trained = {"aux_layer_ids": (0, 1, 2), "max_position_embeddings": 16}
    head = tiny.save_head(folder / "head", windowed, **trained)
    return exported_once(
        tmp_path_factory, "windowed", target, head, tiny.tiny_plan(lowering="portable")
    )


@pytest.fixture(scope="session")
def windowed_engine(windowed_bundle: Bundle) -> Iterator[eagle3.Engine]:
    """The engine of `windowed_bundle`."""
    yield eagle3.load(windowed_bundle.root, threads=1)
