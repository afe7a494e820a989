"""A bundle's engines on a GPU, whichever library runs them.

`tensorrt_engine.py` runs plan files, `ort_engine.py` the bundle's ONNX files on ONNX Runtime's CUDA
provider. Both issue a call onto the driver's stream over addresses that never change, and nothing
else, so that `halves.py` may capture it between its own kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from eagle3.runtime.bundle.manifest import DraftInfo, Manifest, engine_name
from eagle3.runtime.gpu.driver import DeviceBuffer
from eagle3.runtime.ort.growth_engine import ENGINE as DRAFT_TREE
from eagle3.runtime.ort.growth_engine import bound_growth
from eagle3.runtime.ort.signature import Bound

Shape = tuple[int, ...]
TARGET = "target"


class DeviceCall(Protocol):
    """One shape of an engine over fixed addresses, ready to be issued again and again."""

    def enqueue(self) -> None:
        """Issues the call on the driver's stream. Raises EngineError."""

    def check_capturable(self) -> None:
        """Raises EngineError where a CUDA graph cannot hold this call; after a first `enqueue`."""


class DeviceEngine(Protocol):
    """A loaded engine; name: the bundle's."""

    name: str

    @property
    def scratch_bytes(self) -> int:
        """What its hungriest call needs of memory that engines share, as one stream runs them in
        turn."""

    def call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> DeviceCall:
        """For inputs of these shapes, every tensor at its address. Raises EngineError."""

    def loose_call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> DeviceCall:
        """As `call`, always with the same addresses; a later one may change it, so it must not be
        captured."""


@dataclass(frozen=True)
class Engines:
    """The engines of a bundle, loaded and compared with its manifest.

    drafter: the head whose `draft_tree` `draft` is; both None where no head has one. draft_rows:
    the most rows that it takes in one call. verify_widths: what they were built for, empty where
    that was left open. prefill_chunk: rows of a prompt that they take in one call.
    """

    manifest: Manifest
    target: DeviceEngine
    drafter: str | None
    draft: DeviceEngine | None
    draft_rows: int
    verify_widths: tuple[int, ...]
    prefill_chunk: int

    @property
    def scratch_bytes(self) -> int:
        """What the hungrier of them needs; they take turns."""
        both = (self.target, self.draft)
        return max(engine.scratch_bytes for engine in both if engine is not None)

    @property
    def info(self) -> DraftInfo | None:
        """What the manifest says of the head."""
        return None if self.drafter is None else self.manifest.drafts[self.drafter]

    @property
    def num_nodes(self) -> int:
        """M: of the trees that the draft was compiled to grow, root included."""
        return 1 if self.info is None else self.info.tree.num_draft_tokens + 1

    @property
    def round_rows(self) -> int:
        """Rows that a round leaves for the draft at most: root and path."""
        return 1 if self.info is None else round_rows(self.info)

    def bound_draft(self) -> Bound:
        """What is bound of the draft."""
        assert self.info is not None
        return bound_growth(self.manifest, self.info)


def round_rows(info: DraftInfo) -> int:
    """Rows that a round leaves for a draft at most: root and path."""
    return info.tree.depth_in_use + 1


def growing_draft(manifest: Manifest) -> str | None:
    """The first head whose trees one graph grows; None where there is none."""
    names = (name for name in manifest.drafts if engine_name(name, DRAFT_TREE) in manifest.engines)
    return next(names, None)
