"""How far a quantized target is from the original: KL divergence, agreement, perplexity.

Both read the same ordinary text. The original is the PyTorch model, the quantized one is the engine
that will be served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.export.targets.target import Target
from eagle3.runtime.errors import ExportError
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.trees.tree import Tree

MAX_MEAN_KL = 0.01
"""Mean KL divergence, in nats per token, above which an export must be accepted explicitly."""

_TEXTS = Path(__file__).parent / "texts"
_WINDOW = 512
_ROWS = 17


@dataclass(frozen=True)
class Quality:
    """A quantized target against the original, over `tokens` tokens of text.

    mean_kl, kl_99: KL divergence of the next token's distribution, mean and 99th percentile, in
    nats. top_1: fraction of positions at which both find the same token most likely. perplexity,
    original_perplexity: of the text.
    """

    tokens: int
    mean_kl: float
    kl_99: float
    top_1: float
    perplexity: float
    original_perplexity: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def refuse_low(self) -> None:
        """Raise ExportError if the target is too far from the original."""
        if not self.mean_kl <= MAX_MEAN_KL:
            raise ExportError(
                f"the int8 target is far from the original: mean KL divergence {self.mean_kl:.4f}"
                f" nats per token (limit {MAX_MEAN_KL}), the most likely token is the same at"
                f" {self.top_1:.1%} of positions, perplexity {self.perplexity:.2f} instead of"
                f" {self.original_perplexity:.2f}; nothing was written. Export with --weights same,"
                " or accept this quality with --accept-quality"
            )


def measure_quality(engine: TargetEngine, target: Target) -> Quality:
    """Compare `engine` with `target` on the built-in texts: prose, code, dialogue, mathematics."""
    kl: list[float] = []
    same: list[bool] = []
    own: list[float] = []
    original: list[float] = []
    for ids in _windows(target, engine.capacity - _ROWS):
        with torch.no_grad():
            logits = target.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        for first in range(0, len(ids), _ROWS):
            part = ids[first : first + _ROWS]
            out = engine.verify(Tree.chain(int(part[0]), part[1:].tolist()), first, True)
            engine.keep(first, tuple(range(1, len(part))))
            assert out.logits is not None
            p = torch.log_softmax(logits[first : first + len(part)].double(), -1)
            q = torch.log_softmax(torch.from_numpy(out.logits.copy()).double(), -1)
            kl += (p.exp() * (p - q)).sum(-1).tolist()
            same += (p.argmax(-1) == q.argmax(-1)).tolist()
            following = torch.from_numpy(ids[first + 1 : first + 1 + len(part)])
            rows = torch.arange(len(following))
            own += q[rows, following].tolist()
            original += p[rows, following].tolist()
    return Quality(
        tokens=len(kl),
        mean_kl=float(np.mean(kl)),
        kl_99=float(np.quantile(kl, 0.99)),
        top_1=float(np.mean(same)),
        perplexity=float(np.exp(-np.mean(own))),
        original_perplexity=float(np.exp(-np.mean(original))),
    )


def _windows(target: Target, longest: int) -> Iterator[NDArray[np.int64]]:
    """Yield pieces of the texts, as token ids below the target's vocabulary size."""
    for file in sorted(_TEXTS.glob("*.txt")):
        ids = target.tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)
        known = np.array([i for i in ids["input_ids"] if i < target.vocab_size], np.int64)
        size = max(2, min(_WINDOW, longest))
        pieces = [known[first : first + size] for first in range(0, len(known), size)]
        yield from (piece for piece in pieces if len(piece) > 1)
