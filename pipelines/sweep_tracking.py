"""A sweep's trials as runs of Weights & Biases in one group, and as TensorBoard event files; its space as a config for `wandb sweep`."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from pipelines.figures import save
from pipelines.job import write_json
from pipelines.sweep_config import Dimension, Point, SweepJob, each_once, overrides_between, trial_config
from pipelines.sweep_driver import Commands
from pipelines.sweep_figures import axes_of, heat_map, parallel_coordinates
from pipelines.sweep_report import measures
from pipelines.sweep_trials import ENDED, Result, SweepFacts, read_json
from pipelines.tracking import TrackingConfig, open_run

_LOGGED = "logged.json"
_FIGURES = ("tau", "predicted_tokens_per_second", "draft_ms", "parameters", "seconds", "outcome")
_METHODS = {"grid": "grid", "random": "random", "optuna": "bayes"}


class SweepTracking:
    """Passes new rows of every trial on. All of it happens here, in the driver: only this process needs a key, and its folder has it all.

    Args:
        config: whether and how W&B is used.
        tensorboard: whether to write event files.
        folder: of the sweep.
    """

    def __init__(self, config: TrackingConfig, tensorboard: bool, facts: SweepFacts, folder: Path) -> None:
        self.config, self.facts, self.folder = config, facts, folder
        self.tensorboard = folder / "tensorboard" if tensorboard else None
        self._runs: dict[str, _TrialRun] = {}
        self._logged = set(read_json(folder / _LOGGED).get("trials", []))

    def update(self, found: Mapping[str, Result]) -> None:
        """Log what is new; runs of trials that are at their end are closed. Trials that ended before this start were logged then."""
        for name, result in found.items():
            ended = result.trial.outcome in ENDED
            if name not in self._runs:
                if result.trial.outcome == "left out" or not result.record.rows or (ended and name in self._logged):
                    continue
                self._runs[name] = _TrialRun(self, result)
            self._runs[name].log(result)
            if ended and name not in self._logged:
                self._runs[name].close(result)
                self._logged.add(name)
                write_json(self.folder / _LOGGED, {"trials": sorted(self._logged)})

    def close(self, found: Mapping[str, Result]) -> None:
        """Everything there is so far, and the summary: a run of its own with the trials as a table, heat maps, parallel coordinates."""
        self.update(found)
        for name, run in self._runs.items():
            run.close(found[name])
        if not self.config.enabled or not any(result.tau is not None for result in found.values()):
            return
        import wandb

        run = open_run(
            self.config,
            self.folder,
            run_id(self.folder, "summary"),
            name=self.facts.name,
            group=self.facts.name,
            job_type="sweep",
            config=asdict(self.facts) | {"storage": self.facts.storage["root"]},
        )
        try:
            columns: list[Any] = ["trial", *self.facts.dimensions, *_FIGURES]
            run.log({"trials": wandb.Table(columns=columns, data=[_table_row(self.facts, result) for result in found.values()])})
            for title, figure in _figures(self.facts, list(found.values())).items():
                path = self.folder / "figures" / f"{title}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                run.log({title: wandb.Image(str(save(figure, path)))})
        finally:
            run.finish()


class _TrialRun:
    """One trial's run; rows that come again after a restart are not logged twice."""

    def __init__(self, tracking: SweepTracking, result: Result) -> None:
        facts, trial = tracking.facts, result.trial
        self._logged, self._closed = 0, False
        self._run: Any = None
        self._events: Any = None
        if tracking.config.enabled:
            self._run = open_run(
                tracking.config,
                tracking.folder,
                run_id(tracking.folder, trial.name),
                name=trial.name,
                group=facts.name,
                job_type="trial",
                config={**trial.values, "parameters": trial.parameters, "manifest": facts.manifest, "command": trial.command},
            )
        if tracking.tensorboard is not None:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(tracking.tensorboard / trial.name))

    def log(self, result: Result) -> None:
        rows = result.record.rows
        self._logged = min(self._logged, len(rows))
        for row in rows[self._logged :]:
            values = {key: value for key, value in row.items() if key != "step"}
            if self._run is not None:
                self._run.log(values, step=row["step"])
            if self._events is not None:
                for key, value in values.items():
                    self._events.add_scalar(key, value, row["step"])
        self._logged = len(rows)

    def close(self, result: Result) -> None:
        if self._closed:
            return
        self._closed = True
        if self._run is not None:
            self._run.summary.update({"tau": result.tau, "predicted_tokens_per_second": result.speed, "outcome": result.trial.outcome})
            self._run.finish()
        if self._events is not None:
            self._events.close()


def run_id(folder: Path, name: str) -> str:
    """The same for the same trial in every start of its sweep: offline parts then meet in one run."""
    return hashlib.blake2b(f"{folder.resolve()}\n{name}".encode(), digest_size=6).hexdigest()


def _table_row(facts: SweepFacts, result: Result) -> list[Any]:
    trial, cost = result.trial, result.trial.cost
    values = [list(value) if isinstance(value, tuple) else value for value in (trial.values[path] for path in facts.dimensions)]
    draft = None if cost is None else 1000 * cost.draft
    return [trial.name, *values, result.tau, result.speed, draft, trial.parameters, result.record.seconds, trial.outcome]


def _figures(facts: SweepFacts, found: list[Result]) -> dict[str, Any]:
    drawn = {}
    serving = any(result.trial.cost is not None for result in found)
    if axes_of(found):
        drawn["heat-tau"] = heat_map(found, lambda result: result.tau, "best held-out τ")
        if serving:
            drawn["heat-speed"] = heat_map(found, lambda result: result.speed, "predicted tokens/s", "{:,.0f}")
    if len(facts.dimensions) > 1:
        drawn["parallel"] = parallel_coordinates(found, measures(serving), facts.objective)
    return drawn


def wandb_sweep(job: SweepJob, cfg: DictConfig, commands: Commands) -> str:
    """The same space for `wandb sweep FILE`: its agents run `pipelines.train`, which follows the values as the sweep does."""
    config = job.sweep
    base = trial_config(cfg, Point(()), "trial")
    full, before = (OmegaConf.to_container(one, resolve=False) for one in (base, commands.plain))
    paths = {dimension.path for dimension in config.space}
    following = [each for each in overrides_between(before, full) if each.partition("=")[0] not in paths | {"run.name"}]
    # An agent gives each of its runs an id, which names the training run too.
    run = f"run.name={config.name}.${{oc.env:WANDB_RUN_ID}}"
    command = ["${env}", "python", "-m", "pipelines.train", *each_once([*commands.typed, *following]), run]
    document: dict[str, Any] = {
        "name": config.name,
        "project": job.tracking.project,
        "method": _METHODS[config.search],
        "metric": {"name": f"heldout/{job.train.score_metric}", "goal": "maximize"},
        "parameters": {dimension.path: _parameter(dimension) for dimension in config.space},
        "command": [*command, "${args_no_hyphens}"],
    }
    if config.trials is not None:
        document["run_cap"] = config.trials
    if config.early_stopping is not None:
        scorings = max(config.early_stopping.grace_steps // job.train.score_every, 1)
        document["early_terminate"] = {"type": "hyperband", "min_iter": scorings, "eta": config.early_stopping.factor}
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def _parameter(dimension: Dimension) -> dict[str, Any]:
    if dimension.choices:
        return {"values": [list(value) if isinstance(value, tuple) else value for value in dimension.choices]}
    ends = {"min": dimension.low, "max": dimension.high}
    if dimension.integer:
        return {"distribution": "q_log_uniform_values" if dimension.log else "int_uniform", **ends}
    return {"distribution": "log_uniform_values" if dimension.log else "uniform", **ends}
