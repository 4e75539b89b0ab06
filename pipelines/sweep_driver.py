"""From points of the space to trials that can run, and what becomes of them: the sweep as Ray Tune's side asks and tells it."""

import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from actors.drafter import drafter_shapes
from actors.sweeping import Told, TrialPlan
from actors.train_recipe import TrainRecipe
from actors.training import Workers
from actors.trial_record import TrialRecord
from decoding.prediction import ServingCost
from drafters.errors import DrafterError
from pipelines.job import JobError
from pipelines.sweep_config import Point, SweepJob, each_once, grid, overrides_between, trial_config
from pipelines.sweep_costs import Costs
from pipelines.sweep_search import Listed, Proposals
from pipelines.sweep_trials import ENDED, Book, Result, Trial
from pipelines.target import Target
from pipelines.train_checks import check_claim, check_disk, check_division, check_start, claim, make_recipe
from pipelines.train_config import TrainJob
from storage.errors import ContractMismatch
from storage.manifest import Manifest
from storage.object_store import ObjectStore

_MOST_TIMED = 64


@dataclass(frozen=True)
class Commands:
    """What was typed, and what that gives without the sweep: commands of single trials are told by the difference."""

    typed: tuple[str, ...]
    plain: DictConfig

    @classmethod
    def of_typed(cls, typed: Sequence[str]) -> "Commands":
        """Of a job's command line, inside Hydra."""
        kept = tuple(each for each in typed if not each.lstrip("+~").startswith(("sweep", "mode=", "experiment=", "run.name=")))
        return cls(kept, compose("train", [*kept, "run.name=trial"]))

    def of(self, config: DictConfig, run: str) -> str:
        """What trains that config by itself, as a run of another name."""
        plain, full = (OmegaConf.to_container(one, resolve=True) for one in (self.plain, config))
        differing = [each for each in overrides_between(plain, full) if not each.startswith("run.name=")]
        return shlex.join(["python", "-m", "pipelines.train", *each_once([*self.typed, *differing]), f"run.name={run}-again"])


class Sweep:
    """Plans trials and keeps the book; Tune's thread calls it while the main thread looks on."""

    def __init__(
        self,
        job: SweepJob,
        cfg: DictConfig,
        target: Target,
        store: ObjectStore,
        manifest: Manifest,
        workers: Workers,
        costs: Costs | None,
        commands: Commands,
    ) -> None:
        self.job, self.cfg, self.target, self.store, self.manifest = job, cfg, target, store, manifest
        self.workers, self.costs = workers, costs
        self.commands = commands
        self.book = Book.open(job.folder)
        self.stop = threading.Event()
        self._plans: dict[str, TrialPlan] = {}
        self._proposals: Proposals = Listed(())
        self._points: dict[str, Point] = {}

    # Before it runs

    def begin(self, proposals: Proposals) -> None:
        """Take the proposals; all points of a list are checked before anything runs."""
        self._proposals = proposals
        if isinstance(proposals, Listed):
            wanted = {point.name for point in proposals.points}
            # What another list had is shown no more; its runs stay where they are.
            self.book.trials = {name: trial for name, trial in self.book.trials.items() if name in wanted}
            for point in proposals.points:
                self._planned(point)
        else:
            self._time_choices()
        if self.costs is not None:
            self.costs.release()
        self.book.save()

    def _time_choices(self) -> None:
        """What a search may come upon among choices is timed before the machine is busy; the rest when it comes."""
        points = grid([dimension for dimension in self.job.sweep.space if dimension.choices])
        if self.costs is None or len(points) > _MOST_TIMED:
            return
        for point in points:
            recipe = make_recipe(TrainJob.from_config(trial_config(self.cfg, point, "timed")), self.target, self.store, self.manifest)
            self.costs.of(recipe.drafter, recipe.layer_ids)

    def earlier(self) -> list[tuple[Point, float | None, bool]]:
        """What earlier starts tried, as a search wants to know it."""
        return [
            (Point(tuple(trial.values.items())), self._objective(trial.name), trial.outcome in ("finished", "stopped", "left out"))
            for trial in self.book
        ]

    def told(self) -> list[Told]:
        """The scores of trials that are at their end, for early stopping to compare with."""
        found = []
        for trial in self.book:
            if trial.outcome in ("finished", "stopped"):
                plan = self._plans.get(trial.name)
                judge = (lambda tau: tau) if plan is None else plan.judged
                found.append(Told(trial.name, tuple((step, judge(tau)) for step, tau in self._record(trial.name).scores)))
        return found

    @property
    def longest(self) -> int:
        """Steps of the longest trial planned so far, or of the config's where none is."""
        steps = [plan.recipe.settings.steps for plan in self._plans.values()]
        return max(steps, default=self.job.train.steps or 1)

    @property
    def open_ended(self) -> bool:
        """Whether there may be trials that are not planned yet."""
        return not isinstance(self._proposals, Listed)

    @property
    def planned(self) -> int:
        """How many trials there will be."""
        if self.open_ended:
            return self.job.sweep.trials or 0
        return sum(trial.outcome != "left out" for trial in self.book)

    # What Tune's side asks and tells

    def next(self) -> TrialPlan | None:
        while not self.stop.is_set() and (point := self._proposals.next()) is not None:
            trial = self._tried(point)
            if trial.outcome in ENDED:
                self._proposals.told(point, self._objective(trial.name) if trial.outcome in ("finished", "stopped") else None)
                continue
            plan = self._plans[trial.name]
            claim(plan.recipe)
            return plan
        return None

    def started(self, name: str) -> None:
        self._note(name, "running")

    def finished(self, name: str, objective: float) -> None:
        self._note(name, "finished")
        self._proposals.told(self._points[name], objective)

    def stopped(self, name: str, objective: float, step: int) -> None:
        if self.stop.is_set():  # the whole sweep is: this trial goes on when the sweep does
            return
        self._note(name, "stopped", f"others did better at step {step}")
        self._proposals.told(self._points[name], objective)

    def failed(self, name: str, error: str, given_up: bool) -> None:
        self.book.trials[name].failures.append(error)
        self._note(name, "failed" if given_up else "waiting", error if given_up else "")
        if given_up:
            self._proposals.told(self._points[name], None)

    def end(self) -> None:
        """Nothing runs any more: what was running waits for the next start."""
        for trial in self.book:
            if trial.outcome == "running":
                trial.outcome = "waiting"
        self.book.save()

    # Trials

    def _tried(self, point: Point) -> Trial:
        """As `_planned`, but a point that a search came upon and that makes no drafter is left out, with the reason."""
        try:
            return self._planned(point)
        except JobError as error:
            trial = Trial(point.name, point.as_dict(), f"{self.job.sweep.name}.{point.name}", 0, None, "", "left out", str(error))
            self.book.trials[point.name] = trial
            self.book.save()
            return trial

    def _planned(self, point: Point) -> Trial:
        """The trial of a point, checked; as it stands if it is at its end."""
        name = point.name
        self._points[name] = point
        trial = self.book.trials.get(name)
        if name in self._plans and trial is not None:
            return trial
        run = f"{self.job.sweep.name}.{name}"
        config = trial_config(self.cfg, point, run)
        try:
            recipe = make_recipe(TrainJob.from_config(config), self.target, self.store, self.manifest)
            shapes = drafter_shapes(recipe.model, recipe.drafter)
            parameters = sum(shape.numel() for shape in shapes.values())
            refused = self._too_large(parameters)
            cost = None if refused or self.costs is None else self.costs.of(recipe.drafter, recipe.layer_ids)
            refused = refused or self._too_slow(cost)
            check_division(recipe.settings, self.workers.count, fresh=True)
            self._check(recipe)
        except ContractMismatch:
            raise
        except (JobError, DrafterError) as error:
            raise JobError(f"trial {name}: {error}") from error
        if not refused:
            check_disk(recipe, shapes)
            check_start(recipe, shapes)
        self._plans[name] = TrialPlan(name, recipe, self.workers, cost, self.job.sweep.objective)
        before = trial or Trial(name, {}, run, 0, None, "")
        trial = Trial(name, point.as_dict(), run, parameters, cost, self.commands.of(config, run), "waiting", failures=before.failures)
        if refused:
            trial.outcome, trial.why = "left out", refused
        elif self._record(name, run).finished:
            trial.outcome = "finished"
        elif before.outcome == "stopped":
            trial.outcome, trial.why = "stopped", before.why
        self.book.trials[name] = trial
        return trial

    def _check(self, recipe: TrainRecipe) -> None:
        try:
            check_claim(recipe)
        except JobError as error:
            raise JobError(str(error).replace("run.name=...", "sweep.name=...")) from error

    def _too_large(self, parameters: int) -> str:
        limit = self.job.sweep.constraints.parameters
        return f"{parameters:,} parameters are more than sweep.constraints.parameters={limit:,}" if limit and parameters > limit else ""

    def _too_slow(self, cost: ServingCost | None) -> str:
        limit = self.job.sweep.constraints.draft_ms
        if cost is None or limit is None or 1000 * cost.draft <= limit:
            return ""
        return f"drafting takes {1000 * cost.draft:.1f} ms, more than sweep.constraints.draft_ms={limit:g}"

    def _note(self, name: str, outcome: Any, why: str = "") -> None:
        trial = self.book.trials[name]
        trial.outcome, trial.why = outcome, why
        self.book.save()

    def _record(self, name: str, run: str | None = None) -> TrialRecord:
        run = run or self.book.trials[name].run
        return TrialRecord.read(self.store.child(self.job.places.run(run)))

    def _objective(self, name: str) -> float | None:
        return Result(self.book.trials[name], self._record(name)).objective(self.job.sweep.objective)
