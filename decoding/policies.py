"""Verification policies: how many tokens to draft for each request, and how many of them to have verified.

A policy may decide over slot k of a request from confidences up to slot k and from past rounds, never from what was drafted after it: then
the output keeps the target's distribution (see `decoding.scheduler`). Every policy of this file does so.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decoding.calibration import Calibrator
from decoding.errors import DecodingError
from decoding.scheduler import above_threshold, capacity, throughput_optimal, top_prefixes

log = logging.getLogger(__name__)


class Costs(Protocol):
    """What a pass costs: `decoding.throughput.ThroughputTable`, or one that learns online."""

    def sps(self, requests: int) -> np.ndarray:
        """Passes a second with that many requests, by tokens in the pass (entries below `requests` mean nothing)."""


@dataclass(frozen=True)
class RoundOutcome:
    """What a round of the whole batch made of a policy's decisions.

    Attributes:
        requests: [R] numbers of the requests.
        drafted: [R] tokens drafted for each.
        verified: [R] of them sent to the target.
        accepted: [R] of them accepted.
        confidence: [R, w] of the drafted tokens; None where there is none.
        seconds: of the whole round, drafting included.
        draft_seconds: of them spent proposing.
    """

    requests: np.ndarray
    drafted: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray | None
    seconds: float
    draft_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in the target's pass: an anchor for each request, and what was verified."""
        return len(self.requests) + int(self.verified.sum())


class Policy:
    """Draft and verify whole blocks; the base of all others.

    Attributes:
        name: for tables and figures.
        needs_confidence: the drafter must have a confidence head.
        shortens: blocks are made as long as what is drafted, rather than cut from whole ones. That is cheaper, but slots see each other,
            so it is another draft.
    """

    name = "full block"
    needs_confidence = False
    shortens = False

    def begin(self) -> None:
        """A new batch starts: requests are numbered anew."""

    def plan(self, requests: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Tokens to draft for each request ([R] int, at most `limits`), from past rounds only."""
        return limits

    def lengths(self, requests: np.ndarray, drafted: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        """Tokens to verify for each request.

        Args:
            requests: [R] numbers of the requests.
            drafted: [R] how many tokens were drafted for each; the bound.
            confidence: [R, w] float64, as the drafter gave it; None without a confidence head or where nothing was drafted.
        """
        return drafted

    def observe(self, outcome: RoundOutcome) -> None:
        """What came of the round."""


class StaticLength(Policy):
    """The same number of tokens for every request; 1 is how MTP-1 is served."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise DecodingError(f"static length {length} is below 0. Use 0 to draft nothing.")
        self.length, self.name = length, f"static {length}"

    def plan(self, requests: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return np.minimum(limits, self.length)


class BlockLength(StaticLength):
    """Blocks made with fewer slots than the drafter was trained for: how their acceptance is measured."""

    shortens = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.name = f"blocks of {length}"


class Threshold(Policy):
    """Up to the first token whose calibrated conditional confidence lies below a threshold."""

    needs_confidence = True

    def __init__(self, threshold: float, calibrator: Calibrator) -> None:
        if not 0 <= threshold <= 1:
            raise DecodingError(f"threshold {threshold} is not a probability. Use a value in [0, 1].")
        self.threshold, self.calibrator, self.name = threshold, calibrator, f"threshold {threshold:g}"

    def lengths(self, requests: np.ndarray, drafted: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        if confidence is None:
            return drafted
        return above_threshold(self.calibrator.conditional(confidence), drafted, self.threshold)


class HardwareAware(Policy):
    """Algorithm 1: admit tokens by falling survival while throughput rises. Without a cost table whole blocks are verified."""

    name = "algorithm 1"
    needs_confidence = True

    def __init__(self, calibrator: Calibrator, costs: Costs | None) -> None:
        self.calibrator, self.costs = calibrator, costs
        self._told = False

    def lengths(self, requests: np.ndarray, drafted: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        if self.costs is None:
            self._say_inactive()
            return drafted
        if confidence is None:
            return drafted
        return self.choose(requests, drafted, self.calibrator.survival(confidence), self.costs.sps(len(requests)))

    def choose(self, requests: np.ndarray, drafted: np.ndarray, survival: np.ndarray, sps: np.ndarray) -> np.ndarray:
        """[R] lengths from calibrated survivals and the cost of a pass."""
        return throughput_optimal(survival, drafted, sps)

    def _say_inactive(self) -> None:
        """Once."""
        if not self._told:
            self._told = True
            log.warning(
                "%s is inactive: no cost table. Whole blocks are verified; measure one with `python -m pipelines.profile`.", self.name
            )

    def observe(self, outcome: RoundOutcome) -> None:
        learn = getattr(self.costs, "observe", None)
        # The table holds rounds that draft for everyone.
        if learn is not None and bool((outcome.drafted > 0).all()):
            learn(len(outcome.requests), outcome.tokens, outcome.seconds)


class Asynchronous(HardwareAware):
    """For engines that must size a step before its confidences are known.

    The number K of draft tokens in all comes from the confidences of two steps ago, by a search over the whole jagged cost table; which K
    tokens comes from the present ones, the likeliest first. A request that was not there two steps ago counts in the search as the mean of
    those that were. In the first two steps nothing is known, and whole blocks are verified. K thus hangs on past rounds alone.
    """

    name = "asynchronous"

    def __init__(self, calibrator: Calibrator, costs: Costs | None) -> None:
        super().__init__(calibrator, costs)
        self._past: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=3)

    def begin(self) -> None:
        self._past.clear()

    def choose(self, requests: np.ndarray, drafted: np.ndarray, survival: np.ndarray, sps: np.ndarray) -> np.ndarray:
        self._past.append((requests, survival))
        if len(self._past) < 3:
            return drafted
        past = _as_of(*self._past[0], requests, survival.shape[1])
        return top_prefixes(survival, drafted, capacity(past, drafted, sps))


def _as_of(then: np.ndarray, survival: np.ndarray, now: np.ndarray, width: int) -> np.ndarray:
    """[R, width] survivals that the requests `now` had `then`; the mean of all for those that were not there, 0 past what was drafted."""
    fitted = np.zeros((len(then), width))
    fitted[:, : survival.shape[1]] = survival[:, :width]
    order = np.argsort(then)
    place = np.minimum(np.searchsorted(then, now, sorter=order), len(then) - 1)
    rows = order[place]
    return np.where((then[rows] == now)[:, None], fitted[rows], fitted.mean(0))
