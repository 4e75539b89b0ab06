"""Sequential Temperature Scaling of a drafter's confidences, and how far any probability is from what happens (DSpark paper, section 4).

Everything is about the *survival* of a draft prefix: a_k = prod_{i<=k} sigmoid(logit(c_i) / T_i), with the label "positions 1..k were all
accepted". Each T_k is positive, so the order of c_k at a position is kept; products of several positions may change places.
"""

from dataclasses import dataclass

import numpy as np

from decoding.rounds import RecordedRounds

BINS = 20
_SMALLEST = 2.0**-52  # a confidence of exactly 0 or 1 has no finite logit
_GRID = np.exp(np.linspace(-np.log(10), np.log(10), 61))  # temperatures 0.1 to 10; the middle one is 1
_REFINEMENTS, _FINER = 3, 21  # each refinement looks between the best temperature's neighbours


def logit(confidence: np.ndarray) -> np.ndarray:
    """log(c / (1 - c)), finite for every c in [0, 1]."""
    inside = np.clip(confidence, _SMALLEST, 1 - _SMALLEST)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1 + small)


@dataclass(frozen=True)
class Calibrator:
    """One temperature for each draft position.

    Attributes:
        temperatures: T_1..T_g, positive; 1 leaves a confidence as it is.
    """

    temperatures: tuple[float, ...]

    def conditional(self, confidence: np.ndarray) -> np.ndarray:
        """Calibrated c_k for confidences [..., w], w <= g: probability of acceptance, given all before were."""
        temperatures = np.array(self.temperatures)[: confidence.shape[-1]]
        return sigmoid(logit(confidence) / temperatures)

    def survival(self, confidence: np.ndarray) -> np.ndarray:
        """a_k [..., w]: probability that positions 1..k are all accepted; never rises with k."""
        return np.cumprod(self.conditional(confidence), axis=-1)

    @classmethod
    def identity(cls, block: int) -> "Calibrator":
        """Confidences as the drafter gives them."""
        return cls((1.0,) * block)


def expected_calibration_error(probabilities: np.ndarray, happened: np.ndarray, bins: int = BINS) -> float:
    """ECE: sum over equal-width bins of (share of the bin) * |mean probability - rate|.

    Args:
        probabilities: [N] in [0, 1].
        happened: [N] bool.
        bins: of width 1 / bins; a value on an edge belongs to the upper bin, 1 to the last.

    Returns:
        NaN where there is nothing.
    """
    if not len(probabilities):
        return float("nan")
    gap = np.bincount(_bin(probabilities, bins), weights=probabilities - happened, minlength=bins)
    return float(np.abs(gap).sum() / len(probabilities))


def brier_score(probabilities: np.ndarray, happened: np.ndarray) -> float:
    """Mean squared distance of probability and outcome; NaN where there is nothing."""
    return float(np.mean((probabilities - happened) ** 2)) if len(probabilities) else float("nan")


def auroc(scores: np.ndarray, happened: np.ndarray) -> float:
    """Probability that a case that happened scores above one that did not, ties counting half; NaN where one kind is missing."""
    positive = int(happened.sum())
    negative = len(happened) - positive
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # from 1, equal scores sharing their mean rank
    return float((ranks[happened].sum() - positive * (positive + 1) / 2) / (positive * negative))


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: for each bin how many cases, their mean probability and the rate at which they happened (NaN if empty)."""

    counts: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray


def reliability(probabilities: np.ndarray, happened: np.ndarray, bins: int = BINS) -> Reliability:
    """Sort cases ([N] probabilities, [N] bool) into equal-width bins."""
    index = _bin(probabilities, bins)
    counts = np.bincount(index, minlength=bins)
    divisor = np.where(counts, counts, np.nan)
    return Reliability(
        counts,
        np.bincount(index, weights=probabilities, minlength=bins) / divisor,
        np.bincount(index, weights=happened.astype(np.float64), minlength=bins) / divisor,
    )


@dataclass(frozen=True)
class NoiseFloor:
    """The ECE that a perfect calibrator shows by chance: mean, and the value that it exceeds once in twenty times."""

    mean: float
    high: float


def noise_floor(probabilities: np.ndarray, bins: int = BINS, draws: int = 100, seed: int = 0) -> NoiseFloor:
    """Simulate outcomes that these very probabilities [N] are true of, and take their ECE."""
    if not len(probabilities):
        return NoiseFloor(float("nan"), float("nan"))
    random = np.random.default_rng(seed)
    errors = [expected_calibration_error(probabilities, random.random(len(probabilities)) < probabilities, bins) for _ in range(draws)]
    return NoiseFloor(float(np.mean(errors)), float(np.quantile(errors, 0.95)))


def fit_temperatures(confidence: np.ndarray, survived: np.ndarray, tried: np.ndarray, bins: int = BINS) -> Calibrator:
    """Sequential Temperature Scaling: position by position, earlier ones fixed, the T_k with the least ECE of the cumulative product.

    A logarithmic grid from 0.1 to 10, then finer grids around the best; of equal errors the one nearest to 1 wins.

    Args:
        confidence: [N, g] c_k in [0, 1]; anything where not tried.
        survived: [N, g] bool, positions 1..k were all accepted.
        tried: [N, g] bool, the position was verified. A position without any trial keeps T = 1.
        bins: of the ECE.
    """
    logits = logit(np.where(tried, confidence, 0.5))
    before = np.ones(len(logits))
    temperatures = []
    for k in range(logits.shape[1]):
        rows = tried[:, k]
        best = _best_temperature(before[rows], logits[rows, k], survived[rows, k], bins) if rows.any() else 1.0
        before = before * sigmoid(logits[:, k] / best)
        temperatures.append(best)
    return Calibrator(tuple(temperatures))


def _best_temperature(before: np.ndarray, logits: np.ndarray, survived: np.ndarray, bins: int) -> float:
    def error(temperature: float) -> tuple[float, float]:
        ece = expected_calibration_error(before * sigmoid(logits / temperature), survived, bins)
        return round(ece, 12), abs(float(np.log(temperature)))  # rounded, so that equal errors are equal

    grid = _GRID
    for _ in range(1 + _REFINEMENTS):
        at = min(range(len(grid)), key=lambda i: error(float(grid[i])))
        best = float(grid[at])
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
        grid = np.unique(np.append(np.geomspace(low, high, _FINER), best))
    return best


@dataclass(frozen=True)
class PositionQuality:
    """One draft position before (as the drafter says) and after calibration; the label is that the prefix survived.

    Attributes:
        position: from 1.
        trials: rounds that verified it.
        rate: share in which the prefix survived.
        floor: ECE of a perfect calibrator at this number of rounds, with the calibrated probabilities.
    """

    position: int
    trials: int
    rate: float
    ece_before: float
    ece_after: float
    floor: NoiseFloor
    auroc_before: float
    auroc_after: float
    brier_before: float
    brier_after: float


def position_quality(rounds: RecordedRounds, calibrator: Calibrator, bins: int = BINS) -> list[PositionQuality]:
    """Measure a calibrator on rounds that it was not fitted to."""
    tried, survived = rounds.tried, rounds.survived
    confidence = np.where(tried, rounds.confidence, 0.5)
    before, after = Calibrator.identity(rounds.block).survival(confidence), calibrator.survival(confidence)
    found = []
    for k in range(rounds.block):
        rows = tried[:, k]
        raw, scaled, happened = before[rows, k], after[rows, k], survived[rows, k]
        found.append(
            PositionQuality(
                position=k + 1,
                trials=int(rows.sum()),
                rate=float(happened.mean()) if len(happened) else float("nan"),
                ece_before=expected_calibration_error(raw, happened, bins),
                ece_after=expected_calibration_error(scaled, happened, bins),
                floor=noise_floor(scaled, bins, seed=k),
                auroc_before=auroc(raw, happened),
                auroc_after=auroc(scaled, happened),
                brier_before=brier_score(raw, happened),
                brier_after=brier_score(scaled, happened),
            )
        )
    return found


@dataclass(frozen=True)
class MeanQuality:
    """Means over the positions that were tried: of the ECE before and after, of a perfect calibrator's, and of what it seldom exceeds."""

    rounds: int
    ece_before: float
    ece_after: float
    floor: float
    floor_high: float


def mean_quality(rounds: int, positions: list[PositionQuality]) -> MeanQuality:
    """Average over positions; NaN where none was tried."""
    had = [one for one in positions if one.trials]

    def mean(values: list[float]) -> float:
        return float(np.mean(values)) if values else float("nan")

    return MeanQuality(
        rounds,
        mean([one.ece_before for one in had]),
        mean([one.ece_after for one in had]),
        mean([one.floor.mean for one in had]),
        mean([one.floor.high for one in had]),
    )


def drifting(quality: MeanQuality, tolerance: float = 0.01) -> bool:
    """Whether a domain's error is more than chance explains, by more than `tolerance`: the temperatures do not fit it."""
    return bool(quality.ece_after > quality.floor_high + tolerance)


def _bin(probabilities: np.ndarray, bins: int) -> np.ndarray:
    return np.minimum((probabilities * bins).astype(np.int64), bins - 1)
