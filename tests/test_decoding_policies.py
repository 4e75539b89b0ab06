"""Decoding under every verification policy: still the target's own distribution, and the tests notice a rule that leaks."""

import copy
import logging
from functools import lru_cache

import numpy as np
import pytest
import torch
from decoding_cases import LAYERS, PROMPTS, ScriptedDrafter, chi_square_p, greedy_reference, tiny_drafter, tiny_model

from decoding.calibration import Calibrator
from decoding.errors import DecodingError
from decoding.loop import speculative_decode
from decoding.policies import Asynchronous, HardwareAware, Policy, RoundOutcome, StaticLength, Threshold
from decoding.scheduler import capacity, top_prefixes
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget

BLOCK, VOCAB, NEW = 3, 4, 4


class Cliffs:
    """Passes get dearer at every odd number of tokens beyond the anchors: one draft token more seldom pays, two often do."""

    def sps(self, requests):
        extra = np.maximum(np.arange(requests * 6 + 2) - requests, 0)
        return 1 / (requests + 0.5 * ((extra + 1) // 2))


class LookingAhead(HardwareAware):
    """Wrong: searches the whole table with the present confidences, so that a token's own value decides whether it is verified."""

    name = "leaky"

    def choose(self, requests, drafted, survival, sps):
        return top_prefixes(survival, drafted, capacity(survival, drafted, sps))


class Apart(Policy):
    """Lets a policy decide over a few requests at a time, as in many small batches: in a large one no request weighs enough to leak."""

    def __init__(self, make, size):
        self.make, self.size = make, size

    def begin(self):
        self.groups = {}

    def lengths(self, requests, drafted, confidence):
        if confidence is None:
            return drafted
        chosen, group = np.zeros_like(drafted), requests // self.size
        order = np.argsort(group, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            key = int(group[rows[0]])
            if key not in self.groups:
                self.groups[key] = self.make()
            chosen[rows] = self.groups[key].lengths(requests[rows], drafted[rows], confidence[rows])
        return chosen


def loud_drafter():
    """Its confidence hangs on the token before alone: after tokens 0 and 1 it is near 1, after the others near 0."""
    drafter = copy.deepcopy(tiny_drafter("llama", "markov", block_length=BLOCK, vocab=VOCAB))
    projection = drafter.confidence.proj
    with torch.no_grad():
        projection.weight[:, : drafter.config.hidden_size] = 0
        projection.weight.mul_(-400)
        projection.bias.fill_(400 * 0.157)
    return drafter


# The first position's confidence is blunted, to somewhat above or below one half: then what the first token is worth hangs on itself.
SHARP = Calibrator((30.0, 1.0, 1.0))
POLICIES = {
    "full block": Policy,
    "static 0": lambda: StaticLength(0),
    "static 2": lambda: StaticLength(2),
    "threshold": lambda: Threshold(0.5, SHARP),
    "algorithm 1": lambda: HardwareAware(SHARP, Cliffs()),
    "asynchronous": lambda: Asynchronous(SHARP, Cliffs()),
}


@lru_cache
def exact():
    """The target's joint distribution of NEW tokens."""
    paths = torch.cartesian_prod(*[torch.arange(VOCAB)] * NEW)
    with torch.inference_mode():
        logits = tiny_model("llama", VOCAB)(input_ids=torch.cat([torch.ones(len(paths), 1, dtype=torch.int64), paths], dim=1)).logits
    return torch.log_softmax(logits[:, :-1] / 1.5, dim=-1).gather(2, paths[..., None]).squeeze(2).sum(1).exp()


def chi_square(policy, rollouts):
    """P-value of the whole loop's output against the exact joint distribution of NEW tokens; and the lengths that were verified."""
    target = TransformersTarget(tiny_model("llama", VOCAB), LAYERS)
    settings = SamplingSettings(temperature=1.5, max_new_tokens=NEW, seed=3)
    generations = speculative_decode(target, loud_drafter(), [[1]] * rollouts, settings, batch_size=10_000, policy=policy)
    tokens = torch.tensor([g.tokens for g in generations])
    observed = torch.bincount((tokens * VOCAB ** torch.arange(NEW - 1, -1, -1)).sum(1), minlength=VOCAB**NEW)
    lengths = np.bincount([g.rounds[0].drafted for g in generations], minlength=BLOCK + 1)
    return chi_square_p(observed, exact()), lengths


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
FEW = [(name, 4_000) for name in ("threshold", "algorithm 1", "asynchronous")]


@pytest.mark.parametrize(("name", "rollouts"), [*FEW, *(pytest.param(name, 120_000, marks=SLOW) for name in POLICIES)])
def test_every_policy_keeps_the_targets_distribution(name, rollouts):
    size = 2 if name == "asynchronous" else 1  # one request alone is decided over by itself alone, where a leak would be largest
    p, lengths = chi_square(Apart(POLICIES[name], size) if "static" not in name else POLICIES[name](), rollouts)
    assert p > 1e-3
    if name in ("threshold", "algorithm 1"):
        assert (lengths > rollouts * 0.02).sum() >= 2, f"the policy decides both ways: {lengths}"


@pytest.mark.parametrize("rollouts", [4_000, pytest.param(120_000, marks=SLOW)])
def test_looking_past_the_stop_is_caught(rollouts):
    p, lengths = chi_square(Apart(lambda: LookingAhead(SHARP, Cliffs()), 1), rollouts)
    assert (lengths > rollouts * 0.02).sum() >= 2
    assert p < 1e-6


def good_script(request, position):
    texts = [prompt + greedy_reference("qwen3", tuple(prompt), 17) for prompt in PROMPTS]
    right = texts[request][position] if position < len(texts[request]) else 0
    return right if (request * 31 + position * 7919) % 97 % 4 else (right + 1) % 53


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_text_is_the_targets_own_with_ragged_verification(name):
    target = TransformersTarget(tiny_model("qwen3"), LAYERS)
    drafter = ScriptedDrafter(good_script, confidence=True)
    policy = POLICIES[name]()
    if name in ("algorithm 1", "asynchronous", "threshold"):
        policy.calibrator = Calibrator.identity(4)
    generations = speculative_decode(target, drafter, PROMPTS, SamplingSettings(max_new_tokens=17), policy=policy)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.tokens == greedy_reference("qwen3", tuple(prompt), 17)
        assert all(len(r.confidence) == r.drafted for r in generation.rounds)
        if "static" in name:
            assert max(r.drafted for r in generation.rounds) == policy.length


class Watching(Policy):
    """Verifies request r's first r tokens and keeps what it is told."""

    def begin(self):
        self.seen = []

    def lengths(self, requests, drafted, confidence):
        return np.minimum(requests, drafted)

    def observe(self, outcome):
        self.seen.append(outcome)


def test_a_pass_holds_only_what_is_verified(monkeypatch):
    """The batch is flat: an anchor for each request and its own number of drafts, and nothing for padding."""
    model, passed = tiny_model("qwen3"), []
    target = TransformersTarget(model, LAYERS)
    good_script(0, 0)  # the references come from the same model
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: passed.append(args[0].shape[:2].numel()))
    policy = Watching()
    try:
        drafter = ScriptedDrafter(good_script, confidence=True)
        generations = speculative_decode(target, drafter, PROMPTS, SamplingSettings(max_new_tokens=17), policy=policy)
    finally:
        hook.remove()
    assert passed[0] == sum(map(len, PROMPTS))
    assert passed[1:] == [outcome.tokens for outcome in policy.seen]
    assert len({n for outcome in policy.seen for n in outcome.verified}) == 5
    for outcome in policy.seen:
        assert (outcome.accepted <= outcome.verified).all()
        assert outcome.seconds > 0
        assert outcome.confidence is None if not outcome.drafted.any() else outcome.confidence.shape[1] >= outcome.drafted.max()
    for request, generation in enumerate(generations):
        ours = [int(v) for o in policy.seen for r, v in zip(o.requests, o.verified, strict=True) if r == request]
        assert [r.drafted for r in generation.rounds] == ours


def test_without_a_cost_table_it_says_so_once_and_verifies_everything(caplog):
    target = TransformersTarget(tiny_model("qwen3"), LAYERS)
    settings = SamplingSettings(max_new_tokens=17)
    for kind in (HardwareAware, Asynchronous):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            policy = kind(Calibrator.identity(4), None)
            runs = [
                speculative_decode(target, ScriptedDrafter(good_script, confidence=True), PROMPTS, settings, policy=p)
                for p in (policy, None)
            ]
        assert [record.getMessage().count("inactive: no cost table") for record in caplog.records] == [1]
        assert [g.rounds for g in runs[0]] == [g.rounds for g in runs[1]]


def test_a_policy_of_confidences_needs_a_drafter_that_has_them():
    target = TransformersTarget(tiny_model("qwen3"), LAYERS)
    with pytest.raises(DecodingError, match="no confidence head"):
        speculative_decode(target, ScriptedDrafter(good_script), PROMPTS, SamplingSettings(max_new_tokens=5), policy=Threshold(0.5, SHARP))
    for wrong in (lambda: StaticLength(-1), lambda: Threshold(1.5, SHARP)):
        with pytest.raises(DecodingError):
            wrong()


def test_asynchronous_sizes_a_step_by_the_one_two_before():
    """Against plain loops, with a request that leaves and one that joins."""
    random = np.random.default_rng(0)
    policy = Asynchronous(Calibrator.identity(BLOCK), Cliffs())
    policy.begin()
    present = [[0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 2], [3, 0, 2, 9], [9, 0], [0, 9]]
    past = []
    for step, requests in enumerate(present):
        confidence = random.uniform(0.3, 1, (len(requests), BLOCK))
        drafted = np.full(len(requests), BLOCK)
        survival = np.cumprod(confidence, axis=1)
        lengths = policy.lengths(np.array(requests), drafted, confidence)
        past.append(dict(zip(requests, survival, strict=True)))
        if step < 2:
            assert lengths.tolist() == [BLOCK] * len(requests)
            continue
        before = past[step - 2]
        mean = np.mean(list(before.values()), axis=0)
        falling = sorted(np.concatenate([before.get(r, mean) for r in requests]), reverse=True)
        sps = Cliffs().sps(len(requests))
        thetas = [(len(requests) + sum(falling[:k])) * sps[len(requests) + k] for k in range(len(falling) + 1)]
        assert lengths.sum() == int(np.argmax(thetas))
        assert lengths.tolist() == top_prefixes(survival, drafted, int(np.argmax(thetas))).tolist()


def test_observed_rounds_reach_a_table_that_learns():
    class Learning(Cliffs):
        def __init__(self):
            self.told = []

        def observe(self, *what):
            self.told.append(what)

    costs = Learning()
    outcome = RoundOutcome(np.arange(3), np.full(3, 3), np.array([3, 0, 1]), np.array([2, 0, 0]), None, 0.25)
    HardwareAware(SHARP, costs).observe(outcome)
    assert costs.told == [(3, 7, 0.25)]
