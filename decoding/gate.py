"""The draft gate: every request pays for drafting, even where little will be accepted; so decide first whether to draft, and how much.

Decisions are made from past rounds alone, hence lossless whatever policy then decides over verification.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from decoding.calibration import Calibrator
from decoding.policies import Policy, RoundOutcome
from decoding.rounds import RecordedRounds

MEMORY = 8.0
"""Observations of a request after which one's weight has fallen to 1/e."""


class DraftCosts(Protocol):
    """What whole rounds and their drafting cost: `decoding.throughput.ThroughputTable`."""

    def seconds(self, requests: int) -> np.ndarray:
        """Of a round that drafts whole blocks for all, by tokens in the target's pass."""

    def plain_seconds(self, requests: int) -> float:
        """Of a round without a draft."""

    def block_seconds(self, requests: int, length: int) -> float:
        """Of drafting blocks of `length` tokens for that many requests."""


class DraftGate(Policy):
    """Draft for those requests, and so many tokens, that expected throughput is highest; verification is the inner policy's.

    For some shares of the batch (those with the highest expected gain first) and some block lengths, the expected throughput is worked out
    from the cost table, verification sized as the capacity search would. A shorter block is made with fewer slots, which costs less and
    is another draft, since slots see each other: its survival is the whole block's times a ratio that was measured, and a length that was
    not measured is never chosen. Requests that are passed over are tried with the shortest block now and then, so that they can recover: as
    often as a stated share of the time pays for.
    """

    needs_confidence = True
    shortens = True
    SHARES = (0.25, 0.5, 0.75, 1.0)

    def __init__(
        self,
        inner: Policy,
        calibrator: Calibrator,
        costs: DraftCosts,
        prior: np.ndarray,
        shorter: Mapping[int, np.ndarray] | None = None,
        trust: float = 1.0,
        memory: float = MEMORY,
        probing: float = 0.02,
    ) -> None:
        """
        Args:
            prior: [g] survival that a request is credited with before anything is known of it.
            shorter: by block length w below g, [w] measured survival of such blocks over that of whole ones. None: only whole blocks.
            trust: how much of a request's deviation from the prior to believe, see `trust_in_past`.
            memory: as `MEMORY`.
            probing: share of the time that may go into trying requests that are passed over.
        """
        self.inner, self.calibrator, self.costs = inner, calibrator, costs
        self.name = f"gate + {inner.name}"
        self.prior, self.trust, self.blend = np.asarray(prior, dtype=np.float64), trust, _blend(memory)
        self.probing, self._saved = probing, 0.0  # seconds that may be spent so by now
        self.ratios = {**(shorter or {}), len(self.prior): np.ones_like(self.prior)}
        self._lengths = list(self.ratios)
        self._scale = np.zeros((len(self._lengths), len(self.prior)))  # [lengths, g] of a block's survival over a whole one's
        for row, length in enumerate(self._lengths):
            self._scale[row, :length] = self.ratios[length]
        self._priced: dict[int, tuple[float, np.ndarray, np.ndarray, np.ndarray]] = {}
        self._known: dict[int, np.ndarray] = {}  # by request [g], running mean of its calibrated survival, as of whole blocks

    def begin(self) -> None:
        self._known.clear()
        self.inner.begin()

    def plan(self, requests: np.ndarray, limits: np.ndarray) -> np.ndarray:
        limits = self.inner.plan(requests, limits)
        known = [self._known.setdefault(request, self.prior.copy()) for request in requests.tolist()]
        expected = self.prior + self.trust * (np.stack(known) - self.prior)
        survival = np.where(np.arange(len(self.prior)) < limits[:, None], expected, 0.0)
        widths = np.minimum(self._best(survival), limits)
        idle = (widths == 0) & (limits > 0)
        return np.where(idle, np.minimum(limits, self._probe(len(requests), int(idle.sum()))), widths)

    def _probe(self, requests: int, idle: int) -> int:
        """Tokens to draft for those that are passed over: 0, or the shortest block once there is time for it."""
        if not idle:
            return 0
        shortest = min(self._lengths)
        plain, _, seconds, _ = self._prices(requests)
        self._saved += self.probing * plain
        price = self.costs.block_seconds(idle, shortest) + seconds[idle * shortest] - plain
        if self._saved < price:
            return 0
        self._saved -= price
        return shortest

    def lengths(self, requests: np.ndarray, drafted: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        return self.inner.lengths(requests, drafted, confidence)

    def observe(self, outcome: RoundOutcome) -> None:
        self.inner.observe(outcome)
        if outcome.confidence is None:
            return
        survival = self.calibrator.survival(outcome.confidence)
        for row, (request, drafted) in enumerate(zip(outcome.requests.tolist(), outcome.drafted.tolist(), strict=True)):
            if drafted:
                mean = self._known[request][:drafted]
                mean += self.blend * (self._as_whole(survival[row, :drafted]) - mean)

    def _as_whole(self, survival: np.ndarray) -> np.ndarray:
        """What the survival of one block says of whole ones. Near the end of a text blocks may have a length that was not measured."""
        ratio = self.ratios.get(len(survival), 1.0)
        return np.minimum(np.divide(survival, ratio, out=np.ones_like(survival), where=np.greater(ratio, 0)), 1.0)

    def _best(self, survival: np.ndarray) -> np.ndarray:
        """[R] block lengths with the highest expected throughput; all 0 where drafting does not pay at all."""
        requests, block = survival.shape
        plain, counts, seconds, drafting = self._prices(requests)
        order = np.argsort(-survival.sum(1), kind="stable")
        # All choices at once, [counts, lengths, R, g]: every round pays for this search.
        values = np.minimum(survival[order] * self._scale[:, None], 1.0)
        values = np.where((np.arange(requests) < counts[:, None])[:, None, :, None], values, 0.0)
        falling = -np.sort(-values.reshape(-1, requests * block), axis=1)
        rate = np.where(falling > 0, (requests + falling.cumsum(1)) / (seconds[1 : 1 + requests * block] + drafting[:, None]), 0.0)
        highest = rate.max(1)
        best, chosen = int(highest.argmax()), np.zeros(requests, dtype=np.int64)
        if highest[best] > requests / plain:
            count, length = divmod(best, len(self._lengths))
            chosen[order[: counts[count]]] = self._lengths[length]
        return chosen

    def _prices(self, requests: int) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        """For that many requests: seconds of a round without a draft; how many of them may be drafted for; seconds of the target's pass by
        draft tokens in it; seconds of drafting by count and length.
        """
        if requests not in self._priced:
            counts = sorted({max(round(share * requests), 1) for share in self.SHARES})
            seconds = self.costs.seconds(requests)[requests:] - self.costs.block_seconds(requests, len(self.prior))
            drafting = [self.costs.block_seconds(count, length) for count in counts for length in self._lengths]
            self._priced[requests] = self.costs.plain_seconds(requests), np.array(counts), seconds, np.array(drafting)
        return self._priced[requests]


def trust_in_past(rounds: RecordedRounds, calibrator: Calibrator, prior: np.ndarray, memory: float = MEMORY) -> float:
    """How much of what a request's past confidences promise above or below the prior comes true: 0 nothing, 1 all of it.

    Confidences err, most of all on prompts other than those they were calibrated on, and a request's past says little of its future. A
    gate that believes all of it drafts where drafting does not pay. By least squares over whole blocks of all positions.
    """
    survival = calibrator.survival(np.nan_to_num(rounds.confidence))
    whole = np.flatnonzero((rounds.drafted == rounds.block) & (rounds.verified == rounds.block))
    survived, request, mean, blend = rounds.survived, -1, prior, _blend(memory)
    promised, came = np.zeros((2, len(whole), rounds.block))
    for row, at in enumerate(whole):
        if rounds.request[at] != request:
            request, mean = int(rounds.request[at]), prior
        promised[row], came[row] = mean - prior, survived[at] - prior
        mean = mean + blend * (survival[at] - mean)
    spread = float((promised * promised).sum())
    return float(np.clip((promised * came).sum() / spread, 0, 1)) if spread else 1.0


def _blend(memory: float) -> float:
    return 1 - float(np.exp(-1 / memory))
