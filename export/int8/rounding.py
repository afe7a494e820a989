"""Rounds weights to int8 so that their products change least (GPTQ, Frantar et al. 2022).

Rounding each weight to the nearest integer is best for the weights, but not for the products that
the model computes. For typical inputs X of a product, the error of a weight that is already rounded
can be compensated by the weights of the same column that are not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from eagle3.export.int8.columns import LARGEST, Int8Rows, row_scales
from eagle3.export.int8.int8_reference import ProductMode, rotate
from eagle3.export.targets.target import Target
from eagle3.runtime.errors import ExportError
from eagle3.runtime.text.prompt_files import load_prompts

_TEXT = Path(__file__).parent / "calibration.txt"
_WINDOW, _MOST_WINDOWS = 256, 16
_FEW_TOKENS = 64
# Added to the diagonal of X^T X, relative to its mean: a weight whose inputs are always small must
# not compensate the errors of all others.
_DAMPING = 0.05
_WEIGHTS_AT_ONCE = 64
_DOUBLE_UP_TO = 4096  # above this K, the inverse of X^T X is computed in float32


def calibration_tokens(target: Target, prompts: Path | None = None) -> Tensor:
    """Return windows of a text [W,T], as token ids of the target.

    prompts: a file of prompts as `eagle3 run` reads it; None: a built-in text, which
    SmolLM2-135M-Instruct wrote. Random ids, if the tokenizer knows none of its words. Raises
    ExportError if `prompts` has hardly any token of the target.
    """
    if prompts is None:
        text = _TEXT.read_text(encoding="utf-8")
    else:
        text = "\n\n".join(load_prompts(prompts))
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    known = torch.tensor([i for i in ids if i < target.vocab_size], dtype=torch.int64)
    if len(known) < 2 and prompts is not None:
        raise ExportError(f"{prompts} has {len(known)} tokens of the target: use a longer text")
    if len(set(known.tolist())) < min(_FEW_TOKENS, target.vocab_size // 2):
        # A tokenizer that does not know the words maps all of them to "unknown".
        generator = torch.Generator().manual_seed(0)
        known = torch.randint(target.vocab_size, (_WINDOW * 4,), generator=generator)
    longest = getattr(target.config, "max_position_embeddings", None) or _WINDOW
    size = min(_WINDOW, longest, len(known))
    count = min(_MOST_WINDOWS, len(known) // size)
    return known[: count * size].reshape(count, size)


def rounded_weights(
    target: Target, tokens: Tensor, report: Callable[[str], None] = lambda _: None
) -> dict[int, Int8Rows]:
    """Return the rounded matrices of all products, by the address of the weight (`data_ptr`).

    tokens [W,T]: the calibration text. The model runs once; each weight is rounded when its product
    is computed, so only one X^T X [K,K] exists at a time. Experts are left out: a short text
    reaches some of them too rarely.
    """
    matrices = [p for p in target.model.parameters() if p.dim() == 2]
    report(f"rounding {len(matrices)} weights on {tokens.numel()} tokens of text")
    rounding = _Rounding(matrices)
    lm_head = target.model.get_output_embeddings()
    with torch.no_grad():
        with rounding:
            out = target.model.base_model(input_ids=tokens, use_cache=False)
        if lm_head is not None:
            rounding.add(out.last_hidden_state, lm_head.weight)
    return rounding.rounded


class _Rounding(ProductMode):
    """Rounds the weight of every product that runs within this context."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights)
        self.rounded: dict[int, Int8Rows] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dim() == 2:
            self.add(x, weight)
        return super().linear(x, weight, bias)

    def add(self, x: Tensor, weight: Tensor) -> None:
        """Round weight [N,K] for typical inputs x [..,K]."""
        if self._last is None or self._last[0] is not x:  # q, k and v have one x
            self._last = x, _inverse_factor(rotate(x.float()).reshape(-1, x.shape[-1]))
        self.rounded[weight.data_ptr()] = _compensated(rotate(weight.float()), self._last[1])


def _inverse_factor(rows: Tensor) -> Tensor:
    """Return U [K,K], upper triangular, with U^T U the inverse of the damped X^T X.

    rows: X [R,K].
    """
    products = rows.T @ rows
    if len(products) <= _DOUBLE_UP_TO:
        products = products.double()
    mean = products.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    products.diagonal().add_(_DAMPING * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(products))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _compensated(weight: Tensor, factor: Tensor) -> Int8Rows:
    """Round weight [N,K], one column after the other, and compensate each error in the columns
    that follow. factor: of `_inverse_factor`.
    """
    scales = torch.from_numpy(row_scales(weight.numpy()))
    left, rounded = weight.clone(), torch.empty_like(weight, dtype=torch.int8)
    for first in range(0, weight.shape[1], _WEIGHTS_AT_ONCE):
        part = slice(first, min(first + _WEIGHTS_AT_ONCE, weight.shape[1]))
        block, own = left[:, part], factor[part, part]
        errors = torch.empty_like(block)
        for i in range(block.shape[1]):
            steps = (block[:, i] / scales).round().clamp(-LARGEST, LARGEST)
            rounded[:, first + i] = steps.to(torch.int8)
            errors[:, i] = (block[:, i] - steps * scales) / own[i, i]
            block[:, i + 1 :] -= errors[:, i, None] * own[i, i + 1 :]
        left[:, part.stop :] -= errors @ factor[part, part.stop :]
    return rounded.numpy(), scales.numpy()
