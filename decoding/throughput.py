"""What a verification round costs by its number of tokens, SPS(B): measured, read from a file, re-estimated while serving."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from decoding.errors import DecodingError
from decoding.loop import speculative_decode
from decoding.policies import Policy, RoundOutcome
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget
from drafters.drafter import Drafter

FORMAT = 2
WHOLE_ROUNDS = "whole rounds of the in-process decoder, drafting included"


@dataclass(frozen=True)
class Curve:
    """Rounds of one number of requests.

    Attributes:
        requests: R.
        tokens: B, tokens in the target's pass, ascending from R; the measured points.
        seconds: of a whole round with B tokens, drafting of the whole block included.
        draft_seconds: of proposing w tokens for every request, cut from whole blocks, by w from 0 to g; part of `seconds` at w = g.
        block_seconds: of proposing blocks of w tokens, made with so many slots only, by w from 0 to g.
        plain_seconds: of a round without any drafter.
    """

    requests: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    block_seconds: tuple[float, ...]
    plain_seconds: float


@dataclass(frozen=True, eq=False)  # compared and hashed as itself: it is looked up every round
class ThroughputTable:
    """SPS(B) at stated numbers of requests and a stated context.

    Between measured points of a curve seconds run straight, so the points themselves, with whatever steps they show, are kept; nothing is
    smoothed. Between two measured numbers of requests they run straight at equal tokens per request. A table of one curve is taken to
    depend on the tokens alone.

    Attributes:
        curves: by ascending number of requests.
        context: tokens that each request's text had.
        block: g.
        kind: "measured" or "assumed".
        covers: what a round's seconds are made of, in words; shown with every figure.
        fingerprint: what the figures hold for: machine, versions, target, drafter.
    """

    curves: tuple[Curve, ...]
    context: int
    block: int
    kind: str
    covers: str = WHOLE_ROUNDS
    fingerprint: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise DecodingError("cost table: " + "; ".join(problems))

    def seconds(self, requests: int) -> np.ndarray:
        """Of a whole round by tokens in the pass, [R * (g + 1) + 2]; entries below R mean nothing."""
        return _seconds(self, requests)

    def sps(self, requests: int) -> np.ndarray:
        """Passes a second by tokens in the pass, [R * (g + 1) + 2]; entries below R mean nothing."""
        return _sps(self, requests)

    def draft_seconds(self, requests: int, width: int) -> float:
        """Of proposing `width` tokens for that many requests, cut from whole blocks."""
        return self._by_requests(requests, [curve.draft_seconds[width] for curve in self.curves])

    def block_seconds(self, requests: int, length: int) -> float:
        """Of proposing blocks of `length` tokens for that many requests."""
        return self._by_requests(requests, [curve.block_seconds[length] for curve in self.curves])

    def verify_seconds(self, requests: int, width: int) -> float:
        """Of the target's pass over `width` draft tokens and the anchor of that many requests, drafting left out.

        For blocks longer than the table's own, the last two points of each curve lead on.
        """
        each = [
            max(float(_along(curve, np.array([curve.requests * (width + 1)]))[0]) - curve.draft_seconds[-1], 0.0) for curve in self.curves
        ]
        return self._by_requests(requests, each)

    def plain_seconds(self, requests: int) -> float:
        """Of a round of that many requests without a drafter."""
        return self._by_requests(requests, [curve.plain_seconds for curve in self.curves])

    def _by_requests(self, requests: int, values: Sequence[float]) -> float:
        if not requests:
            return 0.0
        low, high, weight = self._neighbours(requests)
        if low == high:
            return values[low]
        return max((1 - weight) * values[low] + weight * values[high], 0.0)

    def _neighbours(self, requests: int) -> tuple[int, int, float]:
        """Indices of the curves on both sides, and how far it is from the first to the second (below 0 or above 1 outside all)."""
        if len(self.curves) == 1:
            return 0, 0, 0.0
        counts = [curve.requests for curve in self.curves]
        high = int(np.clip(np.searchsorted(counts, requests), 1, len(counts) - 1))
        low = high - 1
        return low, high, (requests - counts[low]) / (counts[high] - counts[low])

    def differences(self, here: Mapping[str, str]) -> list[str]:
        """In what this machine and contract differ from those of the table; where anything does, the table is stale."""
        names = sorted({*self.fingerprint, *here})
        pairs = [(name, self.fingerprint.get(name, "unknown"), here.get(name, "unknown")) for name in names]
        return [f"{name}: measured with {then}, here {now}" for name, then, now in pairs if then != now]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "ThroughputTable":
        """Parse strictly.

        Raises:
            DecodingError: with `where` and the first thing that is wrong.
        """
        try:
            value = json.loads(text)
            if value.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            curves = tuple(_curve(one) for one in value.pop("curves"))
            return cls(curves, **value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DecodingError(f"{where} is not a cost table ({error}). `python -m pipelines.profile` writes one.") from error
        except DecodingError as error:
            raise DecodingError(f"{where}: {error}") from error


def _curve(value: dict[str, Any]) -> Curve:
    named: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
    return Curve(**named)


def _problems(table: ThroughputTable) -> list[str]:
    found = []
    if not table.curves:
        found.append("it has no curve")
    counts = [curve.requests for curve in table.curves]
    if counts != sorted(set(counts)):
        found.append(f"its curves' requests {counts} do not ascend")
    for curve in table.curves:
        name = f"the curve of {curve.requests} requests"
        tokens = list(curve.tokens)
        if len(tokens) != len(curve.seconds) or not tokens or tokens != sorted(set(tokens)):
            found.append(f"{name} needs ascending tokens with as many seconds")
        elif tokens[0] != curve.requests or curve.requests < 1:
            found.append(f"{name} must begin with as many tokens as requests")
        drafting = (curve.draft_seconds, curve.block_seconds)
        if any(len(values) != table.block + 1 for values in drafting):
            found.append(f"{name} needs draft_seconds and block_seconds for 0 to {table.block} tokens")
        if min([*curve.seconds, curve.plain_seconds], default=1) <= 0 or min(map(min, filter(None, drafting)), default=0) < 0:
            found.append(f"{name} has seconds that are not positive")
    return found


@lru_cache(maxsize=4096)
def _seconds(table: ThroughputTable, requests: int) -> np.ndarray:
    low, high, weight = table._neighbours(requests)
    tokens = np.arange(requests * (table.block + 1) + 2)
    if low == high:
        return _along(table.curves[0], tokens)
    share = tokens / requests
    first, second = (_along(table.curves[i], share * table.curves[i].requests) for i in (low, high))
    mixed = (1 - weight) * first + weight * second
    # A line that goes on below the smallest curve must not reach zero.
    return np.maximum(mixed, 0.1 * np.minimum(first, second))


def _along(curve: Curve, tokens: np.ndarray) -> np.ndarray:
    """Straight between the points; the last two lead on beyond them."""
    x, y = np.array(curve.tokens, dtype=np.float64), np.array(curve.seconds)
    inside = np.interp(tokens, x, y)
    if len(x) == 1:
        return inside
    slope = max((y[-1] - y[0]) / (x[-1] - x[0]), 0.0)
    return np.where(tokens > x[-1], y[-1] + slope * (tokens - x[-1]), inside)


@lru_cache(maxsize=4096)
def _sps(table: ThroughputTable, requests: int) -> np.ndarray:
    return 1 / _seconds(table, requests)


class OnlineTable:
    """A table that follows what rounds really take: neighbours on shared hardware shift it.

    Each observed round gives a ratio to the table. Ratios are kept per range of B / R, older ones fading; a range seldom seen leans on the
    ratio of all. Only past rounds are used.
    """

    RANGES = 8

    def __init__(self, table: ThroughputTable, memory: float = 50.0, lean: float = 2.0) -> None:
        """
        Args:
            memory: rounds after which an observation's weight has fallen to 1/e.
            lean: observations of a range that weigh as much as those of all ranges together.
        """
        self.table, self.lean = table, lean
        self._keep = float(np.exp(-1 / memory))
        self._weights, self._sums = np.zeros(self.RANGES), np.zeros(self.RANGES)

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """A round of that many requests and tokens took so long."""
        ratio = seconds / float(self.table.seconds(requests)[tokens])
        at = int(self._range(requests, np.array([tokens]))[0])
        self._weights *= self._keep
        self._sums *= self._keep
        self._weights[at] += 1
        self._sums[at] += ratio

    def ratios(self) -> np.ndarray:
        """[RANGES] seconds over the table's, by range of tokens per request."""
        total = self._weights.sum()
        overall = self._sums.sum() / total if total else 1.0
        return (self._sums + self.lean * overall) / (self._weights + self.lean)

    def sps(self, requests: int) -> np.ndarray:
        """As `ThroughputTable.sps`, corrected."""
        base = self.table.sps(requests)
        return base / self.ratios()[self._range(requests, np.arange(len(base)))]

    def _range(self, requests: int, tokens: np.ndarray) -> np.ndarray:
        share = (tokens / requests - 1) / (self.table.block + 1e-9)
        return np.clip((share * self.RANGES).astype(np.int64), 0, self.RANGES - 1)


def measured_points(requests: int, block: int, points: int) -> list[int]:
    """Evenly spread numbers of tokens from R to R * (g + 1), at most `points` of them, both ends included."""
    return sorted({round(value) for value in np.linspace(requests, requests * (block + 1), points)})


def measure_curve(
    target: TransformersTarget,
    drafter: Drafter,
    requests: int,
    context: int,
    points: int,
    rounds: int,
    warmup: int,
    temperature: float,
    seed: int = 0,
) -> Curve:
    """Time whole rounds on the decoder, on random text.

    Sizes come in a new random order in each pass over them, so that a machine that slows down does not bend the curve; each point is the
    median of `rounds`, after `warmup` passes.
    """
    block, vocab = drafter.config.block_length, target.vocab_size
    random = np.random.default_rng(seed)
    prompts = random.integers(0, vocab, (requests, context)).tolist()
    sizes = [_Size(block, tokens) for tokens in measured_points(requests, block, points)]
    sizes += [_Size(width, requests * (width + 1), short) for width in range(1, block) for short in (False, True)]
    meter = _Meter(requests, [sizes[i] for _ in range(rounds + warmup) for i in random.permutation(len(sizes))], warmup * len(sizes))
    plain = _Meter(requests, [_Size(0, requests)] * (rounds + warmup), warmup)
    for drawn, one in ((drafter, meter), (None, plain)):
        while one.wanted:
            # Texts start anew before they have grown far beyond the context that was asked for.
            one.until = one.done + max(context // (2 * (block + 1)), 1)
            settings = SamplingSettings(temperature, max_new_tokens=(one.until - one.done + 1) * (block + 1) + 1, seed=seed + one.done)
            with contextlib.suppress(_EnoughError):
                speculative_decode(target, drawn, prompts, settings, batch_size=requests, policy=one)
    tokens = measured_points(requests, block, points)
    whole = float(np.median([seconds for b in tokens for seconds in meter.draft[_Size(block, b)]]))

    def drafting(short: bool) -> tuple[float, ...]:
        return 0.0, *(float(np.median(meter.draft[_Size(w, requests * (w + 1), short)])) for w in range(1, block)), whole

    return Curve(
        requests,
        tuple(tokens),
        tuple(float(np.median(meter.seconds[_Size(block, b)])) for b in tokens),
        drafting(short=False),
        drafting(short=True),
        float(np.median(plain.seconds[_Size(0, requests)])),
    )


class _EnoughError(Exception):
    """Everything asked for has been measured, or texts have grown enough: leave the decoding."""


@dataclass(frozen=True)
class _Size:
    """A round: tokens drafted for each request, tokens in the pass, and whether blocks are made that short."""

    width: int
    tokens: int
    short: bool = False


class _Meter(Policy):
    """Makes rounds of given sizes, tokens spread evenly over the requests, and keeps their times."""

    def __init__(self, requests: int, sizes: list[_Size], skip: int) -> None:
        self.requests, self.wanted, self.skip = requests, sizes, skip
        self.done = self.until = 0
        self.seconds: dict[_Size, list[float]] = {}
        self.draft: dict[_Size, list[float]] = {}

    def plan(self, requests: np.ndarray, limits: np.ndarray) -> np.ndarray:
        self.shortens = self.wanted[0].short
        return np.minimum(limits, self.wanted[0].width)

    def lengths(self, requests: np.ndarray, drafted: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        extra = self.wanted[0].tokens - self.requests
        each, more = divmod(extra, self.requests)
        return np.minimum(each + (np.arange(len(requests)) < more), drafted).astype(np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        size = self.wanted.pop(0)
        if outcome.tokens == size.tokens and self.done >= self.skip:
            self.seconds.setdefault(size, []).append(outcome.seconds)
            self.draft.setdefault(size, []).append(outcome.draft_seconds)
        self.done += 1
        if not self.wanted or self.done >= self.until:
            raise _EnoughError


def as_record(table: ThroughputTable) -> dict[str, Any]:
    """For result files: points, and which part of a round drafting takes."""
    return {
        "kind": table.kind,
        "covers": table.covers,
        "context": table.context,
        "curves": [
            {**asdict(curve), "draft_share": curve.draft_seconds[-1] / curve.seconds[-1] if curve.seconds[-1] else None}
            for curve in table.curves
        ],
    }
