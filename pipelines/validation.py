"""Schedules on the real decoder, beside what the simulator predicts of them.

A run is one schedule under one load. Repetitions go through the schedules forwards, backwards, forwards, ... with other texts each time, so
that a machine that slows down favours none and the spread shows the noise. Every finished run is kept in a file: stopped and started again,
it goes on.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from actors.decoder import Prompt
from decoding.loop import speculative_decode
from decoding.policies import Policy, RoundOutcome
from decoding.rounds import RecordedRounds
from decoding.settings import SamplingSettings
from decoding.simulator import Contender, Served, Traces, together
from decoding.target import TransformersTarget
from decoding.throughput import ThroughputTable
from drafters.drafter import Drafter
from pipelines.job import JobError, write_json

PREDICTIONS = 8  # recorded answers that a prediction is the mean of
_SEEDS = 1_000_003  # apart from those of calibration


@dataclass(frozen=True)
class Load:
    """Batches decoded one after the other, each of so many requests that start together."""

    name: str
    batches: tuple[int, ...]

    @classmethod
    def steady(cls, concurrency: int, requests: int) -> "Load":
        """One concurrency, for at least that many requests."""
        return cls(str(concurrency), (concurrency,) * -(-max(requests, concurrency) // concurrency))

    @classmethod
    def changing(cls, batches: Sequence[int]) -> "Load":
        return cls(" ".join(map(str, batches)), tuple(batches))


@dataclass(frozen=True)
class Run:
    """What one schedule did under one load, rounds only: the prefill is the same for all of them.

    Attributes:
        tokens: committed in rounds.
        rounds: a request's, added up over requests.
        verified, accepted: draft tokens.
        seconds: of all rounds.
        scheduler_seconds: of them spent deciding.
        speeds: tokens a second of each request, while it was there.
    """

    tokens: int
    rounds: int
    verified: int
    accepted: int
    seconds: float
    scheduler_seconds: float
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class Validation:
    """One schedule under one load: repeated runs together beside the prediction; tokens a second without the prefill.

    Attributes:
        concurrency: requests held; None where that changes.
        low, high: throughput of the slowest and the fastest run.
        user_speed, slowest_tenth: tokens a second of a request.
        scheduler_share: of the seconds.
    """

    name: str
    load: str
    concurrency: int | None
    runs: int
    measured: float
    low: float
    high: float
    predicted: float
    user_speed: float
    slowest_tenth: float
    predicted_user_speed: float
    budget: float
    waste: float
    tau: float
    predicted_tau: float
    scheduler_share: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def told(self) -> str:
        return f"{self.measured:,.1f} tokens/s ({self.low:,.1f} to {self.high:,.1f}), predicted {self.predicted:,.1f} ({self.error:+.0%})"


@dataclass(frozen=True)
class Comparison:
    """Under one load: the fixed schedule that measured best, and by how much each hardware-aware one surpasses it."""

    load: str
    best_fixed: str
    measured: float
    over_best_fixed: dict[str, float]


@dataclass(frozen=True)
class Schedule:
    """A schedule to run: a policy of its own for each run, and as the simulator takes it.

    Attributes:
        fixed: its lengths do not follow from the cost table.
        key: changes with everything that it decides by.
    """

    name: str
    make: Callable[[], Policy]
    contender: Contender
    fixed: bool
    key: str


@dataclass(frozen=True)
class Trial:
    """Everything that runs have in common.

    Attributes:
        folder: of the files that finished runs are kept in.
        key: changes with the machine, the drafter, and all settings that are not a run's own.
    """

    target: TransformersTarget
    drafter: Drafter
    prompts: Sequence[Prompt]
    settings: SamplingSettings
    folder: Path
    key: str

    def runs(
        self, schedules: Sequence[Schedule], loads: Sequence[Load], repeats: int, on_done: Callable[[str], None]
    ) -> dict[tuple[str, str], list[Run]]:
        """Runs by (schedule's name, load's name)."""
        found: dict[tuple[str, str], list[Run]] = {(one.name, load.name): [] for one in schedules for load in loads}
        for load in loads:
            for repeat in range(repeats):
                for schedule in schedules if repeat % 2 == 0 else reversed(schedules):
                    on_done(f"{schedule.name}, {load.name} requests")
                    found[schedule.name, load.name].append(self._kept(schedule, load, repeat))
        return found

    def _kept(self, schedule: Schedule, load: Load, repeat: int) -> Run:
        path = self.folder / f"{self.key}-{schedule.key}-{'_'.join(map(str, load.batches))}-{repeat}.json"
        try:
            value = json.loads(path.read_text())
            return Run(**{**value, "speeds": tuple(value["speeds"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            pass  # damaged is as good as missing
        run = self.run(schedule, load, repeat)
        write_json(path, asdict(run))
        return run

    def run(self, schedule: Schedule, load: Load, repeat: int) -> Run:
        """Decode a load under one policy, which keeps what it learns from batch to batch."""
        watch, first = Stopwatch(schedule.make()), 0
        settings = SamplingSettings(
            self.settings.temperature, self.settings.max_new_tokens, self.settings.stop_ids, self.settings.seed + _SEEDS + repeat
        )
        generations, speeds = [], []
        for count in load.batches:
            numbers = range(first, first + count)
            decoded = speculative_decode(
                self.target,
                self.drafter if schedule.contender.drafted else None,
                [self.prompts[number % len(self.prompts)].token_ids for number in numbers],
                settings,
                request_ids=numbers,
                batch_size=count,
                policy=watch,
            )
            speeds += [(len(g.tokens) - 1) / watch.present[i] for i, g in enumerate(decoded) if len(g.tokens) > 1]
            generations += decoded
            first += count
        rounds = [one for generation in generations for one in generation.rounds]
        return Run(
            tokens=sum(one.committed for one in rounds),
            rounds=len(rounds),
            verified=sum(one.drafted for one in rounds),
            accepted=sum(one.accepted for one in rounds),
            seconds=sum(g.seconds.total - g.seconds.prefill for g in generations),
            scheduler_seconds=watch.spent,
            speeds=tuple(speeds),
        )

    def predict(self, schedule: Schedule, load: Load, rounds: RecordedRounds, table: ThroughputTable) -> Served:
        """The simulator on recorded answers to the same prompts, several of them.

        Raises:
            JobError: a prompt was never recorded.
        """
        traces = Traces(rounds, self.settings.max_new_tokens - 1)
        answers = {prompt.number: np.flatnonzero(traces.prompt == prompt.number) for prompt in self.prompts}
        total = Served()
        for draw in range(PREDICTIONS):
            first = 0
            for count in load.batches:
                chosen = []
                for number in range(first, first + count):
                    own = answers[self.prompts[number % len(self.prompts)].number]
                    if not len(own):
                        raise JobError(
                            "the recorded rounds do not cover this corpus's held-out prompts: run `python -m pipelines.calibrate` again"
                        )
                    chosen.append(int(own[(number // len(self.prompts) + draw) % len(own)]))
                first += count
                total.add(together(traces, table, schedule.contender, chosen))
        return total


def validations(
    trial: Trial,
    schedules: Sequence[Schedule],
    loads: Sequence[Load],
    repeats: int,
    rounds: RecordedRounds,
    table: ThroughputTable,
    on_done: Callable[[str], None],
) -> list[Validation]:
    """Run everything, and predict it."""
    found = trial.runs(schedules, loads, repeats, on_done)
    return [
        _validation(schedule.name, load, found[schedule.name, load.name], trial.predict(schedule, load, rounds, table))
        for load in loads
        for schedule in schedules
    ]


def _validation(name: str, load: Load, runs: Sequence[Run], predicted: Served) -> Validation:
    tokens, seconds, rounds = (sum(values) for values in zip(*((run.tokens, run.seconds, run.rounds) for run in runs), strict=True))
    verified, accepted = sum(run.verified for run in runs), sum(run.accepted for run in runs)
    speeds = [speed for run in runs for speed in run.speeds]
    return Validation(
        name=name,
        load=load.name,
        concurrency=load.batches[0] if len(set(load.batches)) == 1 else None,
        runs=len(runs),
        measured=tokens / seconds,
        low=min(run.tokens / run.seconds for run in runs),
        high=max(run.tokens / run.seconds for run in runs),
        predicted=predicted.throughput,
        user_speed=float(np.mean(speeds)),
        slowest_tenth=float(np.quantile(speeds, 0.1)),
        predicted_user_speed=predicted.user_speed,
        budget=1 + verified / rounds,
        waste=1 - accepted / verified if verified else 0.0,
        tau=tokens / rounds,
        predicted_tau=predicted.tokens / predicted.rounds,
        scheduler_share=sum(run.scheduler_seconds for run in runs) / seconds,
    )


def comparisons(found: Sequence[Validation], fixed: Sequence[str]) -> list[Comparison]:
    """Hardware-aware schedules against the best of the fixed ones, load by load."""
    compared = []
    for load in dict.fromkeys(one.load for one in found):
        own = [one for one in found if one.load == load]
        rivals = [one for one in own if one.name in fixed]
        if rivals and len(rivals) < len(own):
            best = max(rivals, key=lambda one: one.measured)
            gains = {one.name: one.measured / best.measured - 1 for one in own if one.name not in fixed}
            compared.append(Comparison(load, best.name, best.measured, gains))
    return compared


class Stopwatch(Policy):
    """Another policy, the seconds that its decisions take, and how long each request of the present batch has been there."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.spent = inner, 0.0
        self.name, self.needs_confidence = inner.name, inner.needs_confidence
        self.present: dict[int, float] = {}

    def begin(self) -> None:
        self.present = {}
        self.inner.begin()

    def plan(self, requests: np.ndarray, limits: np.ndarray) -> np.ndarray:
        started = time.perf_counter()
        planned = self.inner.plan(requests, limits)
        self.spent += time.perf_counter() - started
        return planned

    def lengths(self, requests: np.ndarray, drafted: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        started = time.perf_counter()
        lengths = self.inner.lengths(requests, drafted, confidence)
        self.spent += time.perf_counter() - started
        return lengths

    def observe(self, outcome: RoundOutcome) -> None:
        started = time.perf_counter()
        self.inner.observe(outcome)
        self.spent += time.perf_counter() - started
        for request in outcome.requests.tolist():
            self.present[request] = self.present.get(request, 0.0) + outcome.seconds
