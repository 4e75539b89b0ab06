"""A sweep as Ray Tune runs it: many trainings of one cache, each a function trainable.

A trial of one worker trains in the trial's own process, which goes on to the next trial, so that imports are paid once. A trial of several
workers is driven from a process that reserves next to nothing: the workers' placement group is all or nothing, so trials cannot starve
each other of workers. Tune decides when which trial runs; where a trial stands lies in its run's folder, so nothing of Tune is kept.
"""

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import cloudpickle, tune
from ray.exceptions import RayActorError
from ray.tune import Callback, Stopper
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from actors import checkpointing
from actors.cluster import death_reason, original_error
from actors.errors import ActorError
from actors.export import export
from actors.head_start import kept_states
from actors.train_recipe import TrainRecipe
from actors.trainer import Worker
from actors.training import Workers, run_training
from actors.trial_record import TrialRecord
from decoding.prediction import ServingCost
from drafters.errors import DrafterError
from storage.errors import StorageError

STEP, OBJECTIVE = "step", "objective"
_WRITE_SECONDS = 5.0
# Tune wants at least something to set aside for a trial. A share of a CPU, however small, would leave less than the workers need.
_NEXT_TO_NOTHING: dict[str, float] = {"memory": 1}
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # records are kept by the trials themselves
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # nothing of Tune's own state is ever read again
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a table however quiet it is asked to be
}


@dataclass(frozen=True)
class TrialPlan:
    """One trial, checked and ready to run: `cost` is that of serving its drafter, where it is known."""

    name: str
    recipe: TrainRecipe
    workers: Workers
    cost: ServingCost | None
    objective: str

    def judged(self, tau: float) -> float:
        """What the sweep maximizes: `tau`, or the predicted `speed`."""
        if self.objective == "speed":
            assert self.cost is not None
            return self.cost.tokens_per_second(tau)
        return tau


@dataclass(frozen=True)
class Halving:
    """ASHA (Li et al., arXiv 1810.05934): at `grace` steps, and each time they are `factor` times as many, the best 1/factor go on."""

    grace: int
    factor: float


@dataclass(frozen=True)
class Told:
    """A trial that an earlier start of the sweep brought to its end, with all its (step, objective)."""

    name: str
    scores: tuple[tuple[int, float], ...]


class Trials(Protocol):
    """Where trials come from, and who is told what becomes of them. Called from Tune's thread."""

    def next(self) -> TrialPlan | None:
        """The next trial; None when there is none left."""
        ...

    def started(self, name: str) -> None: ...

    def finished(self, name: str, objective: float) -> None: ...

    def stopped(self, name: str, objective: float, step: int) -> None:
        """Others do better at this step: it does not go on."""
        ...

    def failed(self, name: str, error: str, given_up: bool) -> None:
        """It failed; unless given up it is tried again, from its last checkpoint."""
        ...


def run_trials(
    trials: Trials,
    steps: int,
    concurrency: int | None,
    retries: int,
    halving: Halving | None,
    before: Sequence[Told],
    stop: threading.Event,
    workers: Workers,
) -> None:
    """Run trials until there is none left or `stop` is set; needs a connection to Ray.

    Args:
        steps: of the longest trial.
        concurrency: trials at a time; None for as many as fit the cluster.
        before: what earlier starts found, for `halving` to compare with.
    """
    os.environ.update(_QUIET)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what fails is told by `trials`, without a traceback
    search = _Search(trials, concurrency or _fitting(workers))
    with tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(train_trial, _resources(workers)),
            tune_config=tune.TuneConfig(
                search_alg=search,  # it and the scheduler know the metric
                scheduler=FIFOScheduler() if halving is None else _asha(halving, steps, before),
                num_samples=-1,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=scratch,
                stop=_StopWhenAsked(stop),
                failure_config=tune.FailureConfig(max_failures=retries),
                callbacks=[_Events(trials)],
                verbose=0,
            ),
        ).fit()


def train_trial(config: dict[str, Any]) -> None:
    """Tune's function trainable: train one trial from where it stands, leave its drafter and its record."""
    plan: TrialPlan = config["plan"]
    kept_states.keep = True
    recipe, board = plan.recipe, _TrialBoard(plan)
    if not checkpointing.standing_of(recipe.run).finished(recipe.settings):
        if plan.workers.count == 1:
            Worker(recipe, board, 0, 1).run()
        else:
            with tempfile.TemporaryDirectory() as scratch:
                run_training(recipe, plan.workers, Path(scratch), board.post)
    drafter, step = export(recipe, board.tell)
    board.finish(drafter.settings.root, step)


class _TrialBoard:
    """Keeps a trial's record, and reports its scorings to Tune, from the trial's own thread."""

    def __init__(self, plan: TrialPlan) -> None:
        self.plan, self.run = plan, plan.recipe.run
        self.record = TrialRecord.read(self.run)
        self.record.drop_after(checkpointing.standing_of(self.run).step)
        self.record.score = plan.recipe.settings.score
        self.record.starts += 1
        self.record.hosts = sorted({*self.record.hosts, socket.gethostname()})
        self._spent, self._started = self.record.seconds, time.perf_counter()
        self._written, self._unwritten, self._lock = 0.0, True, threading.Lock()
        self.keep()

    def post(self, row: dict[str, Any]) -> None:
        scored = self.record.metric in row
        with self._lock:
            self.record.add(row)
            self._unwritten = True
        if scored or time.monotonic() - self._written > _WRITE_SECONDS:
            self.keep()
        # The last scoring is told with the end: Tune would stop the trial before its drafter is there.
        if scored and row["step"] < self.plan.recipe.settings.steps:
            self._report(row["step"], row[self.record.metric])

    def keep(self) -> None:
        with self._lock:
            if self._unwritten:
                self.record.seconds = self._spent + time.perf_counter() - self._started
                self.record.write(self.run)
                self._written, self._unwritten = time.monotonic(), False

    def stopping(self) -> bool:
        return False

    def tell(self, text: str) -> None:
        self.post({"notice": text})

    def finish(self, drafter: str, step: int) -> None:
        """Everything is done and kept."""
        standing = checkpointing.standing_of(self.run)
        if standing.best_tau is None:
            raise ActorError(f"no held-out row holds a block to score {self.plan.name} on: raise train.heldout_rows")
        self.record.drafter, self.record.exported_step, self._unwritten = drafter, step, True
        self.keep()
        self._report(standing.step, standing.best_tau)

    def _report(self, step: int, tau: float) -> None:
        tune.report({STEP: step, OBJECTIVE: self.plan.judged(tau), "finished": self.record.finished})


class _Here:
    """Holds what belongs to this process alone. Tune writes its experiment down, which nobody reads: it is left out there."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Here":
        return self

    def __reduce__(self) -> tuple[type["_Here"], tuple[()]]:
        return _Here, ()


class _Search(Searcher):
    """Hands Tune the next trial whenever there is room for one."""

    def __init__(self, trials: Trials, concurrency: int) -> None:
        super().__init__(metric=OBJECTIVE, mode="max")
        self._here, self.concurrency = _Here(trials), concurrency
        self.live: dict[str, str] = {}

    @property
    def trials(self) -> Trials:
        return self._here.held

    def suggest(self, trial_id: str) -> Any:
        if len(self.live) >= self.concurrency:
            return None
        plan = self.trials.next()
        if plan is None:
            return Searcher.FINISHED
        self.live[trial_id] = plan.name
        return {"plan": plan}

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        name = self.live.pop(trial_id, None)
        if name is None or error or not result or OBJECTIVE not in result:
            return
        if result.get("finished"):
            self.trials.finished(name, result[OBJECTIVE])
        else:
            self.trials.stopped(name, result[OBJECTIVE], result[STEP])


class _Events(Callback):
    """Tells starts and failures on."""

    def __init__(self, trials: Trials) -> None:
        self._here = _Here(trials)

    @property
    def trials(self) -> Trials:
        return self._here.held

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.trials.started(trial.config["plan"].name)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.trials.failed(trial.config["plan"].name, _reason(trial), given_up=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.trials.failed(trial.config["plan"].name, _reason(trial), given_up=True)


class _StopWhenAsked(Stopper):
    """Ends the whole run once `stop` is set."""

    def __init__(self, stop: threading.Event) -> None:
        self._here = _Here(stop)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self.stop_all()

    def stop_all(self) -> bool:
        return bool(self._here.held.is_set())


def _asha(halving: Halving, steps: int, before: Sequence[Told]) -> TrialScheduler:
    """Asynchronous successive halving that knows the scorings of earlier starts."""
    scheduler = AsyncHyperBandScheduler(STEP, OBJECTIVE, "max", steps, min(halving.grace, steps), halving.factor)
    for told in before:
        trial: Any = _Earlier(told.name)
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]  # it never asks its controller for anything
        for step, objective in told.scores:
            scheduler.on_trial_result(None, trial, {STEP: step, OBJECTIVE: objective})  # type: ignore[arg-type]
        scheduler.on_trial_remove(None, trial)  # type: ignore[arg-type]
    return scheduler


@dataclass(frozen=True)
class _Earlier:
    trial_id: str


def _resources(workers: Workers) -> PlacementGroupFactory:
    """What Tune sets aside for a trial: its one worker, or next to nothing where Ray Train places the workers."""
    if workers.count > 1:
        return PlacementGroupFactory([_NEXT_TO_NOTHING])
    return PlacementGroupFactory([{"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})}])


def _fitting(workers: Workers) -> int:
    """How many trials the cluster has room for, at least one."""
    have = ray.cluster_resources()
    room = [have.get("CPU", 1) // (workers.count * workers.cpus)]
    if workers.gpus:
        room.append(have.get("GPU", 0) // (workers.count * workers.gpus))
    return max(int(min(room)), 1)


def _reason(trial: Trial) -> str:
    """Why a trial failed last, in one line."""
    # `trial.get_pickled_error` looks where Tune copies its files later.
    path = trial.pickled_error_file
    error = cloudpickle.loads(Path(path).read_bytes()) if path is not None and Path(path).is_file() else None
    if isinstance(error, RayActorError):
        return f"its process ended: {death_reason(error)}"
    cause = original_error(error) if error is not None else None
    # Tune's own wrapping lies around it; what we raise ourselves says best what happened, whatever that came from.
    while cause is not None and not isinstance(cause, ActorError | DrafterError | StorageError) and cause.__cause__ is not None:
        cause = cause.__cause__
    text = "" if cause is None else str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else "it failed without a word"
