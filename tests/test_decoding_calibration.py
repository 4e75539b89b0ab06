"""Sequential Temperature Scaling and the measures beside it, held against plain loops and against data whose truth is known."""

import math

import numpy as np
import pytest

from decoding.calibration import (
    Calibrator,
    auroc,
    brier_score,
    drifting,
    expected_calibration_error,
    fit_temperatures,
    logit,
    mean_quality,
    noise_floor,
    position_quality,
    reliability,
    sigmoid,
)
from decoding.errors import DecodingError
from decoding.rounds import RecordedRounds
from decoding.settings import Generation, Round, Seconds


def synthetic(rounds, temperatures, seed=0, spread=1.2, mean=0.8):
    """Rounds of a drafter whose logits are `temperatures` times too large: (confidence, survived, tried, true logits)."""
    random = np.random.default_rng(seed)
    true = random.normal(mean, spread, (rounds, len(temperatures)))
    accepted = random.random(true.shape) < 1 / (1 + np.exp(-true))
    return sigmoid(true * temperatures), np.cumprod(accepted, axis=1).astype(bool), np.ones(true.shape, bool), true


def naive_ece(probabilities, happened, bins):
    cases = [[] for _ in range(bins)]
    for p, y in zip(probabilities, happened, strict=True):
        cases[min(int(p * bins), bins - 1)].append((p, y))
    total = 0.0
    for inside in cases:
        if inside:
            total += len(inside) * abs(sum(p for p, _ in inside) / len(inside) - sum(y for _, y in inside) / len(inside))
    return total / len(probabilities)


@pytest.mark.parametrize("bins", [1, 5, 20])
def test_ece_is_the_textbooks(bins):
    random = np.random.default_rng(bins)
    p, y = random.random(300), random.random(300) < 0.4
    p[:3] = [0.0, 1.0, 0.5]
    assert expected_calibration_error(p, y, bins) == pytest.approx(naive_ece(p.tolist(), y.tolist(), bins), abs=1e-12)
    diagram = reliability(p, y, bins)
    assert diagram.counts.sum() == 300
    filled = diagram.counts > 0
    by_bins = (diagram.counts * np.abs(diagram.predicted - diagram.observed))[filled].sum() / 300
    assert by_bins == pytest.approx(expected_calibration_error(p, y, bins))


def test_auroc_counts_pairs():
    random = np.random.default_rng(1)
    scores, happened = random.integers(0, 12, 80) / 12, random.random(80) < 0.3
    wins = [(a > b) + 0.5 * (a == b) for a in scores[happened] for b in scores[~happened]]
    assert auroc(scores, happened) == pytest.approx(np.mean(wins))
    assert math.isnan(auroc(scores, np.ones(80, bool)))


def test_brier_score():
    assert brier_score(np.array([0.0, 1.0, 0.5]), np.array([False, True, True])) == pytest.approx(0.25 / 3)


@pytest.mark.parametrize("seed", range(4))
def test_no_temperature_of_a_fine_grid_does_much_better(seed):
    """Left to right by brute force in plain Python, on a case small enough for it."""
    confidence, survived, tried, _ = synthetic(60, [2.0, 0.6, 1.5], seed)
    tried[seed::7, 2] = False
    fitted = fit_temperatures(confidence, survived, tried, bins=5)
    before = [1.0] * 60
    for k, temperature in enumerate(fitted.temperatures):
        rows = [n for n in range(60) if tried[n, k]]

        def survival(t, rows=rows, before=before, k=k):
            return [before[n] / (1 + math.exp(-math.log(confidence[n, k] / (1 - confidence[n, k])) / t)) for n in rows]

        labels = [bool(survived[n, k]) for n in rows]
        errors = [naive_ece(survival(math.exp(e / 30 * math.log(10) - math.log(10))), labels, 5) for e in range(61)]
        ours = naive_ece(survival(temperature), labels, 5)
        assert ours <= min(errors) + 1e-9
        product = survival(temperature, rows=range(60))
        before = product


def test_known_temperatures_are_found():
    """Overconfident by known factors; 40,000 rounds find them within 15 %, that of the first position within 5 %."""
    truth = [1.8, 2.2, 1.4, 3.0]
    confidence, survived, tried, _ = synthetic(40_000, truth)
    fitted = np.array(fit_temperatures(confidence, survived, tried).temperatures)
    assert fitted[0] == pytest.approx(truth[0], rel=0.05)
    assert fitted == pytest.approx(truth, rel=0.15)
    fresh = synthetic(40_000, truth, seed=1)
    calibrated = Calibrator(tuple(fitted)).survival(fresh[0])
    for k in range(4):
        before = expected_calibration_error(np.cumprod(fresh[0], axis=1)[:, k], fresh[1][:, k])
        after = expected_calibration_error(calibrated[:, k], fresh[1][:, k])
        floor = noise_floor(np.cumprod(sigmoid(fresh[3]), axis=1)[:, k])
        assert before > 0.05
        assert after < floor.high + 0.01


def test_what_is_calibrated_stays_nearly_as_it_is():
    confidence, survived, tried, _ = synthetic(40_000, [1.0, 1.0])
    assert np.array(fit_temperatures(confidence, survived, tried).temperatures) == pytest.approx([1, 1], rel=0.1)


def test_the_order_at_a_position_is_kept():
    random = np.random.default_rng(3)
    confidence = np.sort(random.random((500, 3)), axis=0)
    for temperatures in [(0.1, 1.0, 10.0), (3.0, 0.2, 0.5)]:
        calibrated = Calibrator(temperatures).conditional(confidence)
        assert (np.diff(calibrated, axis=0) >= 0).all()
        assert len(np.unique(calibrated[:, 0].round(12))) > 400, "kept, not flattened"
        survival = Calibrator(temperatures).survival(confidence)
        assert (np.diff(survival, axis=1) <= 0).all()
        assert survival == pytest.approx(np.cumprod(calibrated, axis=1))


def test_certainty_has_a_finite_logit():
    assert np.isfinite(logit(np.array([0.0, 1.0]))).all()
    assert Calibrator((2.0, 2.0)).survival(np.array([1.0, 0.0])) == pytest.approx([1, 0], abs=1e-6)


def test_a_position_without_trials_keeps_its_confidence():
    confidence, survived, tried, _ = synthetic(200, [2.0, 2.0])
    tried[:, 1] = False
    confidence[:, 1] = np.nan
    assert fit_temperatures(confidence, survived, tried).temperatures[1] == 1.0


def test_the_noise_floor_falls_with_the_rounds():
    random = np.random.default_rng(0)
    p = sigmoid(random.normal(0, 1.5, 10_000))
    few, many = noise_floor(p[:2000]), noise_floor(p)
    assert 1.8 < few.mean / many.mean < 2.7  # as the square root of five
    errors = [expected_calibration_error(p, random.random(10_000) < p) for _ in range(60)]
    assert many.mean == pytest.approx(np.mean(errors), rel=0.1)
    assert np.mean(np.array(errors) > many.high) < 0.25


def generation(rounds):
    return Generation([0] * (1 + sum(r.committed for r in rounds)), rounds, "length", Seconds(0, 0, 0, 0, 0))


def recorded():
    first = [Round(3, 2, 3, (0.9, 0.8, 0.1)), Round(3, 1, 1, (0.7, 0.6, 0.5)), Round(0, 0, 1)]
    second = [Round(2, 2, 3, (0.5, 0.4))]
    return RecordedRounds.from_generations([generation(first), generation(second)], 3, [7, 9], ["math", "chat"], [11, 12], {"run": "x"})


def test_rounds_become_trials():
    rounds = recorded()
    assert rounds.request.tolist() == [0, 0, 0, 1]
    assert rounds.tried.tolist() == [
        [True] * 3,
        [True, False, False],
        [False] * 3,
        [True, True, False],
    ]  # the second round ended in its draft
    assert rounds.survived.tolist() == [[True, True, False], [True, False, False], [False] * 3, [True, True, False]]
    assert np.isnan(rounds.confidence[3, 2])


def test_recorded_rounds_come_back_from_their_file():
    rounds = RecordedRounds.joined([recorded(), recorded()])
    assert rounds.request.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    back = RecordedRounds.from_bytes(rounds.to_bytes(), "here")
    for name in ("request", "drafted", "verified", "accepted", "committed", "confidence", "prompt", "domain", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(back, name), getattr(rounds, name))
    assert back.facts == {"run": "x"}
    for torn in (b"", rounds.to_bytes()[:-40], b"something else"):
        with pytest.raises(DecodingError, match="here holds no recorded rounds"):
            RecordedRounds.from_bytes(torn, "here")


def as_recorded(confidence, survived, domain):
    count, block = confidence.shape
    accepted = survived.sum(1)
    full = np.full(count, block)
    return RecordedRounds(
        np.arange(count), full, full, accepted, accepted + 1, confidence, np.arange(count), np.array(domain), np.full(count, 5)
    )


def test_a_domain_that_the_temperatures_do_not_fit_is_told():
    ours, theirs = synthetic(6000, [2.0, 2.0]), synthetic(6000, [0.5, 0.5], seed=5)
    calibrator = fit_temperatures(*ours[:3])
    qualities = []
    for confidence, survived, _, _ in (synthetic(6000, [2.0, 2.0], seed=9), theirs):
        rounds = as_recorded(confidence, survived, ["d"] * 6000)
        positions = position_quality(rounds, calibrator)
        assert [one.trials for one in positions] == [6000, 6000]
        assert positions[0].rate == pytest.approx(survived[:, 0].mean())
        assert positions[0].auroc_after == pytest.approx(positions[0].auroc_before)  # one position alone keeps its order
        qualities.append(mean_quality(len(rounds), positions))
    assert qualities[0].ece_after < qualities[0].ece_before
    assert not drifting(qualities[0])
    assert drifting(qualities[1])
