"""The draft gate: drafts where it pays, from past rounds only, and keeps the target's distribution."""

import math

import numpy as np
import pytest
import torch
from decoding_cases import LAYERS, PROMPTS, chi_square_p, greedy_reference, tiny_drafter, tiny_model

from decoding.calibration import Calibrator
from decoding.gate import DraftGate, trust_in_past
from decoding.loop import speculative_decode
from decoding.policies import HardwareAware, Policy, RoundOutcome
from decoding.rounds import RecordedRounds
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget

BLOCK = 4


class Costs:
    """A pass: 1 s and a tenth for each token; drafting: `draft` s for each request and a hundredth for each token; 0.1 s less without."""

    def __init__(self, draft):
        self.draft = draft

    def plain_seconds(self, requests):
        return 0.9 + 0.1 * requests

    def block_seconds(self, requests, length):
        return requests * (self.draft + 0.01 * length) if length else 0.0

    def seconds(self, requests):
        return 1 + 0.1 * np.arange(requests * (BLOCK + 1) + 2) + self.block_seconds(requests, BLOCK)

    def sps(self, requests):
        return 1 / self.seconds(requests)


SHORTER = {1: np.array([0.9]), 2: np.array([0.95, 0.8])}


def gate(draft, prior=0.5, **options):
    options = {"shorter": SHORTER, **options}
    return DraftGate(Policy(), Calibrator.identity(BLOCK), Costs(draft), np.full(BLOCK, prior) ** np.arange(1, BLOCK + 1), **options)


def outcome(requests, drafted, confidence):
    zeros = np.zeros(len(requests), dtype=np.int64)
    return RoundOutcome(np.array(requests), np.array(drafted), zeros, zeros, np.array(confidence), 1.0)


def run(one, rounds, confidences):
    """Plans of requests 0.. whose confidences stay what they are."""
    requests, limits, plans = np.arange(len(confidences)), np.full(len(confidences), BLOCK), []
    for _ in range(rounds):
        plan = one.plan(requests, limits)
        plans.append(plan.tolist())
        if plan.any():
            shown = np.array(confidences)[:, None] * np.ones(int(plan.max()))
            one.observe(outcome(requests.tolist(), plan.tolist(), shown))
    return plans


def test_all_is_drafted_where_drafting_is_cheap_and_nothing_where_it_is_dear():
    assert run(gate(0.001, prior=0.9), 1, [0.9] * 4) == [[BLOCK] * 4]
    assert run(gate(50.0), 1, [0.9] * 4) == [[0] * 4]


def test_requests_that_accept_little_are_passed_over_and_the_others_are_not():
    plans = run(gate(0.08, prior=0.7), 40, [0.9, 0.02, 0.9, 0.02])
    late = np.array(plans[20:])
    assert (late[:, [0, 2]] > 0).all()
    assert (late[:, [1, 3]] == 0).mean() > 0.8


def test_the_best_of_the_tried_plans_is_chosen():
    """Against plain loops over shares and widths, verification sized by hand."""
    random = np.random.default_rng(0)
    for _ in range(40):
        survival = np.cumprod(random.uniform(0.05, 1, (4, BLOCK)), axis=1)
        one = gate(float(random.uniform(0.01, 0.6)))
        order = np.argsort(-survival.sum(1), kind="stable")

        def rate(count, width, survival=survival, one=one, order=order):
            measured = {0: [], 1: [0.9], 2: [0.95, 0.8], BLOCK: [1.0] * BLOCK}[width]
            falling = sorted((survival[r, k] * measured[k] for r in order[:count] for k in range(width)), reverse=True)
            times = [1 + 0.1 * (4 + k) + one.costs.block_seconds(count, width) for k in range(len(falling) + 1)]
            return max((4 + sum(falling[:k])) / times[k] for k in range(len(falling) + 1))

        plans = {(count, width): rate(count, width) for count in range(1, 5) for width in (1, 2, BLOCK)} | {(0, 0): 4 / 1.3}
        plan = one._best(survival)
        assert plans[int((plan > 0).sum()), int(plan.max())] == pytest.approx(max(plans.values()))


def test_a_length_that_was_not_measured_is_never_chosen():
    random = np.random.default_rng(1)
    chosen = {2: set(), 1: set()}
    for _ in range(60):
        survival = np.cumprod(random.uniform(0.05, 0.9, (4, BLOCK)), axis=1)
        draft = float(random.uniform(0.01, 0.3))
        chosen[1] |= set(gate(draft, shorter={1: np.array([1.0])})._best(survival).tolist())
        chosen[2] |= set(gate(draft, shorter={2: np.array([1.0, 1.0])})._best(survival).tolist())
    assert chosen == {1: {0, 1, BLOCK}, 2: {0, 2, BLOCK}}


def test_a_shorter_block_tells_of_whole_ones_by_the_measured_ratio():
    """What was seen of blocks of two, over the ratio, is remembered; and a request that always drafts so is expected at what it shows."""
    one = gate(0.01, memory=1e-9)  # the last round alone is remembered
    one.plan(np.arange(2), np.full(2, BLOCK))
    one.observe(outcome([0, 1], [2, 0], [[0.5, 0.5], [0.5, 0.5]]))
    assert one._known[0] == pytest.approx([0.5 / 0.95, 0.25 / 0.8, 0.125, 0.0625])
    assert one._known[1] == pytest.approx([0.5, 0.25, 0.125, 0.0625])


def test_a_passed_over_request_is_tried_again_and_recovers():
    one = gate(0.15, prior=0.02, probing=0.053)
    plans = run(one, 60, [0.02])
    tried = [step for step, plan in enumerate(plans) if plan[0]]
    # A round takes 1 s, of which 0.053 go into probing; drafting a token takes 0.16 s, and a pass with it 0.2 s more.
    assert tried == [math.ceil(0.36 * n / 0.053) - 1 for n in range(1, 9)]
    assert {plan[0] for plan in plans} == {0, 1}
    recovered = run(one, 400, [0.95])
    assert sum(plan[0] > 0 for plan in recovered[-20:]) == 20


@pytest.mark.parametrize("requests", [1, 4])
def test_probing_takes_no_more_than_its_share_of_the_time(requests):
    one = gate(0.3, prior=0.02, probing=0.02)
    plans, costs = run(one, 1000, [0.02] * requests), Costs(0.3)
    spent = sum(costs.block_seconds(np.count_nonzero(plan), max(plan)) + 0.1 + 0.1 * sum(plan) for plan in plans if any(plan))
    assert 0.015 < spent / (1000 * costs.plain_seconds(requests)) <= 0.02


def test_what_is_expected_lies_between_the_prior_and_the_past_by_trust():
    """A request that shows 0.9 in each round is drafted for where that is believed, and tried only where it is not."""
    plans = {trust: run(gate(0.15, prior=0.05, probing=0.1, trust=trust), 60, [0.9])[-20:] for trust in (0.0, 1.0)}
    assert all(plan[0] > 1 for plan in plans[1.0])
    assert {plan[0] for plan in plans[0.0]} == {0, 1}
    one = gate(0.15, trust=0.5)
    one._known[0] = np.array([0.9, 0.8, 0.7, 0.6])
    seen = []
    one._best = lambda survival: seen.append(survival) or np.zeros(1, dtype=np.int64)
    one.plan(np.arange(1), np.array([3]))
    assert seen[0] == pytest.approx(np.array([[0.7, 0.525, 0.4125, 0.0]]))


def recorded(confidence, accepted, requests):
    """Rounds of whole blocks, `requests` of equal length."""
    count, block = confidence.shape
    request = np.repeat(np.arange(requests), count // requests)
    whole = np.full(count, block)
    names = np.zeros(requests, dtype=np.int64)
    return RecordedRounds(request, whole, whole.copy(), accepted, accepted + 1, confidence, names, names.astype(str), names)


def test_trust_is_what_of_the_past_comes_true():
    random, requests, rounds = np.random.default_rng(2), 300, 100
    own = np.repeat(random.uniform(0.1, 0.9, requests), rounds)[:, None]
    true, other = np.broadcast_to(own, (len(own), 2)), np.repeat(random.uniform(0.1, 0.9, requests), rounds)[:, None]
    accepted = np.cumprod(random.random(true.shape) < true, axis=1).sum(1)
    prior = np.array([0.5, np.mean(own**2)])
    believe = {
        name: trust_in_past(recorded(confidence, accepted, requests), Calibrator.identity(2), prior)
        for name, confidence in {"true": true, "of others": np.broadcast_to(other, true.shape), "doubled": 0.5 + 1.2 * (true - 0.5)}.items()
    }
    assert believe["true"] == pytest.approx(1, abs=0.03)
    assert believe["of others"] == pytest.approx(0, abs=0.08)
    assert 0.7 < believe["doubled"] < 0.9


def test_trust_is_a_least_squares_slope_of_whole_blocks():
    random, memory = np.random.default_rng(3), 3.0
    confidence, accepted = random.random((60, 2)), random.integers(0, 3, 60)
    rounds = recorded(confidence, accepted, 4)
    rounds.drafted[[3, 20]], rounds.verified[41] = 1, 1  # no whole blocks: left out
    prior, calibrator, x, y = np.array([0.4, 0.2]), Calibrator((1.5, 0.8)), [], []
    for request in range(4):
        mean = prior
        for at in range(15 * request, 15 * request + 15):
            if at in (3, 20, 41):
                continue
            survival = calibrator.survival(confidence[at])
            x += list(mean - prior)
            y += [float(accepted[at] > k) - prior[k] for k in range(2)]
            mean = np.exp(-1 / memory) * mean + (1 - np.exp(-1 / memory)) * survival
    slope = np.linalg.lstsq(np.array(x)[:, None], np.array(y), rcond=None)[0][0]
    assert 0 < slope < 1
    assert trust_in_past(rounds, calibrator, prior, memory) == pytest.approx(slope)


def test_limits_hold_and_the_inner_policy_still_decides():
    class Inner(Policy):
        def plan(self, requests, limits):
            return np.minimum(limits, 2)

        def lengths(self, requests, drafted, confidence):
            return drafted - 1

    one = DraftGate(Inner(), Calibrator.identity(BLOCK), Costs(0.001), np.full(BLOCK, 0.9))
    assert one.plan(np.arange(3), np.array([4, 1, 0])).tolist() == [2, 1, 0]
    assert one.lengths(np.arange(2), np.array([2, 1]), None).tolist() == [1, 0]


class Alternating(DraftGate):
    """Passes over a changing half of the requests, whatever is expected of them."""

    def plan(self, requests, limits):
        super().plan(requests, limits)
        self.turn = getattr(self, "turn", 0) + 1
        return np.where((requests + self.turn) % 2 == 0, limits, 0)


@pytest.mark.parametrize("kind", ["markov", "none"])
def test_drafting_for_some_leaves_the_text_as_it_is(kind):
    target, drafter = TransformersTarget(tiny_model("qwen3"), LAYERS), tiny_drafter("qwen3", kind)
    one = Alternating(Policy(), Calibrator.identity(BLOCK), Costs(0.1), np.full(BLOCK, 0.5))
    generations = speculative_decode(target, drafter, PROMPTS, SamplingSettings(max_new_tokens=17), policy=one)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.tokens == greedy_reference("qwen3", tuple(prompt), 17)
        drafted = [r.drafted for r in generation.rounds[:6]]
        assert {n > 0 for n in drafted} == {True, False}


def test_a_request_drafts_the_same_whoever_is_passed_over():
    """The blocks of those that are drafted for are what they would be with everyone drafted for."""
    target, drafter = TransformersTarget(tiny_model("qwen3"), LAYERS), tiny_drafter("qwen3", "gated")
    settings = SamplingSettings(temperature=1.0, max_new_tokens=12, seed=5)

    class First(DraftGate):
        def plan(self, requests, limits):
            super().plan(requests, limits)
            return np.where(requests == 0, limits, 0)

    gated = speculative_decode(
        target, drafter, PROMPTS, settings, policy=First(Policy(), Calibrator.identity(BLOCK), Costs(0.1), np.full(BLOCK, 0.5))
    )
    everyone = speculative_decode(target, drafter, PROMPTS, settings)
    assert gated[0].tokens == everyone[0].tokens
    told = [[(r.drafted, r.accepted, r.committed) for r in one[0].rounds] for one in (gated, everyone)]
    assert told[0] == told[1]
    assert all(r.drafted == 0 for r in gated[1].rounds)


@pytest.mark.parametrize("rollouts", [4_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_gated_decoding_keeps_the_targets_distribution(rollouts):
    vocab, new, block = 4, 4, 3
    model, drafter = tiny_model("llama", vocab), tiny_drafter("llama", "markov", block_length=block, vocab=vocab)

    class Fixed(Costs):
        """Most of a round's cost is there whatever is verified, in a batch of any size."""

        def plain_seconds(self, requests):
            return 0.3 * requests + 0.1 * requests

        def seconds(self, requests):
            return 0.3 * requests + 0.1 * np.arange(requests * (block + 1) + 2) + self.block_seconds(requests, block)

    calibrator, costs = Calibrator((3.0,) * block), Fixed(0.1)
    shorter = {1: np.array([0.9]), 2: np.array([0.9, 0.8])}
    planned = set()

    class Mixed(DraftGate):
        """Blocks of several lengths side by side for those that are drafted for."""

        def plan(self, requests, limits):
            lengths = np.where(super().plan(requests, limits) > 0, np.minimum(1 + requests % block, limits), 0)
            planned.update(lengths.tolist())
            return lengths

    one = Mixed(HardwareAware(calibrator, costs), calibrator, costs, np.full(block, 0.75), shorter, memory=2, probing=0.3)
    settings = SamplingSettings(temperature=1.5, max_new_tokens=new, seed=3)
    generations = speculative_decode(TransformersTarget(model, LAYERS), drafter, [[1]] * rollouts, settings, batch_size=5_000, policy=one)
    assert {r.drafted > 0 for g in generations for r in g.rounds[:2]} == {True, False}
    assert planned == {0, 1, 2}
    tokens = torch.tensor([g.tokens for g in generations])
    observed = torch.bincount((tokens * vocab ** torch.arange(new - 1, -1, -1)).sum(1), minlength=vocab**new)
    paths = torch.cartesian_prod(*[torch.arange(vocab)] * new)
    with torch.inference_mode():
        logits = model(input_ids=torch.cat([torch.ones(len(paths), 1, dtype=torch.int64), paths], dim=1)).logits
    steps = torch.log_softmax(logits[:, :-1] / 1.5, dim=-1).gather(2, paths[..., None]).squeeze(2)
    assert chi_square_p(observed, steps.sum(1).exp()) > 1e-3
