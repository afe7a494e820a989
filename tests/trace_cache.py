"""Traces of equal modules, made once per process: most of a test run is PyTorch's exporter.

Many tests export the same tiny checkpoint again. A trace is a function of the module (its class,
weights, buffers and configuration), the shapes of its inputs and the lowering, and the cache key
covers all of them, and the functions of the tracer that a test may replace. What follows a
trace (lowering, weights, files, self-check) runs each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from eagle3.export.draft_graphs import draft_engines
from eagle3.export.graphs import tracer
from eagle3.export.graphs.attention import KeyWindow, Lowering

_REPLACEABLE = ("fix_shapes", "fuse_for_ort", "fuse_standard", "optimize_ir")


@contextmanager
def equal_traces_made_once() -> Iterator[None]:
    """Within this context an equal trace returns a copy of the first one's graph."""
    made: dict[str, ir.Model] = {}
    trace = tracer.trace_unlowered

    def trace_once(
        module: nn.Module,
        inputs: Mapping[str, tuple[Any, str]],
        outputs: Sequence[str],
        lowering: Lowering,
        name: str,
    ) -> ir.Model:
        key = _key(module, inputs, (list(outputs), lowering.name, name))
        if key not in made:
            made[key] = trace(module, inputs, outputs, lowering, name)
            made[key].graph.sort()  # nodes are copied in order
        return made[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        for user in (tracer, draft_engines):
            patch.setattr(user, "trace_unlowered", trace_once)
        yield


def _key(module: nn.Module, inputs: Mapping[str, tuple[Any, str]], rest: Any) -> str:
    digest = hashlib.sha256(repr(module).encode())
    for kind in (module.named_parameters(), module.named_buffers()):
        for name, tensor in kind:
            digest.update(f"{name} {_described(tensor)}".encode())
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    for part in module.modules():
        plain = {k: v for k, v in vars(part).items() if _is_plain(v)}
        config = getattr(part, "config", None)
        facts = config.to_dict() if hasattr(config, "to_dict") else repr(config)
        digest.update(json.dumps([type(part).__name__, plain, facts], default=repr).encode())
    shapes = [(name, _described(value), dims) for name, (value, dims) in inputs.items()]
    functions = [id(getattr(tracer, each)) for each in _REPLACEABLE] + [id(KeyWindow.bias)]
    digest.update(json.dumps([shapes, rest, functions]).encode())
    return digest.hexdigest()


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return [_described(each) for each in value]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)
