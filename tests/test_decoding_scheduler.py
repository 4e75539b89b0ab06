"""The scheduler against every possible allocation, against the algorithm in plain loops, and against the paper's counterexample."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.scheduler import above_threshold, capacity, throughput_optimal, top_prefixes

FULL = 99


def random_survival(random, requests, block):
    return np.cumprod(random.uniform(0.2, 1.0, (requests, block)), axis=1)


def affine(alpha, beta, most):
    """Passes a second where a pass over B tokens takes alpha + beta * B: throughput has one peak along falling survival."""
    return 1 / (alpha + beta * np.arange(most + 2))


def jagged(random, most):
    """A falling curve with cliffs, as of kernels whose tiles fill up."""
    tokens = np.arange(most + 2)
    return 1 / (1 + 0.05 * tokens + 0.3 * (tokens // random.integers(2, 5)))


def theta(survival, lengths, sps):
    chosen = sum(survival[r, :n].sum() for r, n in enumerate(lengths))
    return (len(survival) + chosen) * sps[len(survival) + sum(lengths)]


def algorithm_1(survival, limits, sps):
    """As printed, one candidate after the other."""
    order = [(-survival[r, j], j, r) for r in range(len(survival)) for j in range(min(survival.shape[1], limits[r])) if survival[r, j] > 0]
    lengths, tau, batch = [0] * len(survival), float(len(survival)), len(survival)
    best = tau * sps[batch]
    for negative, j, r in sorted(order):
        tau, batch = tau - negative, batch + 1
        if tau * sps[batch] <= best:
            break
        best = tau * sps[batch]
        lengths[r] = j + 1
    return lengths


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_best_of_all_allocations_where_throughput_has_one_peak(seed):
    random = np.random.default_rng(seed)
    requests, block = int(random.integers(1, 4)), int(random.integers(1, 5))
    survival, limits = random_survival(random, requests, block), random.integers(0, block + 1, requests)
    sps = affine(random.uniform(0.5, 20), random.uniform(0.1, 3), requests * (block + 1))
    best = max(theta(survival, lengths, sps) for lengths in itertools.product(*[range(limit + 1) for limit in limits]))
    chosen = throughput_optimal(survival, limits, sps)
    assert theta(survival, chosen, sps) == pytest.approx(best)
    assert theta(survival, top_prefixes(survival, limits, capacity(survival, limits, sps)), sps) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_the_capacity_search_finds_the_best_over_a_jagged_table(seed):
    random = np.random.default_rng(seed)
    survival, limits = random_survival(random, 3, 3), np.full(3, 3)
    sps = jagged(random, 12)
    best = max(theta(survival, lengths, sps) for lengths in itertools.product(range(4), repeat=3))
    assert theta(survival, top_prefixes(survival, limits, capacity(survival, limits, sps)), sps) == pytest.approx(best)


survivals = st.integers(1, 6).flatmap(
    lambda block: st.lists(
        # Quarters, so that equal survivals, ones and zeros are common.
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=block, max_size=block),
        min_size=1,
        max_size=8,
    )
)


@given(survivals, st.integers(0, 10_000))
def test_vectorized_equals_the_algorithm_as_printed(conditional, seed):
    random = np.random.default_rng(seed)
    survival = np.cumprod(np.array(conditional), axis=1)
    limits = random.integers(0, survival.shape[1] + 1, len(survival))
    for sps in (affine(4, 1, survival.size + len(survival)), jagged(random, survival.size + len(survival))):
        assert throughput_optimal(survival, limits, sps).tolist() == algorithm_1(survival, limits, sps)


@given(survivals, st.integers(0, 60), st.integers(0, 10_000))
def test_budgets_are_respected_and_prefixes_are_the_likeliest(conditional, count, seed):
    survival = np.cumprod(np.array(conditional), axis=1)
    limits = np.random.default_rng(seed).integers(0, survival.shape[1] + 1, len(survival))
    lengths = top_prefixes(survival, limits, count)
    assert ((lengths >= 0) & (lengths <= limits)).all()
    open_ = [survival[r, j] for r in range(len(survival)) for j in range(limits[r]) if survival[r, j] > 0]
    assert lengths.sum() == min(count, len(open_))
    taken = [survival[r, j] for r in range(len(survival)) for j in range(lengths[r])]
    assert sorted(taken, reverse=True) == sorted(open_, reverse=True)[: len(taken)]
    more = top_prefixes(survival, limits, count + 1)
    assert (more >= lengths).all()


@given(survivals, st.integers(0, 10_000))
def test_a_decision_never_depends_on_what_was_drafted_later(conditional, seed):
    """Lossless: whether position j is verified stays the same whatever the confidences after j are."""
    random = np.random.default_rng(seed)
    conditional = np.array(conditional)
    requests, block = conditional.shape
    sps, limits = jagged(random, conditional.size + requests), np.full(requests, block)
    row, after = random.integers(requests), random.integers(block)
    other = conditional.copy()
    other[row, after + 1 :] = random.choice([0.0, 0.25, 0.5, 0.75, 1.0], block - after - 1)
    first, second = np.cumprod(conditional, axis=1), np.cumprod(other, axis=1)
    for rule in (
        lambda a: throughput_optimal(a, limits, sps),
        lambda a: top_prefixes(a, limits, int(seed % (conditional.size + 1))),
    ):
        assert min(rule(first)[row], after + 1) == min(rule(second)[row], after + 1)
    assert min(above_threshold(conditional, limits, 0.5)[row], after + 1) == min(above_threshold(other, limits, 0.5)[row], after + 1)


def test_the_dearer_a_pass_is_beside_a_token_the_more_is_verified():
    random = np.random.default_rng(0)
    for _ in range(50):
        survival = random_survival(random, 4, 4)
        totals = [throughput_optimal(survival, np.full(4, 4), affine(alpha, 1.0, 20)).sum() for alpha in (0.5, 1, 2, 4, 8, 16, 32)]
        assert totals == sorted(totals)


def test_a_flat_table_verifies_everything_and_a_steep_one_nothing():
    survival = random_survival(np.random.default_rng(0), 5, 7)
    limits = np.array([7, 7, 3, 0, 7])
    assert throughput_optimal(survival, limits, np.ones(60)).tolist() == limits.tolist()
    assert throughput_optimal(survival, limits, 1 / np.arange(1, 61) ** 2).tolist() == [0] * 5


def test_a_threshold_stops_at_the_first_below():
    conditional = np.array([[0.9, 0.4, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9], [0.5, 0.5, 0.2]])
    assert above_threshold(conditional, np.full(4, FULL), 0.5).tolist() == [1, 3, 0, 2]
    assert above_threshold(conditional, np.array([1, 2, 3, 0]), 0.5).tolist() == [1, 2, 0, 0]
    assert above_threshold(np.zeros((2, 0)), np.zeros(2, int), 0.5).tolist() == [0, 0]


# Appendix A: target 0.7 / 0.3, draft 0.5 / 0.5. Token A makes the second slot certain, token B makes it hopeless. One draft token more
# does not pay, two do if both survive: a rule that looks past the first stop verifies the first token only if it is A.
TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)
SPS = np.array([0, 1.0, 0.5, 0.45])
FIRST = sum(min(t, d) for t, d in zip(TARGET, DRAFT, strict=True))
SECOND = (1.0, 0.0)  # after A, after B


def lengths_of(rule, token):
    return int(rule(np.array([[FIRST, FIRST * SECOND[token]]]), np.array([2]), SPS)[0])


def looking_past_the_stop(survival, limits, sps):
    return top_prefixes(survival, limits, capacity(survival, limits, sps))


RULES = [(throughput_optimal, (0.7, 0.3)), (looking_past_the_stop, (0.85, 0.15))]


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_appendix_a_exactly(rule, expected):
    out = np.zeros(2)
    for token in (0, 1):
        if lengths_of(rule, token) == 0:
            out += DRAFT[token] * np.array(TARGET)  # nothing verified: the target's own token
            continue
        accept = min(1, TARGET[token] / DRAFT[token])
        residual = np.maximum(np.array(TARGET) - DRAFT, 0)
        out[token] += DRAFT[token] * accept
        out += DRAFT[token] * (1 - accept) * residual / residual.sum()
    assert out == pytest.approx(expected)


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_appendix_a_by_simulation(rule, expected):
    random, count = np.random.default_rng(0), 200_000
    drafted = (random.random(count) >= DRAFT[0]).astype(int)
    verified = np.array([lengths_of(rule, token) > 0 for token in (0, 1)])[drafted]
    accepted = random.random(count) < np.array(TARGET)[drafted] / np.array(DRAFT)[drafted]
    own = (random.random(count) >= TARGET[0]).astype(int)
    out = np.where(~verified, own, np.where(accepted, drafted, 0))  # the residual is all on A
    assert (out == 0).mean() == pytest.approx(expected[0], abs=0.004)
