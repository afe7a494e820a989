"""One file per way to propose; the names here are the choices of `--drafter`.

A drafter is built for a loaded bundle by its entry in `DRAFTERS`; `available` says which of them
a bundle can serve.
"""

from __future__ import annotations

from collections.abc import Callable

from eagle3.runtime.bundle import Bundle
from eagle3.runtime.drafters.base import Drafter, DraftRequest, NoDrafter
from eagle3.runtime.drafters.lookup import LookupDrafter
from eagle3.runtime.session import Clock

__all__ = ["DRAFTERS", "DraftRequest", "Drafter", "NoDrafter", "available", "build"]


def _none(bundle: Bundle, threads: int, clock: Clock) -> Drafter:
    return NoDrafter()


def _lookup(bundle: Bundle, threads: int, clock: Clock) -> Drafter:
    return LookupDrafter()


def _eagle(bundle: Bundle, threads: int, clock: Clock) -> Drafter:
    from eagle3.runtime.draft import DraftEngine
    from eagle3.runtime.drafters.eagle import EagleDrafter
    from eagle3.runtime.growth import ENGINE, GrowthEngine

    manifest = bundle.manifest
    info = manifest.draft
    assert info is not None
    target_ids = bundle.target_ids()
    engine = DraftEngine(bundle, threads, clock)
    has_growth = ENGINE in manifest.engines
    growth = GrowthEngine(bundle, engine, threads, clock) if has_growth else None
    return EagleDrafter(info.method, engine, target_ids, manifest.target.vocab_size, growth)


DRAFTERS: dict[str, Callable[[Bundle, int, Clock], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "eagle": _eagle,
    "eagle3": _eagle,
}


def available(bundle: Bundle) -> list[str]:
    """The drafters of a bundle, by its manifest; the one it uses by default first."""
    draft = bundle.manifest.draft
    return [draft.method, "none", "lookup"] if draft is not None else ["none", "lookup"]


def build(name: str, bundle: Bundle, threads: int, clock: Clock) -> Drafter:
    """Loads what drafter `name` needs of the bundle."""
    return DRAFTERS[name](bundle, threads, clock)
