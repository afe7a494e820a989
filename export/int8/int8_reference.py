"""PyTorch with the numbers of an int8 engine.

The model's own code runs; only its products and embedding lookups compute with the weights that the
engine stores. An error in the graph's wiring is therefore not mistaken for quantization, nor the
reverse.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from eagle3.export.graphs.joined_products import JOINED
from eagle3.export.graphs.weights import INT8, SCALE
from eagle3.export.int8.columns import LARGEST, hadamard, rotation_block

# Relative error of a weight that is only rounded; for int8 it is about 0.01.
_ROUNDING = 0.05
# What the graph appends to the name of a weight: its layout, and the number of an expert.
_LAYOUT = re.compile(r"(\.T)?(?:\.(\d+))?$")


class ModelWeights:
    """The weights of a model by their names in its graph."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._tensors = model.state_dict(keep_vars=True)
        self._modules = dict(model.named_modules())

    def __getitem__(self, name: str) -> Tensor:
        """Return the matrix of which the graph stores `name`; of one expert, if it names one.

        Raises KeyError if there is none.
        """
        name = name.removeprefix("model.")
        layout = _LAYOUT.search(name)
        assert layout is not None
        tensor: Tensor = self._tensors[name if name in self._tensors else name[: layout.start()]]
        is_expert = name not in self._tensors and layout[2] is not None
        return tensor[int(layout[2])] if is_expert else tensor

    def rows(self, name: str) -> Tensor:
        """Return the matrix as [N,K], one row for each result of its product."""
        weight, path = self[name], name.removeprefix("model.")
        parts = path.split(".")
        while parts and not isinstance(self._modules.get(".".join(parts)), nn.Module):
            parts.pop()
        owner = self._modules[".".join(parts)]
        is_turned = type(owner).__name__ == "Conv1D" or getattr(owner, "is_transposed", False)
        return weight.mT if is_turned else weight


class ProductMode(TorchFunctionMode):
    """Within this context, products with `weights`, and lookups in them, call `linear` and
    `lookup`. A view of a weight counts as the weight.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = {_storage(weight) for weight in weights}
        self._functions: dict[Any, Callable[..., Tensor]] = {
            functional.linear: lambda x, w, b=None: self.linear(x, w, b),
            functional.embedding: lambda ids, w, *_, **__: self.lookup(ids, w),
            torch.addmm: lambda b, x, w, **_: self.linear(x, w.T, b),
            torch.matmul: lambda x, w: self.linear(x, w.mT, None),
            Tensor.matmul: lambda x, w: self.linear(x, w.mT, None),
            Tensor.__matmul__: lambda x, w: self.linear(x, w.mT, None),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self._functions.get(func)
        if own is None or not any(map(self._is_ours, args)):
            return func(*args, **(kwargs or {}))
        return own(*args, **(kwargs or {}))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..,K] times weight [N,K], plus bias [N]."""
        out = x @ weight.mT
        return out if bias is None else out + bias

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the rows `ids` of weight [V,d]."""
        return weight[ids]

    def _is_ours(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() >= 2 and _storage(x) in self._storages


@dataclass(frozen=True)
class StoredInt8:
    """An int8 weight of a graph's file: values [N,K] and scales [N].

    rotated: for a product with rotated inputs, or the rows of an embedding that is tied to one.
    """

    values: Tensor
    scales: Tensor
    rotated: bool

    def is_rounded(self, weight: Tensor) -> bool:
        """Return whether these are the values of `weight` [N,K], except for rounding. A few rows
        are compared.
        """
        if weight.shape != self.values.shape:
            return False
        rows = slice(None, None, max(1, len(weight) // 64))
        part = StoredInt8(self.values[rows], self.scales[rows], self.rotated)
        own = weight[rows].detach().float()
        error = (part.floats() - own).norm() / own.norm().clamp(min=1e-12)
        return bool(error <= _ROUNDING)

    def floats(self) -> Tensor:
        """Return the weight [N,K] that the values stand for."""
        rows = self.values.float() * self.scales[:, None]
        return rotate(rows) if self.rotated else rows


def stored_int8(graph: ir.Model, weights: ModelWeights) -> dict[str, StoredInt8]:
    """Return the int8 weights of a graph by name, joined ones separately.

    Their values are read from the file when they are used.
    """
    known = graph.graph.initializers
    found: dict[str, StoredInt8] = {}
    for stored in [name for name in known if name.endswith(INT8)]:
        values, scales = known[stored], known[stored.removesuffix(INT8) + SCALE]
        by_column = any(user.op_type != "Gather" for user in values.consumers())
        rows = _tensor(values)
        rows, first = rows.T if by_column else rows, 0
        of_rows = _tensor(scales)
        for name in stored.removesuffix(INT8).split(JOINED):
            part = slice(first, first + weights[name].numel() // rows.shape[1])
            found[name] = StoredInt8(rows[part], of_rows[part], by_column)
            first = part.stop
    return found


def _tensor(value: ir.Value) -> Tensor:
    """Return an initializer; only what is used of it is read from the file."""
    assert value.const_value is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file is mapped read-only, and nothing writes to it
        return torch.from_numpy(np.asarray(value.const_value.numpy()))


class Int8Products(ProductMode):
    """Within this context, a model computes with `stored` weights as the int8 engine does."""

    def __init__(self, weights: ModelWeights, stored: Mapping[str, StoredInt8]) -> None:
        own = {name: weights[name] for name in stored}
        super().__init__(own.values())
        self._model = weights.model
        self._stored = {place(weight): stored[name] for name, weight in own.items()}

    def __enter__(self) -> Self:
        """Experts run one after the other: fused forms of them are no products of matrices."""
        modules = self._model.modules()
        configs = {id(each.config): each.config for each in modules if hasattr(each, "config")}
        self._before = [(c, c._experts_implementation) for c in configs.values()]
        for config in configs.values():
            config._experts_implementation = "eager"
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for config, implementation in self._before:
            config._experts_implementation = implementation

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = self._stored.get(place(weight))
        if found is None:  # a part of a weight that is not stored as int8
            return super().linear(x, weight, bias)
        out = product(rotate(x), found)
        return out if bias is None else out + bias

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        stored = self._stored[place(weight)]
        rows = stored.values[ids].float() * stored.scales[ids][..., None]
        return rotate(rows) if stored.rotated else rows

    def table(self, weight: Tensor) -> Tensor:
        """Return the values [V,d] that the engine looks up in an embedding."""
        found = self._stored.get(place(weight))
        return weight if found is None else found.floats()


def product(turned: Tensor, stored: StoredInt8) -> Tensor:
    """Multiply rotated rows [..,K] by a stored weight -> [..,N], as the engine does."""
    of_row = turned.abs().amax(-1, keepdim=True) * torch.tensor(1 / LARGEST)
    quantized = (turned / of_row).round().clamp(-LARGEST - 1, LARGEST).nan_to_num()
    # Sums of integers below 2^24 are exact in float32.
    return quantized @ stored.values.float().T * stored.scales * of_row


def rotate(x: Tensor) -> Tensor:
    """Rotate rows [..,K] as `columns.rotated` does."""
    width = rotation_block(x.shape[-1])
    blocks = x.reshape(*x.shape[:-1], -1, width)
    return (blocks @ torch.from_numpy(hadamard(width))).reshape(x.shape)


def place(weight: Tensor) -> tuple[int, int]:
    """Return a key by which a weight is recognized, also where it is seen transposed."""
    return _storage(weight), int(weight.storage_offset())


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
