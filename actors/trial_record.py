"""What a trial leaves beside its checkpoints: `trial.json` in its run's folder, the only thing that is read to know how it went."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.object_store import ObjectStore

RECORD = "trial.json"


@dataclass
class TrialRecord:
    """A trial's metrics and what they took. Rows after the checkpoint that a trial goes on from are dropped: they come again.

    Attributes:
        score: the held-out metric that chooses the best, `tau_teacher_forced` or `tau`.
        rows: metric rows as the training posts them, each with its `step`.
        notices: what the workers had to tell.
        seconds: spent on the trial, over all its starts, loading and scoring included.
        starts: processes that worked on it.
        hosts: machines that they ran on.
        drafter: folder of the exported drafter; empty until the trial is finished.
        exported_step: step that its weights are of.
    """

    score: str = "tau_teacher_forced"
    rows: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    starts: int = 0
    hosts: list[str] = field(default_factory=list)
    drafter: str = ""
    exported_step: int = 0

    @classmethod
    def read(cls, run: ObjectStore) -> "TrialRecord":
        """The record of a run; an empty one where there is none yet."""
        try:
            return cls(**json.loads(run.get(RECORD)))
        except FileNotFoundError:
            return cls()

    def write(self, run: ObjectStore) -> None:
        """Replace the run's record, whole or not at all."""
        run.put(RECORD, json.dumps(asdict(self)).encode())

    def add(self, row: dict[str, Any]) -> None:
        """Take a row; workers that started again come back to steps that were told: their rows replace them."""
        if "notice" in row:
            self.notices.append(row["notice"])
            return
        if self.rows and row["step"] < self.rows[-1]["step"]:
            self.drop_after(row["step"] - 1)
        self.rows.append(row)

    def drop_after(self, step: int) -> None:
        self.rows = [row for row in self.rows if row["step"] <= step]

    @property
    def finished(self) -> bool:
        return bool(self.drafter)

    @property
    def step(self) -> int:
        """Of the newest row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def metric(self) -> str:
        """The name that the score has in a row."""
        return f"heldout/{self.score}"

    @property
    def scores(self) -> list[tuple[int, float]]:
        """(step, score), in order."""
        return [(row["step"], row[self.metric]) for row in self.rows if self.metric in row]

    def best(self) -> dict[str, Any]:
        """The row of the best scoring; empty before the first."""
        return max((row for row in self.rows if self.metric in row), key=lambda row: row[self.metric], default={})

    def total(self, name: str) -> float:
        """Sum of a counter over all rows."""
        return sum(row.get(name, 0.0) for row in self.rows)
