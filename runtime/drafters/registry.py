"""The registry of drafters.

A bundle's drafters are the drafts of its manifest, by name, and those that need no engine.
`DRAFTERS` maps a draft's method, or the name of a drafter without an engine, to the function that
builds it.
"""

from __future__ import annotations

from collections.abc import Callable

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import BUILT_IN_DRAFTERS, engine_name
from eagle3.runtime.drafters.base import Drafter, NoDrafter
from eagle3.runtime.drafters.lookup import LookupDrafter
from eagle3.runtime.stats import Clock


def _none(bundle: Bundle, name: str, threads: int, clock: Clock) -> Drafter:
    return NoDrafter()


def _lookup(bundle: Bundle, name: str, threads: int, clock: Clock) -> Drafter:
    return LookupDrafter()


def _eagle(bundle: Bundle, name: str, threads: int, clock: Clock) -> Drafter:
    from eagle3.runtime.drafters.eagle import EagleDrafter
    from eagle3.runtime.ort.draft_engine import DraftEngine
    from eagle3.runtime.ort.growth_engine import ENGINE, GrowthEngine

    engine, ids = DraftEngine(bundle, threads, clock, name), bundle.target_ids(name)
    has_growth = engine_name(name, ENGINE) in bundle.manifest.engines
    growth = GrowthEngine(bundle, name, engine, threads, clock) if has_growth else None
    return EagleDrafter(name, engine, ids, bundle.manifest.target.vocab_size, growth)


def _model(bundle: Bundle, name: str, threads: int, clock: Clock) -> Drafter:
    from eagle3.runtime.drafters.model import ModelDrafter
    from eagle3.runtime.ort.model_engine import ModelEngine

    engine = ModelEngine(bundle, name, threads, clock)
    return ModelDrafter(name, engine, bundle.manifest.target.vocab_size)


# First those of BUILT_IN_DRAFTERS, then the methods of a bundle's drafts.
DRAFTERS: dict[str, Callable[[Bundle, str, int, Clock], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "eagle": _eagle,
    "eagle3": _eagle,
    "model": _model,
}


def available(bundle: Bundle) -> list[str]:
    """Return the names of a bundle's drafters, the default first."""
    return [*bundle.manifest.drafts, *BUILT_IN_DRAFTERS]


def build(name: str, bundle: Bundle, threads: int, clock: Clock) -> Drafter:
    """Load drafter `name`, one of `available`, from the bundle."""
    info = bundle.manifest.drafts.get(name)
    return DRAFTERS[name if info is None else info.method](bundle, name, threads, clock)
