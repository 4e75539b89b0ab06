"""Measure what a verification round costs by its number of tokens, SPS(B): `python -m pipelines.profile run=dspark_markov`."""

import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from decoding.target import TransformersTarget
from decoding.throughput import ThroughputTable, as_record, measure_curve
from drafters.drafter import Drafter
from pipelines.drafted import DraftedJob
from pipelines.evaluation_report import machine
from pipelines.job import JobError, finish, launch, mendable, notices, progress, write_text
from pipelines.machine import git_revision
from pipelines.page import write_page
from pipelines.profile_report import profile_page
from pipelines.target import describe
from storage.calibration import drafter_hash
from storage.object_store import ObjectStore


class ProfileConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    requests: tuple[int, ...] = Field(min_length=1)
    context: int = Field(ge=8)
    points: int = Field(ge=2)
    rounds: int = Field(ge=1)
    warmup: int = Field(ge=0)
    temperature: float = Field(ge=0, le=2)
    seed: int
    table: Path | None
    again: bool


class ProfileJob(DraftedJob):
    profile: ProfileConfig

    @property
    def table_path(self) -> Path:
        return self.output / self.places.run(self.run) / "profile" / "table.json"


@hydra.main(config_path="../conf", config_name="profile", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = ProfileJob.from_config(cfg)
    store = job.open_store()
    target, _ = job.open_drafter(store)
    here = fingerprint(job, store)
    given = job.profile.table
    table = read_table(given or job.table_path) if given is not None or (job.table_path.is_file() and not job.profile.again) else None
    stale = table.differences(here) if table is not None and table.kind == "measured" else []
    if table is not None and stale:
        notices.print(f"[yellow]stale[/]: {given or job.table_path} does not hold here. {'; '.join(stale)}", soft_wrap=True)
    if table is None or (stale and given is None):
        table, stale = measured(job, *job.decoder(store, target, max(job.profile.requests)), here), []
        write_text(job.table_path, table.to_json())
    facts = {
        "target": job.target.model,
        "drafter": f"{job.run}, block {table.block}",
        "kind": table.kind,
        "context": f"{table.context} tokens a request",
        **{name: value for name, value in table.fingerprint.items() if name not in ("target", "drafter")},
        "date": time.strftime("%Y-%m-%d"),
        "git revision": git_revision() or "not in a git checkout",
        "command": f"python -m pipelines.profile {shlex.join(sys.argv[1:])}",
    }
    page = write_page(profile_page(f"Cost of a round: {job.run} for {job.target.name}", table, stale, facts), job.table_path.parent)
    largest = table.curves[-1]
    finish(
        f"cost of a round, {job.run} for {job.target.name}",
        {
            "requests": " ".join(str(curve.requests) for curve in table.curves),
            "rounds a second": " ".join(f"{1 / curve.seconds[0]:.1f}" for curve in table.curves) + " with the anchors alone",
            "whole blocks": " ".join(f"{1 / curve.seconds[-1]:.1f}" for curve in table.curves),
            "drafting": f"{largest.draft_seconds[-1] / largest.seconds[-1]:.0%} of a whole-block round at {largest.requests} requests",
            "table": str(given or job.table_path) + (" (stale on this machine)" if stale else ""),
            "report": str(page),
        },
        {
            "target": describe(target),
            "run": job.run,
            "settings": job.profile.model_dump(mode="json"),
            "table": str(given or job.table_path),
            "stale": stale,
            "fingerprint": table.fingerprint,
            **as_record(table),
            "report": str(page),
        },
        job.table_path.parent / "profile.json",
    )


def fingerprint(job: DraftedJob, store: ObjectStore) -> dict[str, str]:
    """What a measured table holds for."""
    settings = job.engine.settings(job.cluster.cpus, 1)
    return {
        "machine": machine(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": str(settings.threads),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "dtype": settings.dtype,
        "target": job.target.model,
        "drafter": drafter_hash(job.drafter_store(store)),
        "engine": "in-process decoder",
    }


def read_table(path: Path) -> ThroughputTable:
    """A table from a file.

    Raises:
        JobError: there is no such file.
        DecodingError: it holds something else.
    """
    if not path.is_file():
        raise JobError(f"{path} is not a file. `python -m pipelines.profile` writes profile/table.json beside the run's other results.")
    return ThroughputTable.from_json(path.read_text(), str(path))


def measured(job: ProfileJob, target: TransformersTarget, drafter: Drafter, here: dict[str, str]) -> ThroughputTable:
    """Time rounds on this machine."""
    settings = job.profile
    curves = []
    with progress() as bar:
        task = bar.add_task("timing rounds", total=len(set(settings.requests)), note="")
        for requests in sorted(set(settings.requests)):
            bar.update(task, note=f"{requests} requests")
            with torch.inference_mode():
                curves.append(
                    measure_curve(
                        target,
                        drafter,
                        requests,
                        settings.context,
                        settings.points,
                        settings.rounds,
                        settings.warmup,
                        settings.temperature,
                        settings.seed,
                    )
                )
            bar.advance(task)
    return ThroughputTable(tuple(curves), settings.context, drafter.config.block_length, "measured", here)


if __name__ == "__main__":
    launch(main)
