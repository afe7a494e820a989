"""The engines of a bundle on a GPU, independent of the library that runs them.

`tensorrt_engine.py` runs plan files, `ort_cuda_engine.py` runs the bundle's ONNX files on ONNX
Runtime's CUDA provider. Both issue a call on the driver's stream over fixed addresses and do
nothing else, so that `halves.py` can capture it between its own kernels.
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
    """One shape of an engine over fixed addresses, issued any number of times."""

    def enqueue(self) -> None:
        """Issue the call on the driver's stream. Raises EngineError."""

    def check_capturable(self) -> None:
        """Raise EngineError if a CUDA graph cannot contain this call. Requires a first
        `enqueue`.
        """


class DeviceEngine(Protocol):
    """A loaded engine. name: its name in the bundle."""

    name: str

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of its largest call. Engines share it, since one stream runs them in
        order.
        """

    def call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> DeviceCall:
        """Return a call for inputs of these shapes, with every tensor at its address. Raises
        EngineError.
        """

    def loose_call(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], scratch: DeviceBuffer
    ) -> DeviceCall:
        """Like `call`, for calls that always have the same addresses. A later call may change it,
        so it must not be captured.
        """


@dataclass(frozen=True)
class Engines:
    """The engines of a bundle, loaded and compared with its manifest.

    drafter: the head that `draft`, its `draft_tree` engine, belongs to; both None if no head has
    one. draft_rows: maximum rows of one call of the draft. verify_widths: rows that the engines
    were built for, empty if unrestricted. prefill_chunk: prompt rows of one call.
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
        """Scratch memory of the engine that needs most, since they share it."""
        both = (self.target, self.draft)
        return max(engine.scratch_bytes for engine in both if engine is not None)

    @property
    def info(self) -> DraftInfo | None:
        """The head's entry in the manifest."""
        return None if self.drafter is None else self.manifest.drafts[self.drafter]

    @property
    def num_nodes(self) -> int:
        """M: nodes of the trees that the draft was compiled to grow, root included."""
        return 1 if self.info is None else self.info.tree.num_draft_tokens + 1

    @property
    def round_rows(self) -> int:
        """Maximum number of rows that a round leaves for the draft: root and path."""
        return 1 if self.info is None else round_rows(self.info)

    def bound_draft(self) -> Bound:
        """The tensors that are bound to the draft."""
        assert self.info is not None
        return bound_growth(self.manifest, self.info)


def round_rows(info: DraftInfo) -> int:
    """Return the maximum number of rows that a round leaves for a draft: root and path."""
    return info.tree.depth_in_use + 1


def growing_draft(manifest: Manifest) -> str | None:
    """Return the first head with a `draft_tree` engine, or None."""
    names = (name for name in manifest.drafts if engine_name(name, DRAFT_TREE) in manifest.engines)
    return next(names, None)
