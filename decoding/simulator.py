"""A discrete-event model of a serving cluster: recorded rounds, a cost table, a policy, and requests that arrive.

Each replica runs rounds over the requests that it holds, as the decoder does: plan, draft, choose what to verify, commit. What a draft
would have met is read from recorded rounds (whole blocks verified); how long a round takes is read from the table. A round that verified
less than was recorded leaves its request between two recorded rounds; it goes on with the next one that begins at or after its place. So a
text that is cut shorter sees confidences of its own neighbourhood, not of its exact place. Where a policy makes shorter blocks, each
acceptance of the whole block stands only as often as was measured for such blocks. These are the model's approximations besides the cost
table.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decoding.errors import DecodingError
from decoding.policies import Policy, RoundOutcome
from decoding.rounds import RecordedRounds
from decoding.throughput import ThroughputTable


class Traces:
    """Recorded requests, to be walked through token by token.

    Attributes:
        tokens: [Q] tokens that each request's rounds committed, at most `most`.
        capped: [Q] whether the text goes on beyond that; then the end is known beforehand, and nothing is drafted past it.
        prompt: [Q] the number of the prompt it answers.
    """

    def __init__(self, rounds: RecordedRounds, most: int | None = None) -> None:
        if not len(rounds):
            raise DecodingError("there are no recorded rounds to simulate from. Record some with `python -m pipelines.calibrate`.")
        self.confidence = np.nan_to_num(rounds.confidence, nan=0.5)
        self.has_confidence = bool(np.isfinite(rounds.confidence).any())
        self.limit, self.accepted, self.block = rounds.drafted, rounds.accepted, rounds.block
        requests, first, counts = np.unique(rounds.request, return_index=True, return_counts=True)
        whole = np.add.reduceat(rounds.committed, first)
        self.tokens = whole if most is None else np.minimum(whole, most)
        self.capped, self.prompt = whole > self.tokens, rounds.prompt[requests]
        self._base = np.cumsum(self.tokens) - self.tokens
        # For every place of every text the recorded round that begins there, or the next one after it, or the last.
        self._rows = np.empty(int(self.tokens.sum()), dtype=np.int64)
        for q in range(len(requests)):
            rows = np.arange(first[q], first[q] + counts[q])
            starts = np.cumsum(rounds.committed[rows]) - rounds.committed[rows]
            at = np.searchsorted(starts, np.arange(self.tokens[q]))
            self._rows[self._base[q] : self._base[q] + self.tokens[q]] = rows[np.minimum(at, counts[q] - 1)]

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, request: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Recorded rounds for requests ([R]) that have committed `place` ([R]) tokens in rounds."""
        return self._rows[self._base[request] + place]


@dataclass(frozen=True)
class Contender:
    """A policy to be compared.

    Attributes:
        make: gives each replica its own.
        drafted: False is decoding without any drafter.
        shorter: by block length, measured survival of such blocks over that of whole ones.
    """

    name: str
    make: Callable[[], Policy]
    drafted: bool = True
    shorter: Mapping[int, np.ndarray] = field(default_factory=dict)


class Arrivals(Protocol):
    """When requests come."""

    def times(self, random: np.random.Generator) -> Iterator[float]:
        """Ascending seconds."""


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals; `rates` are (from second, requests a second) steps, the first from 0."""

    rates: tuple[tuple[float, float], ...]

    def times(self, random: np.random.Generator) -> Iterator[float]:
        highest, now = max(rate for _, rate in self.rates), 0.0
        while highest > 0:
            now += random.exponential(1 / highest)
            rate = [rate for start, rate in self.rates if start <= now][-1]
            if random.random() < rate / highest:  # thinned to the present rate
                yield now


@dataclass
class Served:
    """What a simulation adds up.

    Attributes:
        seconds: simulated time, times replicas.
        tokens: committed in rounds, all requests.
        rounds: a request's, added up over requests.
        steps: rounds of whole batches.
        drafted, verified, accepted: draft tokens.
        speeds: tokens a second of each finished request, from its first round to its last.
        waits: seconds that each finished request waited for its first round.
    """

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    speeds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def add(self, other: "Served") -> None:
        """Count another simulation in, one after the other."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def throughput(self) -> float:
        """Tokens a second of one replica."""
        return self.tokens / self.seconds if self.seconds else float("nan")

    @property
    def user_speed(self) -> float:
        """Mean tokens a second of a finished request."""
        return float(np.mean(self.speeds)) if self.speeds else float("nan")

    @property
    def budget(self) -> float:
        """Tokens of a request in a pass, its anchor included."""
        return 1 + self.verified / self.rounds if self.rounds else float("nan")

    @property
    def waste(self) -> float:
        """Share of verified draft tokens that were rejected."""
        return 1 - self.accepted / self.verified if self.verified else 0.0

    @property
    def concurrency(self) -> float:
        """Requests in a round, on the mean."""
        return self.rounds / self.steps if self.steps else float("nan")


class Replica:
    """One engine and the requests that it holds."""

    def __init__(self, traces: Traces, table: ThroughputTable, contender: Contender, slots: int, served: Served) -> None:
        self.traces, self.table, self.contender, self.slots, self.served = traces, table, contender, slots, served
        self.policy = contender.make()
        self.policy.begin()
        self.number = np.zeros(0, dtype=np.int64)  # of the request, over the whole simulation
        self.trace = np.zeros(0, dtype=np.int64)
        self.place = np.zeros(0, dtype=np.int64)
        self.began = np.zeros(0)
        self.waiting: deque[tuple[int, int, int, float]] = deque()  # number, trace, place, when it came
        self._random = np.random.default_rng(0)

    @property
    def load(self) -> int:
        """Requests held or waiting."""
        return len(self.number) + len(self.waiting)

    def add(self, number: int, trace: int, now: float, place: int = 0) -> None:
        """A request comes; its trace is walked from `place` on."""
        self.waiting.append((number, trace, place, now))

    def step(self, now: float) -> tuple[float, int]:
        """One round from `now` on: (seconds that it takes, requests that end with it)."""
        self._admit(now)
        rows = self.traces.rows(self.trace, self.place)
        left = self.traces.tokens[self.trace] - self.place
        requests, limits = len(rows), self.traces.limit[rows]
        limits = np.where(self.traces.capped[self.trace], np.minimum(limits, left - 1), limits)
        planned = self.policy.plan(self.number, limits) if self.contender.drafted else np.zeros_like(limits)
        width = int(planned.max(initial=0))
        confidence = self.traces.confidence[rows, :width] if width and self.traces.has_confidence else None
        lengths = self.policy.lengths(self.number, planned, confidence) if self.contender.drafted else planned
        accepted = np.minimum(self._accepted(rows, planned), lengths)
        committed = np.minimum(accepted + 1, left)
        seconds, drafting = self._cost(requests, planned, lengths)
        if self.contender.drafted:
            self.policy.observe(RoundOutcome(self.number, planned, lengths, accepted, confidence, seconds, drafting))
        self._count(planned, lengths, accepted, committed)
        self.place = self.place + committed
        ended = committed == left
        end = now + seconds
        for began, trace in zip(self.began[ended], self.trace[ended], strict=True):
            self.served.speeds.append(float(self.traces.tokens[trace] / (end - began)))
        stay = ~ended
        self.number, self.trace, self.place, self.began = self.number[stay], self.trace[stay], self.place[stay], self.began[stay]
        return seconds, int(ended.sum())

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.number) < self.slots:
            number, trace, place, came = self.waiting.popleft()
            self.number, self.trace = np.append(self.number, number), np.append(self.trace, trace)
            # A request that starts in the middle counts as begun as much earlier as its speed until then is unknown: its speed is left out.
            self.place, self.began = np.append(self.place, place), np.append(self.began, now if not place else -np.inf)
            self.served.waits.append(now - came)

    def _accepted(self, rows: np.ndarray, planned: np.ndarray) -> np.ndarray:
        """[R] draft tokens that would be accepted of blocks as long as planned."""
        accepted = self.traces.accepted[rows]
        if not self.policy.shortens:
            return accepted
        for length, ratio in self.contender.shorter.items():
            own = np.flatnonzero(planned == length)
            if len(own):
                lasting = (self._random.random((len(own), 1)) < np.minimum.accumulate(np.minimum(ratio, 1.0))).sum(1)
                accepted[own] = np.minimum(accepted[own], lasting)
        return accepted

    def _cost(self, requests: int, planned: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
        """(seconds of the round, of them drafting)."""
        if not self.contender.drafted or not planned.any():
            return self.table.plain_seconds(requests), 0.0
        whole = float(self.table.seconds(requests)[requests + int(lengths.sum())])
        cost = self.table.block_seconds if self.policy.shortens else self.table.draft_seconds
        drafting = cost(int((planned > 0).sum()), int(planned.max(initial=0)))
        return max(whole - self.table.draft_seconds(requests, self.table.block), 0.0) + drafting, drafting

    def _count(self, planned: np.ndarray, lengths: np.ndarray, accepted: np.ndarray, committed: np.ndarray) -> None:
        served = self.served
        served.steps += 1
        served.rounds += len(planned)
        served.drafted += int(planned.sum())
        served.verified += int(lengths.sum())
        served.accepted += int(accepted.sum())
        served.tokens += int(committed.sum())


def closed(traces: Traces, table: ThroughputTable, contender: Contender, concurrency: int, steps: int, seed: int = 0) -> Served:
    """One replica that always holds `concurrency` requests: where one ends, the next begins. The first ones are met midway."""
    random, served = np.random.default_rng(seed), Served()
    replica = Replica(traces, table, contender, concurrency, served)
    number = 0
    for _ in range(concurrency):
        trace = _by_length(traces, random)
        replica.add(number, trace, 0.0, int(random.integers(traces.tokens[trace])))
        number += 1
    now = 0.0
    for _ in range(steps):
        seconds, ended = replica.step(now)
        now += seconds
        for _ in range(ended):
            replica.add(number, int(random.integers(len(traces))), now)
            number += 1
    served.seconds = now
    served.speeds = [speed for speed in served.speeds if speed > 0]
    return served


def together(traces: Traces, table: ThroughputTable, contender: Contender, requests: list[int]) -> Served:
    """A batch of the given traces that starts together and is not refilled, as the decoder runs its prompts."""
    served = Served()
    replica = Replica(traces, table, contender, len(requests), served)
    for number, trace in enumerate(requests):
        replica.add(number, trace, 0.0)
    now = 0.0
    while replica.load:
        seconds, _ = replica.step(now)
        now += seconds
    served.seconds = now
    return served


def open_loop(
    traces: Traces,
    table: ThroughputTable,
    contender: Contender,
    arrivals: Arrivals,
    replicas: int,
    slots: int,
    duration: float,
    seed: int = 0,
) -> Served:
    """Requests arrive by themselves and go to a replica with the least load; each replica runs at most `slots` of them together.

    Args:
        duration: seconds during which requests arrive and are counted; what is unfinished then is dropped.
    """
    random, served = np.random.default_rng(seed), Served()
    fleet = [Replica(traces, table, contender, slots, served) for _ in range(replicas)]
    loads = np.zeros(replicas, dtype=np.int64)
    busy = np.zeros(replicas, dtype=bool)
    coming = arrivals.times(random)
    events: list[tuple[float, int]] = []  # (when, replica whose round ends, or -1 for an arrival)

    def next_arrival() -> None:
        if (when := next(coming, None)) is not None and when < duration:
            heapq.heappush(events, (when, -1))

    def start(at: int, now: float) -> None:
        seconds, _ = fleet[at].step(now)
        busy[at] = True
        heapq.heappush(events, (now + seconds, at))

    next_arrival()
    number = 0
    while events:
        now, at = heapq.heappop(events)
        if now >= duration:
            break
        if at < 0:
            least = np.flatnonzero(loads == loads.min())
            chosen = int(least[random.integers(len(least))])
            fleet[chosen].add(number, int(random.integers(len(traces))), now)
            number += 1
            loads[chosen] += 1
            next_arrival()
            if not busy[chosen]:
                start(chosen, now)
            continue
        loads[at] = fleet[at].load
        busy[at] = False
        if loads[at]:
            start(at, now)
    served.seconds = duration * replicas
    return served


def _by_length(traces: Traces, random: np.random.Generator) -> int:
    """A trace drawn in proportion to its length: what one finds running at a random moment."""
    return int(random.choice(len(traces), p=traces.tokens / traces.tokens.sum()))
