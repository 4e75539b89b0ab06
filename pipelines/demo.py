"""The whole pipeline on a real small model, in minutes on two CPU cores: `make demo`, or `python -m pipelines.demo`.

Each stage is the same command that a person would type. A stage whose input has not changed finds its work done and returns at once.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.job import JobError, finish, launch, mendable, notices, write_json

STAGES = ("prepare", "regenerate", "cache", "train", "evaluate")


class DemoJob(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    output: Path
    target: str
    experiment: str
    stages: dict[str, list[str]]


@hydra.main(config_path="../conf", config_name="demo", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    try:
        job = DemoJob.model_validate(OmegaConf.to_container(cfg, resolve=True))
    except ValidationError as error:
        raise JobError(f"config: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    root = job.output.resolve()
    record = root / job.target / "bundled" / "stages.json"
    times: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    for number, stage in enumerate(STAGES, 1):
        command = [sys.executable, "-m", f"pipelines.{stage}", *overrides(job, stage)]
        notices.rule(f"[bold]{number} of {len(STAGES)}: {stage}", align="left")
        notices.print(f"python -m pipelines.{stage} {shlex.join(command[3:])}", style="dim", soft_wrap=True)
        started = time.perf_counter()
        results[stage] = run_stage(command)
        times.append({"stage": stage, "seconds": time.perf_counter() - started, "skipped": skipped(stage, results[stage])})
        # The report of the last stage draws the times of those before it.
        write_json(record, {"stages": times})
    report = results["evaluate"]["report"]
    metrics = results["evaluate"]["metrics"][job.experiment]
    total = sum(stage["seconds"] for stage in times)
    finish(
        "demo",
        {
            **{stage["stage"]: f"{stage['seconds']:.0f} s{' (done before)' if stage['skipped'] else ''}" for stage in times},
            "in all": f"{total / 60:.1f} min",
            "tau": f"{metrics['tau']:.2f} tokens a verification round (1 without a drafter)",
            "report": report,
            "picture": str(Path(report).with_name("report.png")),
        },
        {"stages": times, "seconds": total, "tau": metrics["tau"], "report": report},
        root / "demo.json",
    )


def overrides(job: DemoJob, stage: str) -> list[str]:
    """What a person would type after `python -m pipelines.STAGE`."""
    common = [f"target={job.target}", f"output={job.output}"]
    experiment = {"train": [f"+experiment={job.experiment}"], "evaluate": [f"run={job.experiment}"]}
    return [*common, *experiment.get(stage, []), *job.stages.get(stage, [])]


def run_stage(command: list[str]) -> dict[str, Any]:
    """Run one stage, its output passed through; returns its result JSON.

    Raises:
        SystemExit: with the stage's exit code, if it failed: it has said why.
    """
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            sys.stdout.write(line)
            sys.stdout.flush()
    if process.returncode != 0:
        sys.exit(process.returncode)
    path = lines[-1].removeprefix("result: ") if lines else ""
    return dict(json.loads(Path(path).read_text()))


def skipped(stage: str, result: dict[str, Any]) -> bool:
    """Whether the stage found everything done."""
    if stage == "regenerate":
        return bool(result["answered_now"] == 0)
    if stage == "cache":
        return not result["producers"]
    if stage == "train":
        return bool(result["steps_now"] == 0)
    return bool(result.get("recorded", False))


if __name__ == "__main__":
    launch(main)
