"""What each verification schedule would serve, from recorded rounds and a cost table: `python -m pipelines.simulate run=dspark_markov`."""

import hashlib
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import hydra
import numpy as np
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from decoding.calibration import Calibrator
from decoding.gate import trust_in_past
from decoding.rounds import RecordedRounds
from decoding.settings import SamplingSettings
from decoding.simulator import Contender, Poisson, Served, Traces, closed, open_loop
from decoding.throughput import Curve, ThroughputTable
from pipelines.drafted import DraftedJob
from pipelines.evaluation_report import machine
from pipelines.job import JobError, finish, launch, mendable, notices, progress
from pipelines.machine import git_revision
from pipelines.page import write_page
from pipelines.profile import DECODER, fingerprint, read_table
from pipelines.scheduling import ScheduleConfig, contender, load_schedule, make_policy
from pipelines.simulation_report import Point, SimulationFindings, simulation_page
from pipelines.target import Target, describe
from pipelines.validation import Load, Schedule, Trial, Validation, comparisons, validations
from storage.calibration import CalibrationIdentity, CalibrationRecord, calibration_identity, load_calibration
from storage.object_store import ObjectStore


class SimulateConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schedules: tuple[str, ...] = Field(min_length=1)
    concurrency: tuple[int, ...] = Field(min_length=1)
    steps: int = Field(ge=10)
    sla: tuple[float, ...] | None
    replicas: int = Field(ge=1)
    load: tuple[float, ...] = Field(min_length=1)
    load_seconds: float = Field(gt=0)
    temperature: float = Field(ge=0, le=2)
    seed: int
    rounds: Path | None
    table: Path | None
    validate_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(alias="validate")
    validate_load: tuple[Annotated[int, Field(ge=1)], ...]
    validate_tokens: int = Field(ge=2)
    validate_requests: int = Field(ge=1)
    validate_repeats: int = Field(ge=1)
    again: bool


class SimulateJob(DraftedJob):
    simulate: SimulateConfig


@hydra.main(config_path="../conf", config_name="simulate", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = SimulateJob.from_config(cfg)
    store = job.open_store()
    target, files = job.open_drafter(store)
    folder = job.output / job.places.run(job.run)
    identity = calibration_identity(job.drafter_store(store), files, job.simulate.temperature)
    rounds = recorded(job.simulate.rounds or folder / "calibration" / "rounds.npz", identity)
    table = read_table(job.simulate.table or folder / "profile" / "table.json")
    if table.block != files.layout.block_length:
        raise JobError(f"the cost table is of blocks of {table.block}, the drafter's are {files.layout.block_length} long: measure another")
    engine = table.fingerprint.get("engine", DECODER)
    if engine != DECODER and job.simulate.validate_at:
        raise JobError(f"the cost table is of {engine}, and simulate.validate runs the in-process decoder: give a table of that one")
    stale = table.differences(fingerprint(job, store, engine)) if table.kind == "measured" else []
    schedules = [load_schedule(name) for name in job.simulate.schedules]
    record = load_calibration(job.drafter_store(store), identity) if any(one.reads_confidence for one in schedules) else None
    bench = Bench(job.simulate, schedules, rounds, table, record)
    with progress() as bar:
        task = bar.add_task("simulating", total=len(bench.schedules) * len(job.simulate.concurrency), note="")
        points = bench.closed_points(lambda name: bar.update(task, advance=1, note=name))
        load = bench.under_load(points)
        doubts = bench.doubts()
    measured = validate(job, store, target, bench) if job.simulate.validate_at else []
    compared = comparisons(measured, [one.name for one in bench.schedules if one.fixed])
    found = SimulationFindings(
        title=f"Serving {job.target.name} with {job.run}",
        kind=f"{table.kind}" if engine == DECODER else f"{table.kind} ({engine}, drafting not included)",
        points=points,
        sla=job.simulate.sla or bench.levels(points),
        load=load,
        load_steps=[(share, job.simulate.load_seconds) for share in job.simulate.load],
        replicas=job.simulate.replicas,
        doubts=doubts,
        validations=measured,
        comparisons=compared,
        notes=[f"The cost table does not hold on this machine. {'; '.join(stale)}."] if stale else [],
        facts={
            "target": job.target.model,
            "drafter": f"{job.run}, block {table.block}",
            "recorded": f"{len(rounds):,} rounds of {rounds.requests} requests, temperature {job.simulate.temperature:g}",
            "cost table": f"{table.kind}, context {table.context}, requests " + ", ".join(str(curve.requests) for curve in table.curves),
            "cost table holds": table.covers,
            **{f"table: {name}": value for name, value in table.fingerprint.items() if name not in ("target", "drafter")},
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "git revision": git_revision() or "not in a git checkout",
            "command": f"python -m pipelines.simulate {shlex.join(sys.argv[1:])}",
        },
    )
    page = write_page(simulation_page(found), folder / "simulation")
    most = max(job.simulate.concurrency)
    finish(
        f"serving {job.target.name} with {job.run} (cost table: {table.kind})",
        {
            **{
                point.name: f"{point.throughput:,.1f} tokens/s at {most} requests, {point.budget:.2f} verified a round"
                for point in points
                if point.concurrency == most
            },
            **{
                f"measured at {one.load}, best fixed": f"{one.best_fixed}, {one.measured:,.1f} tokens/s; "
                + ", ".join(f"{name} {gain:+.1%}" for name, gain in one.over_best_fixed.items())
                for one in compared
            },
            "report": str(page),
        },
        {
            "target": describe(target),
            "run": job.run,
            "settings": job.simulate.model_dump(mode="json"),
            "table_kind": table.kind,
            "stale": stale,
            "points": [asdict(point) for point in points],
            "load": {name: _summary(served) for name, served in load.items()},
            "doubts": doubts,
            "validations": [{**asdict(one), "error": one.error} for one in measured],
            "comparisons": [asdict(one) for one in compared],
            "report": str(page),
        },
        folder / "simulation" / "simulate.json",
    )


def recorded(path: Path, identity: CalibrationIdentity) -> RecordedRounds:
    """Rounds from a file, refused where another drafter made them, or at another temperature."""
    if not path.is_file():
        raise JobError(f"{path} does not exist: record rounds with `python -m pipelines.calibrate` first, or give simulate.rounds=")
    rounds = RecordedRounds.from_bytes(path.read_bytes(), str(path))
    if rounds.facts.get("drafter") != identity.drafter:
        raise JobError(f"{path} was recorded with another drafter. Run `python -m pipelines.calibrate` again.")
    if rounds.facts.get("temperature") != identity.temperature:
        raise JobError(
            f"{path} was recorded at temperature {rounds.facts.get('temperature')}, this run asks for {identity.temperature:g}: set "
            "simulate.temperature, or record anew with calibrate.temperature"
        )
    return rounds


class Bench:
    """Traces, costs and contenders of one comparison."""

    def __init__(
        self,
        config: SimulateConfig,
        schedules: Sequence[ScheduleConfig],
        rounds: RecordedRounds,
        table: ThroughputTable,
        record: CalibrationRecord | None,
    ) -> None:
        self.config, self.rounds, self.table, self.record = config, rounds, table, record
        self.traces = Traces(rounds)
        self.schedules = [one for one in schedules if one.length is None or one.length <= table.block]
        for one in schedules:
            if one not in self.schedules:
                notices.print(f"{one.name} is left out: blocks are {table.block} long")

    @property
    def calibrator(self) -> Calibrator:
        return Calibrator(self.record.temperatures) if self.record else Calibrator.identity(self.table.block)

    @property
    def prior(self) -> np.ndarray:
        return np.array(self.record.acceptance if self.record else (0.5,) * self.table.block)

    @cached_property
    def trust(self) -> float:
        return trust_in_past(self.rounds, self.calibrator, self.prior)

    @property
    def shorter(self) -> dict[int, np.ndarray]:
        return {one.length: np.array(one.ratios) for one in self.record.shorter} if self.record else {}

    def contender(self, schedule: ScheduleConfig, calibrator: Calibrator | None = None, table: ThroughputTable | None = None) -> Contender:
        return contender(schedule, calibrator or self.calibrator, table or self.table, self.prior, self.trust, self.shorter)

    def schedule(self, schedule: ScheduleConfig) -> Schedule:
        """To be run on the real decoder."""
        decides_by = [
            schedule.model_dump_json(),
            self.calibrator.temperatures if schedule.reads_confidence else None,
            (self.table.to_json(), self.prior.tolist()) if not schedule.fixed else None,
            ({length: ratios.tolist() for length, ratios in self.shorter.items()}, self.trust) if schedule.gate else None,
        ]
        return Schedule(
            schedule.name,
            lambda: make_policy(schedule, self.calibrator, self.table, self.prior, self.trust, self.shorter),
            self.contender(schedule),
            schedule.fixed,
            hashlib.blake2b(repr(decides_by).encode(), digest_size=8).hexdigest(),
        )

    def closed_points(self, on_done: Any) -> list[Point]:
        """Every schedule at every concurrency, which is kept."""
        points = []
        for schedule in self.schedules:
            for concurrency in self.config.concurrency:
                served = closed(self.traces, self.table, self.contender(schedule), concurrency, self.config.steps, self.config.seed)
                points.append(
                    Point(schedule.name, concurrency, served.throughput, served.throughput / concurrency, served.budget, served.waste)
                )
                on_done(schedule.name)
        return points

    def levels(self, points: Sequence[Point]) -> tuple[float, ...]:
        """Service levels between the slowest and the fastest speed of a user."""
        speeds = [point.user_speed for point in points]
        return tuple(float(f"{value:.2g}") for value in np.geomspace(min(speeds), 0.95 * max(speeds), 5))

    def under_load(self, points: Sequence[Point]) -> dict[str, Served]:
        """A cluster whose load changes, in shares of what whole blocks serve at the highest concurrency."""
        most = max(self.config.concurrency)
        capacity = max(point.throughput for point in points if point.concurrency == most)
        requests = capacity * self.config.replicas / float(self.traces.tokens.mean())
        seconds = self.config.load_seconds
        rates = tuple((number * seconds, share * requests) for number, share in enumerate(self.config.load))
        duration = seconds * len(rates)
        return {
            schedule.name: open_loop(
                self.traces,
                self.table,
                self.contender(schedule),
                Poisson(rates),
                self.config.replicas,
                most,
                duration,
                self.config.seed,
            )
            for schedule in self.schedules
        }

    def doubts(self) -> list[dict[str, Any]]:
        """What Algorithm 1 loses where its confidences or its table are wrong."""
        schedule = next((one for one in self.schedules if one.policy == "algorithm1" and not one.gate and not one.online), None)
        if schedule is None:
            return []
        cases = {
            "as calibrated": (self.calibrator, self.table),
            "confidences as the drafter says": (Calibrator.identity(self.table.block), self.table),
            "confidences twice as sure": (Calibrator(tuple(t / 2 for t in self.calibrator.temperatures)), self.table),
            "table: tokens thought free": (self.calibrator, bent(self.table, 0.0)),
            "table: tokens thought twice as dear": (self.calibrator, bent(self.table, 2.0)),
        }
        return [
            {
                "case": name,
                "concurrency": concurrency,
                "throughput": closed(
                    self.traces, self.table, self.contender(schedule, *case), concurrency, self.config.steps, self.config.seed
                ).throughput,
            }
            for name, case in cases.items()
            for concurrency in self.config.concurrency
        ]


def bent(table: ThroughputTable, factor: float) -> ThroughputTable:
    """The table with what verified tokens add to a round multiplied."""
    curves = [
        Curve(
            curve.requests,
            curve.tokens,
            tuple(max(curve.seconds[0] + factor * (seconds - curve.seconds[0]), 0.1 * curve.seconds[0]) for seconds in curve.seconds),
            curve.draft_seconds,
            curve.block_seconds,
            curve.plain_seconds,
        )
        for curve in table.curves
    ]
    return ThroughputTable(tuple(curves), table.context, table.block, "assumed")


def validate(job: SimulateJob, store: ObjectStore, target: Target, bench: Bench) -> list[Validation]:
    """Every schedule on the real decoder at each concurrency, and while that changes."""
    settings = job.simulate
    _, prompts = job.heldout(store, target, None)
    loads = [Load.steady(number, settings.validate_requests) for number in settings.validate_at]
    if settings.validate_load:
        loads.append(Load.changing(settings.validate_load))
    pair = job.decoder(store, target, max(count for load in loads for count in load.batches))
    here = sorted(fingerprint(job, store).items())
    folder = job.output / job.places.run(job.run) / "simulation" / "runs"
    if settings.again:
        shutil.rmtree(folder, ignore_errors=True)
    sampling = SamplingSettings(settings.temperature, settings.validate_tokens, target.template.stop_ids, settings.seed)
    trial = Trial(*pair, prompts, sampling, folder, job.drafter_key(store, here, sampling, prompts=prompts))
    with progress() as bar:
        count = len(loads) * len(bench.schedules) * settings.validate_repeats
        task = bar.add_task("on the real decoder", total=count, note="")
        return validations(
            trial,
            [bench.schedule(one) for one in bench.schedules],
            loads,
            settings.validate_repeats,
            bench.rounds,
            bench.table,
            lambda note: bar.update(task, advance=1, note=note),
        )


def _summary(served: Served) -> dict[str, float]:
    return {
        "throughput": served.throughput,
        "user_speed": served.user_speed,
        "slowest_tenth": float(np.quantile(served.speeds, 0.1)) if served.speeds else float("nan"),
        "wait": float(np.mean(served.waits)) if served.waits else float("nan"),
        "finished": len(served.speeds),
        "budget": served.budget,
        "waste": served.waste,
    }


if __name__ == "__main__":
    launch(main)
