"""The serving simulator against arithmetic, against plain loops, and against the decoder that it stands for."""

import numpy as np
import pytest
from decoding_cases import LAYERS, PROMPTS, tiny_drafter, tiny_model

from decoding.calibration import Calibrator
from decoding.errors import DecodingError
from decoding.gate import DraftGate
from decoding.loop import speculative_decode
from decoding.policies import BlockLength, HardwareAware, Policy, StaticLength
from decoding.rounds import RecordedRounds
from decoding.settings import SamplingSettings
from decoding.simulator import Contender, Poisson, Replica, Served, Traces, closed, open_loop, together
from decoding.target import TransformersTarget
from decoding.throughput import Curve, ThroughputTable

BLOCK = 3


def made_rounds(requests=20, seed=0, rate=0.7):
    random = np.random.default_rng(seed)
    rows, said = [], []
    for request in range(requests):
        for _ in range(int(random.integers(4, 12))):
            said.append(np.clip(random.normal(rate, 0.2, BLOCK), 0.01, 0.99))
            accepted = int(np.cumprod(random.random(BLOCK) < said[-1]).sum())
            rows.append((request, BLOCK, BLOCK, accepted, accepted + 1))
    columns, confidence = np.array(rows).T, np.array(said)
    return RecordedRounds(*columns, confidence, np.arange(requests), np.array(["d"] * requests), np.full(requests, 5))


def table(fixed=0.1, token=0.01, draft=0.005):
    curves = []
    for requests in (1, 8, 64):
        tokens = tuple(range(requests, requests * (BLOCK + 1) + 1))
        drafting = tuple(draft * requests * width for width in range(BLOCK + 1))
        curves.append(
            Curve(requests, tokens, tuple(fixed + token * b + drafting[-1] for b in tokens), drafting, drafting, fixed + token * requests)
        )
    return ThroughputTable(tuple(curves), 64, BLOCK, "assumed")


FULL, NONE = Contender("full block", Policy), Contender("none", Policy, drafted=False)


def test_whole_blocks_replay_what_was_recorded():
    rounds, costs = made_rounds(), table()
    traces = Traces(rounds)
    for request in range(3):
        own = rounds.select(rounds.request == request)
        served = together(traces, costs, FULL, [request])
        assert served.rounds == served.steps == len(own)
        assert (served.tokens, served.accepted) == (own.committed.sum(), own.accepted.sum())
        assert served.seconds == pytest.approx(len(own) * float(costs.seconds(1)[1 + BLOCK]))
        assert served.speeds == [pytest.approx(served.tokens / served.seconds)]


def test_a_batch_costs_what_its_rounds_cost():
    rounds, costs = made_rounds(), table()
    traces, requests = Traces(rounds), [0, 3, 4, 9]
    served = together(traces, costs, Contender("static 1", lambda: StaticLength(1)), requests)
    # By plain loops: walk each text, cutting every recorded round after its first draft.
    walked = []
    for request in requests:
        own = rounds.select(rounds.request == request)
        starts = (np.cumsum(own.committed) - own.committed).tolist()
        place, steps, total = 0, [], int(own.committed.sum())
        while place < total:
            row = next((i for i, start in enumerate(starts) if start >= place), len(starts) - 1)
            steps.append(min(int(own.accepted[row]), 1))
            place += steps[-1] + 1
        walked.append(steps)
    expected = 0.0
    for step in range(max(map(len, walked))):
        active = sum(len(one) > step for one in walked)
        expected += 0.1 + 0.01 * 2 * active + 0.005 * active
    assert served.seconds == pytest.approx(expected)
    assert served.accepted == sum(map(sum, walked))
    assert served.verified == sum(map(len, walked))


def test_shorter_blocks_are_accepted_as_often_as_was_measured():
    traces, ratios = Traces(made_rounds(200)), np.array([0.6, 0.3])
    rows = np.arange(len(traces.accepted))
    replica = Replica(traces, table(), Contender("two", lambda: BlockLength(2), shorter={2: ratios}), 1, Served())
    accepted = replica._accepted(rows, np.full(len(rows), 2))
    for k in (1, 2):
        assert (accepted >= k).mean() == pytest.approx(ratios[k - 1] * (traces.accepted >= k).mean(), rel=0.12)
    assert (replica._accepted(rows, np.full(len(rows), BLOCK)) == traces.accepted).all(), "whole blocks are as recorded"


def test_without_a_drafter_a_round_gives_one_token():
    served = closed(Traces(made_rounds()), table(), NONE, 8, 50)
    assert (served.tokens, served.rounds, served.verified) == (400, 400, 0)
    assert served.throughput == pytest.approx(8 / (0.1 + 0.01 * 8))


def test_closed_load_keeps_its_concurrency():
    served = closed(Traces(made_rounds()), table(), FULL, 6, 300)
    assert served.concurrency == 6
    assert served.budget == BLOCK + 1
    assert 0 < served.waste < 1
    tau = served.tokens / served.rounds
    assert served.throughput == pytest.approx(6 * tau / float(table().seconds(6)[6 * 4]))
    assert served.user_speed == pytest.approx(tau / float(table().seconds(6)[6 * 4]), rel=0.15)


def test_the_scheduled_budget_falls_with_load():
    costs = table(fixed=0.1, token=0.02, draft=0.0005)
    traces, made = Traces(made_rounds(60)), Contender("algorithm 1", lambda: HardwareAware(Calibrator.identity(BLOCK), costs))
    gated = Contender("gated", lambda: DraftGate(made.make(), Calibrator.identity(BLOCK), costs, 0.7 ** np.arange(1, BLOCK + 1)))
    budgets = [closed(traces, costs, made, n, 150).budget for n in (1, 4, 16, 64)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 2 > budgets[-1]
    for n, steps in ((1, 1000), (64, 100)):
        static = [closed(traces, costs, Contender("s", lambda k=k: StaticLength(k)), n, steps).throughput for k in range(BLOCK + 1)]
        assert closed(traces, costs, made, n, steps).throughput > 0.97 * max(static[1:])
        # At high load drafting itself does not pay; only a gate saves it.
        assert closed(traces, costs, gated, n, steps).throughput > 0.97 * max(static)
    assert closed(traces, costs, gated, 64, 100).drafted < 0.5 * closed(traces, costs, made, 64, 100).drafted


def test_open_arrivals_are_all_served_where_there_is_room():
    traces, costs = Traces(made_rounds()), table()
    served = open_loop(traces, costs, FULL, Poisson(((0.0, 3.0),)), replicas=5, slots=8, duration=200.0)
    assert len(served.speeds) == pytest.approx(600, rel=0.12)
    assert np.mean(served.waits) < 0.3
    assert served.tokens == pytest.approx(len(served.speeds) * traces.tokens.mean(), rel=0.1)
    crowded = open_loop(traces, costs, FULL, Poisson(((0.0, 300.0),)), replicas=2, slots=4, duration=40.0)
    assert crowded.concurrency > 3.9
    assert np.mean(crowded.waits) > 5


def test_arrival_rates_change_when_they_are_told_to():
    times = Poisson(((0.0, 5.0), (100.0, 20.0), (200.0, 0.0))).times(np.random.default_rng(0))
    seen = []
    for when in times:
        seen.append(when)
        if when > 199.5:
            break
    early = sum(when < 100 for when in seen)
    assert early == pytest.approx(500, rel=0.15)
    assert len(seen) - early == pytest.approx(2000, rel=0.1)


def test_the_same_seed_gives_the_same_run():
    traces, costs = Traces(made_rounds()), table()
    runs = [open_loop(traces, costs, FULL, Poisson(((0.0, 9.0),)), 3, 4, 30.0, seed=7) for _ in range(2)]
    assert runs[0] == runs[1]


def test_nothing_recorded_is_refused():
    rounds = made_rounds()
    with pytest.raises(DecodingError, match="no recorded rounds"):
        Traces(rounds.select(np.zeros(len(rounds), bool)))


def test_greedy_decoding_is_replayed_round_for_round():
    """The decoder's own rounds of whole blocks, recorded and replayed: the same passes of the same sizes."""
    target, drafter = TransformersTarget(tiny_model("qwen3"), LAYERS), tiny_drafter("qwen3", "markov", block_length=BLOCK)

    class Watch(Policy):
        sizes: list[int] = []  # noqa: RUF012

        def observe(self, outcome):
            self.sizes.append(outcome.tokens)

    settings = SamplingSettings(temperature=1.0, max_new_tokens=20)
    generations = speculative_decode(target, drafter, PROMPTS, settings, policy=Watch())
    rounds = RecordedRounds.from_generations(generations, BLOCK, range(5), ["d"] * 5, [len(p) for p in PROMPTS])
    seen = []

    class Replayed(Policy):
        def observe(self, outcome):
            seen.append(outcome.tokens)

    served = together(Traces(rounds), table(), Contender("replayed", Replayed), list(range(5)))
    assert seen == Watch.sizes
    assert served.tokens == sum(len(g.tokens) - 1 for g in generations)
