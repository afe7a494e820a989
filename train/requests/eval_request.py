"""The settings of `eagle3 train eval`. As the command line reads them, no import here is heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.errors import DataError


@dataclass(frozen=True)
class EvalRequest:
    """The settings of one evaluation.

    target: checkpoint of the target. draft: folder of the head. prompts: files, each one a task.
    tree: the draft tree to decode with. num_prompts: prompts used per file, from the first one on
    (None: all). max_new_tokens: maximum length of an answer. draft_weights: data type of the head's
    weights in the bundle. max_seq_len: context of the bundle in tokens. compare: also run plain
    decoding. data: a data folder; the teacher-forced agreement is measured on its held-out
    conversations. bundle: folder in which the head's bundle is kept for the next evaluation (None:
    a temporary folder). threads: CPU threads (None: the engine's default).

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
            raise DataError(f"num_prompts must be at least 1, got {self.num_prompts}")
