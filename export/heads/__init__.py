"""Draft checkpoints: any of four dialects in, one fully resolved description out.

`files` reads a folder, `dialect` tells which dialect it is, a file for each says what is its own
(`eagle1`, `official`, `specforge`, `speculators`), `reader` resolves every value with its source
into the `description`. Nothing is guessed: what is not understood is refused with the reason, and
`assume` lets the user decide it.
"""

from eagle3.export.heads.assume import parse_assumptions
from eagle3.export.heads.description import (
    AUX_LAYERS,
    OWN_EMBEDDING,
    Head,
    HeadConfig,
    Resolved,
    TargetFacts,
)
from eagle3.export.heads.reader import read_head, reread

__all__ = [
    "AUX_LAYERS",
    "OWN_EMBEDDING",
    "Head",
    "HeadConfig",
    "Resolved",
    "TargetFacts",
    "parse_assumptions",
    "read_head",
    "reread",
]
