"""What `eagle3 train eval` is asked for. Imports nothing heavy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import DataError


@dataclass(frozen=True)
class EvalRequest:
    """What to measure. prompts: files, one task each; data: a folder whose held-out conversations
    teacher-forced agreement is measured on; bundle: where the head's bundle is kept or found.
    Raises DataError for a value out of range.
    """

    target: str
    draft: Path
    prompts: tuple[Path, ...]
    tree: TreePlan = TreePlan()
    num_prompts: int | None = 20
    max_new_tokens: int = 128
    draft_weights: str = "same"
    max_seq_len: int = 2048
    compare: bool = False
    data: Path | None = None
    bundle: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_prompts < 1:
            raise DataError(f"num_prompts is {self.num_prompts}: give at least 1")
