"""The reference of a self-check: the PyTorch model's own numbers, and how errors are judged."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.export.draft_graphs.head_modules import Eagle1Head, EagleHead
from eagle3.export.graphs.weights import block_int8, int8_block
from eagle3.export.int8.int8_reference import Int8Products
from eagle3.export.targets.target import Target
from eagle3.runtime.errors import SelfCheckFailed

Array = NDArray[Any]
AnyHead = EagleHead | Eagle1Head
_Module = TypeVar("_Module", bound=torch.nn.Module)


class Reference:
    """The PyTorch model's own numbers for a text: logits [T,V], features [T,F].

    int8: computes with the weights that an int8 engine stores; None for other engines.
    """

    def __init__(
        self,
        target: Target,
        tokens: NDArray[np.int64],
        layers: tuple[int, ...],
        int8: Int8Products | None = None,
    ) -> None:
        self.target, self.tokens, self._layers = target, tokens, layers
        self._int8 = int8
        self.logits, self.features = self.run(tokens)

    def embedding(self, table: torch.Tensor) -> torch.Tensor:
        """Return the values of the target's embedding `table` [V,d] that the engines look up."""
        return table if self._int8 is None else self._int8.table(table)

    def run(self, tokens: NDArray[np.int64]) -> tuple[Array, Array | None]:
        """Run a separate call without any cache."""
        with torch.no_grad(), self._int8 or nullcontext():
            out = self.target.model(
                input_ids=torch.from_numpy(tokens)[None],
                use_cache=False,
                output_hidden_states=bool(self._layers),
            )
        logits = out.logits[0].float().numpy()
        if not self._layers:
            return logits, None
        fused = torch.cat([out.hidden_states[i] for i in self._layers], -1)
        return logits, fused[0].float().numpy()


def relative_error(found: Array, reference: Array) -> float:
    """Return max |found - reference| / max |reference|; infinite if there is a NaN."""
    return relative_to(max_difference(found, reference), reference)


def max_difference(found: Array, reference: Array) -> float:
    return float(np.abs(found.astype(np.float32) - reference.astype(np.float32)).max())


def relative_to(difference: float, reference: Array) -> float:
    error = difference / max(float(np.abs(reference).max()), 1e-9)
    return error if np.isfinite(error) else float("inf")


def num_threads() -> int:
    return max(1, torch.get_num_threads())


def with_int8_weights(module: _Module) -> _Module:
    """Return a copy whose matrices hold the values that the int8 engine reads."""
    module = copy.deepcopy(module)
    for linear in (m for m in module.modules() if isinstance(m, torch.nn.Linear)):
        weight = linear.weight.numpy().T
        block = int8_block(weight.shape[0])
        if block is not None:
            stored, scales = block_int8(np.ascontiguousarray(weight), block)
            values = stored.astype(np.float32) * np.repeat(scales, block, axis=0)
            linear.weight.copy_(torch.from_numpy(values.T.copy()))
    return module


def judge(name: str, errors: dict[str, float], tolerance: float) -> None:
    bad = {key: value for key, value in errors.items() if not value <= tolerance}
    if bad:
        listed = ", ".join(f"{key} {value:.2e}" for key, value in bad.items())
        raise SelfCheckFailed(
            f"the exported {name} disagrees with PyTorch: relative error {listed}, tolerance "
            f"{tolerance:.0e}; nothing was written. Please report the target and the versions"
        )
