"""Train many drafters on one cache with Ray Tune, and show which to take: `python -m pipelines.sweep +experiment=rank_by_block`.

Trials are training runs like any other, so a sweep that is stopped at any moment goes on where it was; finished trials are not repeated.
"""

import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from actors.cluster import CPU_ENVIRONMENT, cluster
from actors.sweeping import Halving, run_trials
from actors.training import Workers
from decoding.prediction import ServingCost
from pipelines.job import JobError, finish, launch, mendable, notices, progress, write_json, write_text
from pipelines.machine import room
from pipelines.signals import stop_on_sigterm
from pipelines.sweep_config import SweepJob, each_once
from pipelines.sweep_costs import Costs
from pipelines.sweep_driver import Commands, Sweep
from pipelines.sweep_report import write_dashboard
from pipelines.sweep_search import proposals
from pipelines.sweep_tracking import SweepTracking, wandb_sweep
from pipelines.sweep_trials import (
    ENDED,
    Book,
    Result,
    SweepFacts,
    best_of,
    has_facts,
    read_facts,
    read_json,
    results,
    write_facts,
)
from pipelines.train import STOPPED
from storage.errors import StorageUnavailable
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.places import Places

_COSTS = "costs.json"
_DRAWING_SHARE = 0.03
"""At most this share of the driver's time goes into the dashboard while trials run."""


@hydra.main(config_path="../conf", config_name="sweep", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    typed = each_once(HydraConfig.get().overrides.task)
    job = SweepJob.from_config(cfg)
    if job.mode == "best":
        show_best(job)
        return
    if job.mode == "resume":
        before = read_facts(job.folder).overrides
        typed = each_once([*before, *(each for each in typed if not each.startswith(("mode=", "sweep.name=")))])
        cfg = compose("sweep", typed)
        job = SweepJob.from_config(cfg)
    run(job, cfg, typed)


def run(job: SweepJob, cfg: DictConfig, typed: list[str]) -> None:
    """Plan, train, show; exits with 1 where a trial was given up, and as `train` does where SIGTERM came."""
    if job.train.follow:
        raise JobError("a sweep compares trials on one and the same data: wait until the cache is complete (train.follow=false)")
    store, workers = job.open_store(), workers_of(job)
    target = job.target.resolve(notices.print)
    manifest = pinned_manifest(job, store)
    known = {key: ServingCost(**cost) for key, cost in read_json(job.folder / _COSTS).items()}
    costs = None
    if job.sweep.serving is not None:
        costs = Costs(job.sweep.serving, str(target.folder), known, show)
    commands = Commands.of_typed(typed)
    sweep = Sweep(job, cfg, target, store, manifest, workers, costs, commands)
    sweep.begin(proposals(job.sweep, sweep.earlier()))
    facts = facts_of(job, typed, manifest, costs)
    write_facts(job.folder, facts)
    write_text(job.folder / "wandb-sweep.yaml", wandb_sweep(job, cfg, commands))
    watch = Watch(job, facts, sweep, store)
    write_json(job.folder / _COSTS, {key: asdict(cost) for key, cost in known.items()})
    try:
        if any(trial.outcome not in ENDED for trial in sweep.book) or sweep.open_ended:
            train(job, sweep, workers, watch)
    finally:
        sweep.end()
        write_json(job.folder / _COSTS, {key: asdict(cost) for key, cost in known.items()})
        watch.end()
    conclude(job, facts, watch)


def workers_of(job: SweepJob) -> Workers:
    """Of each trial: as asked, and a GPU for each worker where there are any."""
    gpus = job.workers.gpus if job.workers.gpus is not None else (1.0 if room(job.cluster)[1] else 0.0)
    return Workers(job.workers.count or 1, job.workers.cpus or 1, gpus)


def pinned_manifest(job: SweepJob, store: ObjectStore) -> Manifest:
    """The cache as it was when the sweep first started; as it is now for a new one.

    Raises:
        JobError: a sweep of this name is about something else.
    """
    cache = store.child(job.places.cache)
    if not has_facts(job.folder):
        manifest = Manifest.current(cache)
        manifest.save(cache)
        return manifest
    before = read_facts(job.folder)
    ours = (job.target.name, job.corpus.name, asdict(job.storage)["root"])
    if ours != (before.target, before.corpus, before.storage["root"]):
        there = f"{before.target} on {before.corpus} in {before.storage['root']}"
        raise JobError(
            f"{job.folder} holds a sweep of another target, corpus or storage ({there}). Give this one another name: sweep.name=..."
        )
    return Manifest.load(cache, before.manifest)


def facts_of(job: SweepJob, typed: list[str], manifest: Manifest, costs: Costs | None) -> SweepFacts:
    started = read_facts(job.folder).started if has_facts(job.folder) else time.strftime("%Y-%m-%d %H:%M:%S")
    return SweepFacts(
        name=job.sweep.name,
        target=job.target.name,
        corpus=job.corpus.name,
        storage=asdict(job.storage),
        overrides=[each for each in typed if not each.startswith("mode=")],
        dimensions=[dimension.path for dimension in job.sweep.space],
        search=job.sweep.search,
        manifest=manifest.hash,
        objective=job.sweep.objective,
        cost_source="" if costs is None else costs.source,
        started=started,
    )


class Watch:
    """The main thread's look at the trials: dashboard, trackers, progress."""

    def __init__(self, job: SweepJob, facts: SweepFacts, sweep: Sweep, store: ObjectStore) -> None:
        self.job, self.facts, self.sweep, self.store = job, facts, sweep, store
        self.tracking = SweepTracking(job.tracking, job.sweep.tensorboard, facts, job.folder)
        self.found: dict[str, Result] = {}
        self.before, self.started = sweep.book.seconds, time.monotonic()
        self._next = 0.0

    def look(self, final: bool = False) -> bool:
        """Draw anew if it is time; whether it was."""
        began = time.monotonic()
        if began < self._next and not final:
            return False
        self.sweep.book.seconds = seconds = self.before + began - self.started
        try:
            self.found = results(self.sweep.book, self.store, self.job.places, self.found)
        except StorageUnavailable:
            if final:
                raise
            self._next = began + self.job.sweep.refresh_seconds  # trials bear an outage by themselves: so does looking at them
            return False
        refresh = 0 if final else max(round(self.job.sweep.refresh_seconds), 1)
        write_dashboard(self.facts, self.found, self.job.folder, seconds, refresh, final)
        if not final:
            self.tracking.update(self.found)
        ended = time.monotonic()
        self._next = ended + max(self.job.sweep.refresh_seconds, (ended - began) / _DRAWING_SHARE)
        return True

    def end(self) -> None:
        """Everything as it stands, on the page and in the trackers."""
        self.look(final=True)
        self.sweep.book.save()
        self.tracking.close(self.found)

    def note(self) -> str:
        """The best so far, and what runs."""
        best = best_of(self.found.values(), self.facts.objective)
        running = [trial.name for trial in self.sweep.book if trial.outcome == "running"]
        told = [f"best {best.trial.name}: tau {best.tau:.2f}"] if best is not None else []
        return "; ".join([*told, *([f"running {', '.join(running)}"] if running else [])])


def train(job: SweepJob, sweep: Sweep, workers: Workers, watch: Watch) -> None:
    """Run the trials to their end, or until SIGTERM."""
    early = job.sweep.early_stopping
    failure: list[BaseException] = []
    with (
        cluster(job.cluster, CPU_ENVIRONMENT),
        progress(window_seconds=3600) as bar,
        stop_on_sigterm("trials go on from their last checkpoints when the sweep does", sweep.stop),
    ):

        def work() -> None:
            try:
                run_trials(
                    sweep,
                    steps=sweep.longest,
                    concurrency=job.sweep.concurrency,
                    retries=job.sweep.retries,
                    halving=None if early is None else Halving(early.grace_steps, early.factor),
                    before=sweep.told(),
                    stop=sweep.stop,
                    workers=workers,
                )
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        task = bar.add_task("trials", total=sweep.planned, note="starting")
        while thread.is_alive():
            thread.join(timeout=0.5)
            watch.look()
            done = sum(trial.outcome in ("finished", "stopped", "failed") for trial in sweep.book)
            bar.update(task, completed=done, note=watch.note())
    if failure:
        raise failure[0]


def conclude(job: SweepJob, facts: SweepFacts, watch: Watch) -> None:
    """Summary, result file, exit code."""
    found, page = watch.found, job.folder / "index.html"
    best = best_of(found.values(), facts.objective)
    outcomes = [result.trial.outcome for result in found.values()]
    failed = [result for result in found.values() if result.trial.outcome == "failed"]
    finish(
        f"sweep {facts.name} for {facts.target}",
        {
            "trials": ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes)),
            **({"best": f"{best.trial.name}: {judged(best)}", "drafter": best.record.drafter} if best is not None else {}),
            **{f"failed: {result.trial.name}": result.trial.why for result in failed},
            "read": f"{sum(r.record.total('store_bytes') for r in found.values()) / 1e6:,.1f} MB from the store, "
            f"{sum(r.record.total('disk_bytes') for r in found.values()) / 1e6:,.1f} MB from the nodes' disks",
            "time": f"{watch.sweep.book.seconds:.0f} s",
            "dashboard": str(page),
        },
        {
            **asdict(facts),
            "seconds": watch.sweep.book.seconds,
            "best": None if best is None else best.trial.name,
            "dashboard": str(page),
            "trials": [as_row(result) for result in found.values()],
        },
        job.folder / "results.json",
    )
    if failed:
        sys.exit(1)
    if watch.sweep.stop.is_set():
        notices.print("[yellow]stopped[/]: run the same command again to go on")
        sys.exit(STOPPED)


def judged(result: Result) -> str:
    """A trial's figures in words."""
    speed = f", predicted {result.speed:,.1f} tokens/s, {result.speedup:.2f} of plain decoding" if result.speed is not None else ""
    return f"{result.record.score} {result.tau:.3f}{speed}"


def as_row(result: Result) -> dict[str, Any]:
    """A trial for result files."""
    trial, record = result.trial, result.record
    return {
        "trial": trial.name,
        **trial.values,
        "outcome": trial.outcome,
        "why": trial.why,
        "failures": trial.failures,
        "score": record.score,
        "tau": result.tau,
        "one_minus_tv": result.acceptance,
        "predicted_tokens_per_second": result.speed,
        "predicted_speedup": result.speedup,
        "cost": None if trial.cost is None else asdict(trial.cost),
        "parameters": trial.parameters,
        "step": record.step,
        "seconds": record.seconds,
        "starts": record.starts,
        "store_bytes": record.total("store_bytes"),
        "disk_bytes": record.total("disk_bytes"),
        "drafter": record.drafter,
        "scores": record.scores,
        "command": trial.command,
    }


def show_best(job: SweepJob) -> None:
    """The winner so far, and where its drafter lies."""
    facts = read_facts(job.folder)
    found = results(Book.open(job.folder), facts.store, Places(facts.target, facts.corpus), {})
    best = best_of(found.values(), facts.objective)
    if best is None:
        raise JobError(f"no trial of {facts.name} is finished yet: `{facts.resuming}` goes on")
    finish(
        f"best of sweep {facts.name} by {facts.objective}",
        {
            "trial": best.trial.name,
            "values": ", ".join(f"{path}={value}" for path, value in best.trial.values.items()),
            "figures": judged(best),
            "drafter": best.record.drafter,
            "train it longer": facts.longer,
            "evaluate it": facts.evaluating(best.trial),
        },
        as_row(best),
        job.folder / "best.json",
    )


def show(line: str) -> None:
    notices.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    launch(main, {"--resume": "mode=resume", "--best": "mode=best"}, {"sweep": "sweep.name"})
