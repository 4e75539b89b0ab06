"""`metrics.jsonl` of a training run."""

import json
from pathlib import Path
from typing import Any


class MetricsFile:
    """`metrics.jsonl` of a run: one row a line. Rows past the checkpoint that training resumes from are dropped, they will come again."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        self.path = path
        self.step = resumed_at
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = self.read(path)
        self._drop_after(resumed_at)

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """The whole rows of such a file; none where there is no file."""
        lines = path.read_text().splitlines() if path.is_file() else []
        return [row for row in map(_row, lines) if row is not None]

    def _drop_after(self, step: int) -> None:
        self.rows = [row for row in self.rows if row["step"] <= step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def append(self, row: dict[str, Any]) -> None:
        """A worker that restarted comes back to steps that were written: its rows replace them."""
        if self.rows and row["step"] < self.rows[-1]["step"]:
            self._drop_after(row["step"] - 1)
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def latest(self) -> dict[str, Any]:
        """The last value of every metric."""
        merged: dict[str, Any] = {}
        for row in self.rows:
            merged.update(row)
        return merged


def _row(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except ValueError:
        return None  # the line that a kill cut short
