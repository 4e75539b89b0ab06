"""Train a drafter on a target cache: `python -m pipelines.train +experiment=dspark_markov`.

Resumes from its last checkpoint; a finished run with the same data and settings is not repeated.
"""

import functools
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from actors import checkpointing
from actors.cluster import cluster
from actors.drafter import drafter_shapes
from actors.export import export
from actors.train_recipe import TrainRecipe, TrainSettings, recipe_facts
from actors.training import Workers, run_training
from pipelines.figures import heldout_figure, save, training_figure
from pipelines.job import finish, launch, mendable, notices, progress
from pipelines.machine import git_revision, room
from pipelines.machine_checks import usable_cores
from pipelines.metrics_file import MetricsFile
from pipelines.report import training_points
from pipelines.report_data import TRAINING_TERMS
from pipelines.signals import stop_on_sigterm
from pipelines.sweep_choice import chosen_config
from pipelines.target import describe
from pipelines.tracking import tracker
from pipelines.train_checks import check_disk, check_division, check_start, claim, make_recipe
from pipelines.train_config import TrainJob
from storage.manifest import Manifest

STOPPED = 128 + 15
"""Exit code of a run that SIGTERM ended."""


@hydra.main(config_path="../conf", config_name="train", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = TrainJob.from_config(chosen_config(cfg) if "sweep" in cfg else cfg)
    store = job.open_store()
    target = job.target.resolve(notices.print)
    recipe, workers = make_recipe(job, target, store), workers_of(job)
    folder = job.output / job.places.run(job.run.name)
    started = time.perf_counter()
    before = checkpointing.standing_of(recipe.run)
    weights = drafter_shapes(recipe.model, recipe.drafter)
    if not before.finished(recipe.settings):
        fresh = before.step == 0
        check_disk(recipe, weights)
        for line in (check_start(recipe, weights) if fresh else None, check_division(recipe.settings, workers.count, fresh)):
            if line is not None:
                notices.print(line, markup=False)
    claim(recipe)
    metrics = MetricsFile(folder / "metrics.jsonl", before.step)
    try:
        if not before.finished(recipe.settings):
            train(job, recipe, workers, metrics, folder)
    finally:
        draw(metrics, folder)
    now = checkpointing.standing_of(recipe.run)
    settings = recipe.settings
    if not now.finished(settings):
        notices.print(f"[yellow]stopped[/] at step {now.step} of {settings.steps}: run the same command again to go on")
        sys.exit(STOPPED)
    drafter, exported = export(recipe, functools.partial(notices.print, markup=False))
    seconds = time.perf_counter() - started
    last = metrics.latest()
    manifest = Manifest.current(recipe.cache) if recipe.follow else Manifest.load(recipe.cache, recipe.manifest_hash)
    trained = now.step - before.step
    early = f", ended by {now.unimproved} scorings without a better one" if now.step < settings.steps else ""
    best = "" if now.best_tau is None else f", best {now.best_tau:.2f} at step {now.best_step}"
    finish(
        f"drafter {job.run.name} for {job.target.name}",
        {
            "steps": f"{now.step} of {settings.global_batch} samples, {settings.anchors} anchors each{early}",
            "samples": f"{len(manifest) - settings.heldout_rows} for training, {settings.heldout_rows} held out",
            "loss": f"{last.get('loss', float('nan')):.3f}"
            + "".join(f"; {name} {last[name]:.3f}" for name in TRAINING_TERMS[1:] if name in last),
            "held out": heldout(settings, last) + best,
            "time": f"{seconds:.0f} s for {trained} steps" if trained else "nothing to do: this run is finished",
            "data wait": f"{last.get('data_wait_share', 0.0):.1%} of the last steps' time",
            "drafter": f"{drafter.settings.root}, of step {exported}",
        },
        {
            "target": describe(target),
            "run": job.run.name,
            "manifest": recipe.manifest_hash,
            "settings": asdict(settings),
            "drafter": drafter.settings.root,
            "exported_step": exported,
            "best_step": now.best_step,
            f"best_{settings.score}": now.best_tau,
            "seconds": seconds,
            "steps_now": trained,
            "metrics": last,
        },
        folder / "train.json",
    )


def workers_of(job: TrainJob) -> Workers:
    """One worker for each GPU, else one; each node's cores shared by its workers; unless the config says otherwise."""
    _, gpus = room(job.cluster)
    count = job.workers.count or max(gpus, 1)
    each = job.workers.gpus if job.workers.gpus is not None else (1.0 if gpus else 0.0)
    return Workers(count, job.workers.cpus or max((job.cluster.cpus or usable_cores()) // count, 1), each)


def train(job: TrainJob, recipe: TrainRecipe, workers: Workers, metrics: MetricsFile, folder: Path) -> None:
    """Run the workers, with progress bar, metrics file and W&B, to the end or until SIGTERM."""
    facts = {**recipe_facts(recipe), "git_revision": git_revision()}
    with (
        cluster(job.cluster),
        tracker(job.tracking, job.run.name, folder, facts) as track,
        # Rows may come minutes apart: the time that is left is judged by the last hour.
        progress(window_seconds=3600) as bar,
        tempfile.TemporaryDirectory() as scratch,
        stop_on_sigterm() as stop,
    ):
        task = bar.add_task("training", total=recipe.settings.steps, completed=metrics.step, note="starting the workers")

        def on_row(row: dict[str, Any]) -> None:
            if "notice" in row:
                notices.print(row["notice"], markup=False)
                return
            metrics.append(row)
            track(row)
            bar.update(task, completed=row["step"], note=_note(metrics.latest()))

        run_training(recipe, workers, Path(scratch), on_row, stop)


def heldout(settings: TrainSettings, last: dict[str, Any]) -> str:
    """The last scoring's accepted length."""
    forced = f"tau_teacher_forced {last.get('heldout/tau_teacher_forced', float('nan')):.2f} at temperature 1"
    if settings.decode is None:
        return forced
    return f"tau {last.get('heldout/tau', float('nan')):.2f} at temperature {settings.decode.temperature:g}, {forced}"


def draw(metrics: MetricsFile, folder: Path) -> None:
    """The learning curve so far, and held-out acceptance by position; also of a run that was stopped."""
    points = training_points(metrics.rows)
    if points:
        save(training_figure(points), folder / "training.png")
    if any(point.positions for point in points):
        save(heldout_figure(points), folder / "heldout.png")


def _note(row: dict[str, Any]) -> str:
    parts = []
    if "loss" in row:
        terms = ", ".join(f"{name} {row[name]:.3f}" for name in TRAINING_TERMS[1:] if name in row)
        parts.append(f"loss {row['loss']:.3f} ({terms})")
        parts.append(f"tau {row['tau_teacher_forced']:.2f}" if "tau_teacher_forced" in row else "")
    if "heldout/tau_teacher_forced" in row:
        parts.append(f"held out {row['heldout/tau_teacher_forced']:.2f}")
    if "heldout/tau" in row:
        parts.append(f"decoded {row['heldout/tau']:.2f}")
    if "loss" in row:
        parts.append(f"{row['samples_per_second']:.1f} samples/s, {row['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"data wait {row['data_wait_share']:.1%}")
    return "; ".join(filter(None, parts))


if __name__ == "__main__":
    launch(main)
