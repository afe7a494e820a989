"""Exports that several files of this folder look at; each is made once a run.

Letters as in the package: B batch, N rows of a call, M rows with logits, S capacity, d hidden,
V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from once import exported_once

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import Clock

LOWERINGS = ("ort", "portable")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices lose all their time to threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Exported:
    """A model in PyTorch and its bundle without a draft."""

    model: Any
    folder: Path
    bundle: Bundle

    def engine(self) -> TargetEngine:
        return TargetEngine(self.bundle, 1, Clock())


Export = Callable[[str, str], Exported]


def _model(architecture: str) -> Any:
    """As few layers as the architecture allows; its greedy text is no single token."""
    if architecture != "gemma3_text":
        model = tiny.tiny_model(architecture, num_layers=2, scale=2.0)
    else:
        # Windows alternate: two sliding layers, then a full one. Embeddings that are tied, and
        # large beside what the layers add, would only repeat their input.
        model = tiny.tiny_model(architecture, num_layers=3, seed=1, scale=0.02)
    tiny.jitter_vectors(model)
    return model


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """exported(architecture, lowering): its target alone, as small as the architecture allows."""
    made: dict[tuple[str, str], Exported] = {}
    models: dict[str, tuple[Any, Path]] = {}

    def export(architecture: str, lowering: str) -> Exported:
        if architecture not in models:
            model = _model(architecture)
            folder = tmp_path_factory.mktemp(architecture)
            models[architecture] = (model, tiny.save_target(folder, model))
        key = (architecture, lowering)
        if key not in made:
            model, folder = models[architecture]
            plan = tiny.tiny_plan(lowering=lowering)
            name = f"{architecture}-alone-{lowering}"
            bundle = exported_once(tmp_path_factory, name, folder, None, plan)
            made[key] = Exported(model, folder, bundle)
        return made[key]

    return export


@pytest.fixture(params=LOWERINGS, scope="session")
def full_bundle(request: pytest.FixtureRequest) -> Bundle:
    """`llama` with its random head, in either lowering."""
    name = "bundle" if request.param == "ort" else "portable_bundle"
    bundle: Bundle = request.getfixturevalue(name)
    return bundle
