"""Train a drafter on a target cache: `python -m pipelines.train +experiment=dspark_markov`.

Resumes from its last checkpoint; a finished run with the same data and settings is not repeated.
"""

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import hydra
import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from actors.answers import AnswerStore, frequent_tokens
from actors.cluster import cluster
from actors.train_recipe import CHECKPOINTS, FOLLOWS, TrainRecipe, TrainSettings, recipe_facts
from actors.training import run_training
from drafters.config import config_from_target
from drafters.losses import LossWeights
from pipelines.figures import save, training_figure
from pipelines.job import Job, JobError, finish, launch, mendable, notices, progress
from pipelines.machine import git_revision
from pipelines.machine_checks import usable_cores
from pipelines.report import training_points
from pipelines.report_data import TRAINING_TERMS
from pipelines.target import Target, describe
from pipelines.tracking import TrackingConfig, tracker
from storage.checkpoint import DrafterFiles, has_checkpoint, load_checkpoint, save_drafter
from storage.contract import DraftLayout, load_contract, require_match
from storage.errors import ContractMismatch
from storage.follow import FollowSettings
from storage.manifest import Manifest, split_manifest
from storage.object_store import ObjectStore
from storage.target_files import read_model_config


class DrafterOptions(BaseModel):
    """The drafter's architecture; sizes come from the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    algorithm: str
    layout: str
    num_layers: int
    block_length: int
    head: str
    head_rank: int
    confidence: bool
    confidence_markov: bool
    window: int | None
    draft_vocab_size: int | None = Field(default=None, ge=1)


class LossConfig(BaseModel):
    """See drafters/losses.py for what each term is."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ce: float = Field(ge=0)
    tv: float = Field(ge=0)
    confidence: float = Field(ge=0)
    soft_ce: float = Field(ge=0)
    lk: float = Field(ge=0)
    lk_hybrid: float = Field(ge=0)
    lk_eta: float = Field(ge=0)


class TrainConfig(BaseModel):
    """See TrainSettings; `steps` or `epochs` is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int | None = Field(ge=1)
    epochs: float | None = Field(gt=0)
    global_batch: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    anchors: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    betas: tuple[float, float]
    warmup: float = Field(ge=0, lt=1)
    clip: float = Field(gt=0)
    decay: float = Field(gt=0)
    loss: LossConfig
    head_start: Literal["random", "target"]
    compute: str = Field(pattern="^(bfloat16|float32)$")
    seed: int
    heldout_rows: int = Field(ge=1)
    log_every: int = Field(ge=1)
    score_every: int = Field(ge=1)
    checkpoint_every: int = Field(ge=1)
    prefetch_mib: int = Field(ge=1)
    reader_threads: int = Field(ge=1)
    disk_cache: str
    disk_cache_gib: float = Field(ge=0)
    follow: bool
    follow_patience_minutes: float = Field(gt=0)

    def settings(self, samples: int | None) -> TrainSettings:
        """With the number of steps worked out for `samples` training samples; None where a growing cache leaves them open.

        Raises:
            JobError: no or both of steps and epochs, or a batch larger than the data.
        """
        if samples is None and self.steps is None:
            raise JobError(
                "train.follow=true needs train.steps (and train.epochs=null): how long an epoch is shows when the cache is complete"
            )
        if (self.steps is None) == (self.epochs is None):
            raise JobError("give either train.steps or train.epochs, and null for the other")
        if samples is not None and self.global_batch > samples:
            raise JobError(f"train.global_batch={self.global_batch} is more than the {samples} samples there are to train on")
        values = self.model_dump(exclude={"epochs", "loss", "steps", "follow", "follow_patience_minutes"})
        steps = self.steps or max(int(float(self.epochs or 0) * ((samples or 0) // self.global_batch)), 1)
        return TrainSettings(steps=steps, weights=LossWeights(**self.loss.model_dump()), **values)


class WorkersConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    count: int | None = Field(ge=1)
    cpus: int | None = Field(ge=1)
    gpus: float | None = Field(ge=0)


class RunConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str


class TrainJob(Job):
    drafter: DrafterOptions
    train: TrainConfig
    tracking: TrackingConfig
    run: RunConfig
    workers: WorkersConfig


@hydra.main(config_path="../conf", config_name="train", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = TrainJob.from_config(cfg)
    store = job.open_store()
    target = job.target.resolve(notices.print)
    recipe = make_recipe(job, target, store)
    folder = job.output / job.places.run(job.run.name)
    started = time.perf_counter()
    done = finished_steps(recipe)
    claim(recipe)
    metrics = MetricsFile(folder / "metrics.jsonl", done)
    if done < recipe.settings.steps:
        train(job, recipe, metrics, folder)
    drafter = export(recipe, store.child(f"{job.places.run(job.run.name)}/drafter"))
    seconds = time.perf_counter() - started
    save(training_figure(training_points(metrics.rows)), folder / "training.png")
    last = metrics.latest()
    settings = recipe.settings
    manifest = Manifest.current(recipe.cache) if recipe.follow else Manifest.load(recipe.cache, recipe.manifest_hash)
    trained = settings.steps - done
    finish(
        f"drafter {job.run.name} for {job.target.name}",
        {
            "steps": f"{settings.steps} of {settings.global_batch} samples, {settings.anchors} anchors each",
            "samples": f"{len(manifest) - settings.heldout_rows} for training, {settings.heldout_rows} held out",
            "loss": f"{last.get('loss', float('nan')):.3f}"
            + "".join(f"; {name} {last[name]:.3f}" for name in TRAINING_TERMS[1:] if name in last),
            "held out": f"tau_teacher_forced {last.get('heldout/tau_teacher_forced', float('nan')):.2f} at temperature 1",
            "time": f"{seconds:.0f} s for {trained} steps" if trained else "nothing to do: this run is finished",
            "data wait": f"{last.get('data_wait_share', 0.0):.1%} of the last steps' time",
            "drafter": drafter.settings.root,
        },
        {
            "target": describe(target),
            "run": job.run.name,
            "manifest": recipe.manifest_hash,
            "settings": asdict(settings),
            "drafter": drafter.settings.root,
            "seconds": seconds,
            "steps_now": trained,
            "metrics": last,
        },
        folder / "train.json",
    )


def make_recipe(job: TrainJob, target: Target, store: ObjectStore) -> TrainRecipe:
    """Everything checked that can be before a worker starts: contract, layers, shapes, batch."""
    cache = store.child(job.places.cache)
    contract = load_contract(cache)
    require_match(
        target.identity, contract.target, cache.settings.root, "Use the target that the cache was built with, or build another cache"
    )
    if contract.capture.layer_ids != target.layer_ids:
        raise JobError(
            f"{cache.settings.root} holds layers {list(contract.capture.layer_ids)}, this run asks for {list(target.layer_ids)}. "
            f"Use target.layer_ids={list(contract.capture.layer_ids)}, or build another cache."
        )
    options = job.drafter.model_dump(exclude={"draft_vocab_size"})
    if job.train.follow:
        if job.drafter.draft_vocab_size is not None:
            raise JobError("drafter.draft_vocab_size counts the training rows' tokens, which train.follow=true leaves open")
        rows = AnswerStore(store.child(job.places.answers)).rows
        follow, manifest_hash, samples = FollowSettings(rows, 60 * job.train.follow_patience_minutes), FOLLOWS, None
    else:
        manifest = Manifest.current(cache)
        manifest.save(cache)
        training, _ = split_manifest(manifest, job.train.heldout_rows)
        follow, manifest_hash, samples = None, manifest.hash, len(training)
        if (size := job.drafter.draft_vocab_size) is not None:
            answers, trained = AnswerStore(store.child(job.places.answers)), set(training.table["row_id"].to_pylist())
            if not answers.rows:
                raise JobError(
                    f"drafter.draft_vocab_size={size} takes the most frequent tokens of the answers, and {answers.store.settings.root} "
                    "holds none"
                )
            options["draft_vocabulary"] = frequent_tokens(answers, trained, target.template.stop_ids, size, target.identity.vocab_size)
    config = config_from_target(
        read_model_config(target.folder), len(contract.capture.layer_ids), mask_token_id=target.mask_token_id, **options
    )
    if config.kind.context == "last_hidden" and contract.capture.last_hidden_rows != "all":
        raise ContractMismatch(
            f"{cache.settings.root} does not match this run. capture.last_hidden_rows: it has {contract.capture.last_hidden_rows!r}, "
            f"{config.algorithm} needs 'all', since it attends to every position's last hidden state. Remove that cache and build it with "
            "cache.last_hidden_rows=all: every drafter can be trained on it"
        )
    return TrainRecipe(
        cache=cache,
        run=store.child(job.places.run(job.run.name)),
        contract=contract,
        manifest_hash=manifest_hash,
        model=str(target.folder),
        drafter=config,
        settings=job.train.settings(samples),
        follow=follow,
    )


def claim(recipe: TrainRecipe) -> None:
    """Bind the run's folder to its data and settings.

    Raises:
        JobError: it was started with others; names each.
    """
    ours = json.loads(json.dumps(recipe_facts(recipe)))
    try:
        theirs = json.loads(recipe.run.get("run.json"))
    except FileNotFoundError:
        recipe.run.put("run.json", json.dumps(ours, indent=2).encode())
        return
    if differing := differences(ours, theirs):
        raise JobError(
            f"{recipe.run.settings.root} was started otherwise ({'; '.join(differing)}). "
            "Use the same settings to go on, or another name: `run.name=...`."
        )


def differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Dotted names of the fields in which two JSON documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            line for key in sorted({*ours, *theirs}) for line in differences(ours.get(key), theirs.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if ours == theirs else [f"{name}: there {theirs!r}, now {ours!r}"]


def finished_steps(recipe: TrainRecipe) -> int:
    """Step of the newest checkpoint, 0 where there is none."""
    if not has_checkpoint(recipe.run, CHECKPOINTS):
        return 0
    _, files = load_checkpoint(recipe.run, CHECKPOINTS)
    return int(files["state"]["step"])


def train(job: TrainJob, recipe: TrainRecipe, metrics: "MetricsFile", folder: Path) -> None:
    """Run the workers, with progress bar, metrics file and W&B."""
    gpus = torch.cuda.device_count()
    workers = job.workers.count or max(gpus, 1)
    each = job.workers.gpus if job.workers.gpus is not None else (1.0 if gpus else 0.0)
    cpus = job.workers.cpus or max((job.cluster.cpus or usable_cores()) // workers, 1)
    facts = {**recipe_facts(recipe), "git_revision": git_revision()}
    with (
        cluster(job.cluster),
        tracker(job.tracking, job.run.name, folder, facts) as track,
        progress() as bar,
        tempfile.TemporaryDirectory() as scratch,
    ):
        task = bar.add_task("training", total=recipe.settings.steps, completed=metrics.step, note="starting the workers")

        def on_row(row: dict[str, Any]) -> None:
            if "notice" in row:
                notices.print(row["notice"], markup=False)
                return
            metrics.append(row)
            track(row)
            bar.update(task, completed=row["step"], note=_note(metrics.latest()))

        run_training(recipe, workers, cpus, each, Path(scratch), on_row)


def _note(row: dict[str, Any]) -> str:
    parts = []
    if "loss" in row:
        parts.append(f"loss {row['loss']:.3f}; {row['tokens_per_second']:.0f} tokens/s; {row['step_seconds'] * 1e3:.0f} ms a step")
        parts.append(f"data wait {row['data_wait_share']:.1%}")
    if "heldout/tau_teacher_forced" in row:
        parts.append(f"held-out tau {row['heldout/tau_teacher_forced']:.2f}")
    return "; ".join(parts)


def export(recipe: TrainRecipe, destination: ObjectStore) -> ObjectStore:
    """The finished drafter as a plain folder: weights, config, contract."""
    tensors, _ = load_checkpoint(recipe.run, CHECKPOINTS)
    save_drafter(
        destination,
        DrafterFiles(
            tensors={name.removeprefix("drafter/"): tensor for name, tensor in tensors.items() if name.startswith("drafter/")},
            config=recipe.drafter.to_dict(),
            contract=recipe.contract,
            layout=DraftLayout(recipe.drafter.layout, recipe.drafter.block_length, recipe.drafter.mask_token_id),  # type: ignore[arg-type]
        ),
    )
    return destination


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


if __name__ == "__main__":
    launch(main)
