"""What is known of a sweep and each of its trials: two files in the sweep's folder, and the records in the trials' own."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from actors.trial_record import TrialRecord
from decoding.prediction import ServingCost
from pipelines.job import JobError, write_json
from pipelines.sweep_config import Value
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places

Outcome = Literal["waiting", "running", "finished", "stopped", "failed", "left out"]
ENDED = ("finished", "stopped", "failed", "left out")
"""Outcomes after which nothing more happens by itself."""
_SWEEP, _TRIALS = "sweep.json", "trials.json"


@dataclass(frozen=True)
class SweepFacts:
    """What a sweep is, written down when it starts.

    Attributes:
        overrides: what was typed, for `--resume`.
        dimensions: paths of the fields that trials differ in.
        manifest: of the cache, the same for all trials however the cache grows.
        objective: what is maximized, `tau` or `speed`.
        cost_source: where the costs of a round come from; empty where there are none.
    """

    name: str
    target: str
    corpus: str
    storage: dict[str, Any]
    overrides: list[str]
    dimensions: list[str]
    search: str
    manifest: str
    objective: str
    cost_source: str
    started: str

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(StorageSettings(**self.storage))

    @property
    def resuming(self) -> str:
        """The command that goes on with the sweep."""
        return self._command("pipelines.sweep", ("output",), "--resume", f"sweep={self.name}")

    @property
    def longer(self) -> str:
        """The command that trains the best trial longer."""
        options = ("+experiment=from_sweep", f"sweep={self.name}", "trial=best", "train.steps=NUMBER")
        return self._command("pipelines.train", ("output",), *options)

    def evaluating(self, trial: "Trial") -> str:
        """The command that evaluates a trial's drafter."""
        return self._command("pipelines.evaluate", ("output", "target", "corpus", "storage"), f"run={trial.run}")

    def _command(self, job: str, groups: tuple[str, ...], *options: str) -> str:
        """With those of the sweep's own options that say where things are."""
        kept = [each for each in self.overrides if each.partition("=")[0].partition(".")[0] in groups]
        return shlex.join(["python", "-m", job, *options, *kept])


@dataclass
class Trial:
    """A trial as its sweep sees it.

    Attributes:
        values: of the fields that trials differ in, by path.
        run: name of its training run.
        parameters: weights that are trained.
        cost: of serving its drafter; None where that was not asked.
        command: what trains the same drafter again by itself.
        outcome, why: how it ended, or where it stands; why it was left out or given up.
        failures: what ended it each time that it failed.
    """

    name: str
    values: dict[str, Value]
    run: str
    parameters: int
    cost: ServingCost | None
    command: str
    outcome: Outcome = "waiting"
    why: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """A trial with its record."""

    trial: Trial
    record: TrialRecord

    @property
    def tau(self) -> float | None:
        """The best score on the held-out rows so far."""
        return self.record.best().get(self.record.metric)

    @property
    def speed(self) -> float | None:
        """Predicted tokens a second of all requests together."""
        return None if self.tau is None or self.trial.cost is None else self.trial.cost.tokens_per_second(self.tau)

    @property
    def speedup(self) -> float | None:
        return None if self.tau is None or self.trial.cost is None else self.trial.cost.speedup(self.tau)

    def objective(self, name: str) -> float | None:
        return self.speed if name == "speed" else self.tau

    @property
    def acceptance(self) -> list[float]:
        """one_minus_tv@k by draft position, of the best scoring."""
        row, found = self.record.best(), list[float]()
        while (value := row.get(f"heldout/one_minus_tv@{len(found) + 1}")) is not None:
            found.append(float(value))
        return found


class Book:
    """The trials of a sweep by name, in the order in which they were planned; written down at every change. One process writes it."""

    def __init__(self, folder: Path, trials: Iterable[Trial] = (), seconds: float = 0.0) -> None:
        """
        Args:
            seconds: that the sweep has run, over all its starts.
        """
        self.folder, self.seconds = folder, seconds
        self.trials = {trial.name: trial for trial in trials}

    @classmethod
    def open(cls, folder: Path) -> "Book":
        """The book of a folder; an empty one where there is none yet."""
        found = read_json(folder / _TRIALS)
        return cls(folder, map(_trial, found.get("trials", [])), found.get("seconds", 0.0))

    def __iter__(self) -> Iterator[Trial]:
        return iter(list(self.trials.values()))

    def save(self) -> None:
        write_json(self.folder / _TRIALS, {"seconds": self.seconds, "trials": [asdict(trial) for trial in self]})


def write_facts(folder: Path, facts: SweepFacts) -> None:
    write_json(folder / _SWEEP, asdict(facts))


def has_facts(folder: Path) -> bool:
    return (folder / _SWEEP).is_file()


def read_facts(folder: Path) -> SweepFacts:
    """What the sweep of this folder is.

    Raises:
        JobError: there is none, or its file is damaged.
    """
    if not has_facts(folder):
        known = sorted(path.parent.name for path in folder.parent.glob(f"*/{_SWEEP}"))
        there = f"There are: {', '.join(known)}" if known else "There is none yet: `python -m pipelines.sweep` makes one"
        raise JobError(f"{folder} holds no sweep. {there}.")
    try:
        return SweepFacts(**read_json(folder / _SWEEP))
    except TypeError as error:
        raise JobError(f"{folder / _SWEEP} is not what `sweep` writes ({error}): remove the folder and start the sweep again") from error


def results(book: Book, store: ObjectStore, places: Places, known: Mapping[str, Result]) -> dict[str, Result]:
    """Every trial with its record; `known` ones that had ended before are not read again."""
    found = {}
    for trial in book:
        before = known.get(trial.name)
        if before is not None and before.trial.outcome == trial.outcome and trial.outcome in ENDED:
            found[trial.name] = before
        else:
            found[trial.name] = Result(Trial(**vars(trial)), TrialRecord.read(store.child(places.run(trial.run))))
    return found


def best_of(found: Iterable[Result], objective: str) -> Result | None:
    """The finished trial with the highest objective; None while none is finished."""
    finished = [one for one in found if one.trial.outcome == "finished" and one.objective(objective) is not None]
    return max(finished, key=lambda one: one.objective(objective) or 0.0, default=None)


def _trial(value: dict[str, Any]) -> Trial:
    cost = value.pop("cost")
    values = {path: tuple(one) if isinstance(one, list) else one for path, one in value.pop("values").items()}
    return Trial(**value, values=values, cost=None if cost is None else ServingCost(**cost))


def read_json(path: Path) -> dict[str, Any]:
    """One of the sweep's files; an empty document where there is none yet."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise JobError(f"{path} is damaged ({error}). Remove it: what trials have done lies with their runs and is found again.") from error
