"""What an evaluation found, as plain typed data: the input of figures, poster and report page.

Everything here goes to JSON with `to_dict` and comes back with `from_dict`, which refuses unknown and missing fields, so that a page can be
drawn again from the JSON that an evaluation left behind. Rates stay numerator and denominator until they are shown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipelines.plain_data import ReportError, from_plain
from pipelines.sample_text import SampleText

if TYPE_CHECKING:
    pass

Kind = Literal["conditional", "prefix"]

METRIC_OF_KIND: dict[Kind, str] = {"conditional": "accept_cond", "prefix": "accept_prefix"}
TRAINING_TERMS = ("loss", "ce", "tv", "confidence_bce", "soft_ce", "lk", "lk_hybrid")
_SINGLE = ("tau_teacher_forced", "heldout/tau_teacher_forced", "heldout/tau", "heldout/confidence_bias")


@dataclass(frozen=True)
class Ratio:
    """`hits` out of `trials`."""

    hits: float
    trials: float

    @property
    def value(self) -> float:
        """hits / trials, NaN where nothing was tried."""
        return self.hits / self.trials if self.trials else math.nan

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Wilson score interval, which takes the trials as independent. NaN where nothing was tried."""
        if not self.trials:
            return math.nan, math.nan
        n, p = self.trials, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Estimate:
    """A value and, where known, its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Acceptance:
    """One drafter's (or one domain's) acceptance by position; index 0 is the first drafted token."""

    label: str
    conditional: tuple[Ratio, ...]
    prefix: tuple[Ratio, ...]

    def of(self, kind: Kind) -> tuple[Ratio, ...]:
        """The ratios of one kind, by position."""
        return self.conditional if kind == "conditional" else self.prefix

    @classmethod
    def from_metrics(cls, label: str, metrics: Mapping[str, Sequence[float]]) -> Acceptance:
        """Pick `accept_cond@k` and `accept_prefix@k` (k = 1, 2, ...) out of named (numerator, denominator) pairs."""
        by_kind: dict[Kind, tuple[Ratio, ...]] = {}
        for kind, name in METRIC_OF_KIND.items():
            ratios: list[Ratio] = []
            while (pair := metrics.get(f"{name}@{len(ratios) + 1}")) is not None:
                ratios.append(Ratio(*pair))
            by_kind[kind] = tuple(ratios)
        return cls(label, by_kind["conditional"], by_kind["prefix"])


@dataclass(frozen=True)
class DomainResult:
    """One domain's share of the evaluation."""

    domain: str
    prompts: int
    tokens: int
    rounds: int
    tau_pooled: Estimate
    tau_per_request: Estimate
    acceptance: Acceptance
    wall_clock_ratio: float | None = None


@dataclass(frozen=True)
class TrainingPoint:
    """One record of a training log: the loss and its terms, after `step` optimizer steps and `samples` sequences.

    `samples` is 0 where the log is silent. Teacher-forced accepted length on the batch just trained on, and on held-out rows; of these also
    the accepted length decoded, one_minus_tv by position, and how much the confidence head says too much.
    """

    step: int
    samples: int
    terms: dict[str, float]
    tau_teacher_forced: float | None = None
    tau_heldout: float | None = None
    tau_decoded: float | None = None
    confidence_bias: float | None = None
    positions: tuple[float, ...] = ()


@dataclass(frozen=True)
class StageTime:
    """Wall time that one pipeline stage took in this run; `skipped` where its output was already there, unchanged."""

    stage: str
    seconds: float
    skipped: bool = False


@dataclass(frozen=True)
class Timing:
    """Wall clock of the same prompts decoded plainly and with the drafter; seconds, and tokens produced in them.

    `draft_seconds`, `head_seconds`, `verify_seconds` and `prefill_seconds` are parts of the drafted time, see `decoding.settings.Seconds`;
    `plain_prefill_seconds` is one of the plain time.
    """

    plain_seconds: float
    plain_tokens: int
    drafted_seconds: float
    drafted_tokens: int
    draft_seconds: float | None = None
    head_seconds: float | None = None
    verify_seconds: float | None = None
    prefill_seconds: float | None = None
    plain_prefill_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster a token comes with the drafter than without; None where one of the two was not measured."""
        if min(self.plain_seconds, self.plain_tokens, self.drafted_seconds, self.drafted_tokens) <= 0:
            return None
        return (self.drafted_tokens / self.drafted_seconds) / (self.plain_tokens / self.plain_seconds)

    @property
    def other_share(self) -> float | None:
        """Share of the rounds' time outside the models: acceptance, scheduling, bookkeeping. None where a part was not measured."""
        shares = self.shares
        return shares["outside"] if shares else None

    @property
    def shares(self) -> dict[str, float]:
        """What part of the rounds' time (the prompt left out) each stage takes; empty where a part was not measured."""
        if self.draft_seconds is None or self.head_seconds is None or self.verify_seconds is None:
            return {}
        if self.prefill_seconds is None or self.plain_prefill_seconds is None:
            return {}
        rounds = self.drafted_seconds - self.prefill_seconds
        if rounds <= 0:
            return {}
        parts = {"draft": self.draft_seconds, "head": self.head_seconds, "verify": self.verify_seconds}
        found = {name: seconds / rounds for name, seconds in parts.items()}
        return {**found, "outside": 1 - sum(found.values())}


@dataclass(frozen=True)
class Score:
    """One drafter on some prompts: a benchmark, or a domain."""

    name: str
    domain: str
    prompts: int
    tokens: int
    rounds: int
    tau_pooled: Estimate
    tau_per_request: Estimate
    acceptance: Acceptance
    verify_rate: Ratio
    verify_waste: Ratio
    timing: Timing


@dataclass(frozen=True)
class DrafterResult:
    """One of the drafters compared, on each benchmark and domain.

    Attributes:
        kind: algorithm and head; drafters of one kind make one line of a figure.
        layers, block_length: 0 for plain decoding.
        tau_macro: mean over benchmarks of the pooled accepted length.
    """

    name: str
    kind: str
    layers: int
    block_length: int
    benchmarks: tuple[Score, ...]
    domains: tuple[Score, ...]
    tau_macro: Estimate


@dataclass(frozen=True)
class Gain:
    """By how much `drafter` surpasses `over` in macro accepted length, as a share: 0.1 is 10 % longer."""

    drafter: str
    over: str
    value: Estimate


@dataclass(frozen=True)
class ThresholdPoint:
    """Draft tokens that a confidence threshold lets through in `rounds` rounds, by what verification says of them."""

    threshold: float
    rounds: int
    accepted: int
    rejected: int

    @property
    def rate(self) -> float:
        """Accepted of what was let through, NaN where nothing was."""
        return Ratio(self.accepted, self.accepted + self.rejected).value


@dataclass(frozen=True)
class Sweep:
    """Thresholds from low to high, on the prompts of one domain."""

    label: str
    points: tuple[ThresholdPoint, ...]


@dataclass(frozen=True)
class HeadCost:
    """Seconds of one round of a drafter, averaged over context lengths, without its sequential head and with it."""

    drafter: str
    batch: int
    contexts: tuple[int, ...]
    base_seconds: float
    draft_seconds: float
    verify_seconds: float

    @property
    def overhead(self) -> float:
        """How much longer the head makes a round, as a share of the round without it."""
        return (self.draft_seconds - self.base_seconds) / (self.base_seconds + self.verify_seconds)


@dataclass(frozen=True)
class Bin:
    """Rounds whose predicted survival lies in one bin: how many, their mean prediction, and the share that survived."""

    rounds: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """Survival of draft prefixes, by bins that hold any round, before and after temperature scaling; `label` says which prefixes."""

    label: str
    before: tuple[Bin, ...]
    after: tuple[Bin, ...]


@dataclass(frozen=True)
class Settings:
    """How the decoding was run."""

    temperature: float
    max_new_tokens: int
    batch_size: int
    block_length: int
    seed: int
    dtype: str


@dataclass(frozen=True)
class Facts:
    """What one needs to know to repeat the run. `drafter` and `versions` are shown as given, in their order."""

    target: str
    drafter: dict[str, str]
    contract_fingerprint: str
    machine: str
    date: str
    git_revision: str | None = None
    command: str | None = None
    versions: dict[str, str] | None = None


@dataclass(frozen=True)
class EvaluationReport:
    """One drafter evaluated on one target. The first entry of `acceptance` is that drafter; more are drawn beside it.

    `drafters` holds all of them, benchmark by benchmark, in the same order; `gains`, `sweeps` and `reliability` are
    the first one's.
    """

    title: str
    settings: Settings
    facts: Facts
    prompts: int
    tokens: int
    rounds: int
    tau_pooled: Estimate
    tau_per_request: Estimate
    timing: Timing
    acceptance: tuple[Acceptance, ...]
    domains: tuple[DomainResult, ...] = ()
    training: tuple[TrainingPoint, ...] = ()
    stages: tuple[StageTime, ...] = ()
    samples: tuple[SampleText, ...] = ()
    notes: tuple[str, ...] = ()
    prompts_are: str = "held-out prompts"
    drafters: tuple[DrafterResult, ...] = ()
    gains: tuple[Gain, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    head_costs: tuple[HeadCost, ...] = ()
    reliability: tuple[Reliability, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EvaluationReport:
        """Inverse of `to_dict`, also after a trip through JSON. Raises ReportError that names the first field that is wrong."""
        return from_plain(cls, data, "report")


def reliabilities_from(rows: Sequence[Any]) -> tuple[Reliability, ...]:
    """Diagrams from a result file's plain data. Raises ReportError that names the first field that is wrong."""
    return tuple(from_plain(Reliability, row, f"reliability[{index}]") for index, row in enumerate(rows))


def bootstrap_tau(tokens: Sequence[int], rounds: Sequence[int], resamples: int = 1000, seed: int = 0) -> tuple[Estimate, Estimate]:
    """Accepted length with 95 % intervals from resampling whole requests, since rounds of one request are not independent.

    Args:
        tokens: [R] tokens committed in verification rounds, by request.
        rounds: [R] verification rounds, by request; requests without a round are left out.

    Returns:
        (pooled over rounds, averaged over requests)
    """
    pairs = np.array([(t, n) for t, n in zip(tokens, rounds, strict=True) if n], dtype=np.float64).reshape(-1, 2)
    if not len(pairs):
        raise ReportError("no request had a verification round: there is no accepted length to report")
    drawn = pairs[np.random.default_rng(seed).integers(len(pairs), size=(resamples, len(pairs)))]  # [resamples, R, 2]
    pooled, per_request = drawn[..., 0].sum(1) / drawn[..., 1].sum(1), (drawn[..., 0] / drawn[..., 1]).mean(1)

    def estimate(value: float, spread: np.ndarray) -> Estimate:
        low, high = np.quantile(spread, [0.025, 0.975])
        return Estimate(float(value), float(low), float(high))

    return estimate(pairs[:, 0].sum() / pairs[:, 1].sum(), pooled), estimate((pairs[:, 0] / pairs[:, 1]).mean(), per_request)


def training_points(records: Iterable[Mapping[str, Any]]) -> tuple[TrainingPoint, ...]:
    """Points of a training log (`metrics.jsonl`), one record a mapping.

    Taken are records with `step` and any of TRAINING_TERMS and of what is told of held-out rows; others are passed over.
    """
    points = []
    for record in records:
        numbers = {name: float(record[name]) for name in (*TRAINING_TERMS, *_SINGLE) if record.get(name) is not None}
        if "step" in record and numbers:
            point = TrainingPoint(
                step=int(record["step"]),
                samples=int(record.get("samples", 0)),
                terms={name: numbers[name] for name in TRAINING_TERMS if name in numbers},
                tau_teacher_forced=numbers.get("tau_teacher_forced"),
                tau_heldout=numbers.get("heldout/tau_teacher_forced"),
                tau_decoded=numbers.get("heldout/tau"),
                confidence_bias=numbers.get("heldout/confidence_bias"),
                positions=_by_position(record),
            )
            points.append(point)
    return tuple(points)


def _by_position(record: Mapping[str, Any]) -> tuple[float, ...]:
    """heldout/one_minus_tv@1, @2, ... as far as the record has them."""
    names = (f"heldout/one_minus_tv@{k}" for k in itertools.count(1))
    return tuple(float(record[name]) for name in itertools.takewhile(lambda name: record.get(name) is not None, names))
