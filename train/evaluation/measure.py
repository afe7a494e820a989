"""Results of an evaluation: the statistics of real decoding, summed for each task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3.runtime.stats import Stats


@dataclass
class TaskResult:
    """Sums over the requests of one task.

    name: the task. prompts: number of decoded prompts. rounds: number of target calls. committed:
    tokens committed in these rounds. decode_ms, plain_ms: time of decoding with the draft and of
    plain decoding in milliseconds; plain_ms is None if plain decoding was not measured. differing:
    prompts with another answer in plain decoding. too_long: prompts that were left out because they
    do not fit the context. _accepted: accepted draft tokens by position.
    """

    name: str
    prompts: int = 0
    rounds: int = 0
    committed: float = 0.0
    decode_ms: float = 0.0
    plain_ms: float | None = None
    differing: int = 0
    too_long: int = 0
    _accepted: list[float] = field(default_factory=list)

    def add(self, stats: Stats) -> None:
        """Add the statistics of one request."""
        self.prompts += 1
        self.rounds += stats.rounds
        self.committed += stats.rounds * stats.acceptance_length
        self.decode_ms += stats.decode_ms
        for i, count in enumerate(stats.proposed_by_position):
            if i == len(self._accepted):
                self._accepted.append(0.0)
            self._accepted[i] += count * stats.accepted_by_position[i]

    @property
    def tau(self) -> float:
        """Acceptance length: committed tokens per target call, the target's own token included."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def speedup(self) -> float | None:
        """Time of plain decoding divided by the time with the draft; None without measurement."""
        return self.plain_ms / self.decode_ms if self.plain_ms and self.decode_ms else None

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The n-alpha values, for n = 0, 1, ...

        n-alpha is the share of the rounds with at least n accepted draft tokens that accepted one
        more, whether or not their tree had another level. For a chain, it is the acceptance rate of
        position n.
        """
        before = [self.rounds, *self._accepted]
        pairs = zip(self._accepted, before, strict=False)
        return tuple(now / was if was else 0.0 for now, was in pairs)

    def to_json(self) -> dict[str, Any]:
        """Return the measured numbers as a JSON object."""
        numbers: dict[str, Any] = {
            "task": self.name,
            "prompts": self.prompts,
            "rounds": self.rounds,
            "tau": round(self.tau, 4),
            "acceptance_by_position": [round(a, 4) for a in self.acceptance],
        }
        if self.too_long:
            numbers["too_long"] = self.too_long
        if self.plain_ms is not None:
            numbers["speedup"] = self.speedup and round(self.speedup, 4)
            numbers["token_equal"] = self.prompts - self.differing
        return numbers


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    tasks: one result of real decoding per prompt file. agreement: the teacher-forced agreement of
    each draft step, [S]; empty if it was not measured.
    """

    tasks: tuple[TaskResult, ...]
    agreement: tuple[float, ...] = ()

    @property
    def mean_tau(self) -> float:
        """Mean of tau over the tasks."""
        return sum(task.tau for task in self.tasks) / len(self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as a JSON object."""
        return {
            "tasks": [task.to_json() for task in self.tasks],
            "mean_tau": round(self.mean_tau, 4),
            "teacher_forced_agreement": [round(a, 4) for a in self.agreement],
        }

    def lines(self) -> list[str]:
        """Return the evaluation as the lines of a table."""
        wide = max(len(task.name) for task in self.tasks)
        rows = [f"{'task':{wide}}  prompts    tau  acceptance by position"]
        for task in self.tasks:
            shares = " ".join(f"{a:.2f}" for a in task.acceptance)
            speed = ""
            if task.plain_ms is not None:
                equal = task.prompts - task.differing
                ratio = "-" if task.speedup is None else f"{task.speedup:.2f}x"
                speed = f"  {ratio}, {equal} token-equal"
            if task.too_long:
                speed += f"  ({task.too_long} too long, left out)"
            rows.append(f"{task.name:{wide}}  {task.prompts:7}  {task.tau:.3f}  {shares}{speed}")
        rows.append(f"{'mean':{wide}}  {'':7}  {self.mean_tau:.3f}")
        if self.agreement:
            shares = " ".join(f"{a:.2f}" for a in self.agreement)
            rows.append(f"teacher-forced agreement by step, over the draft vocabulary: {shares}")
        return rows
