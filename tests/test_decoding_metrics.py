"""The metrics against a count that walks through every round token by token."""

import random

import pytest

from decoding.metrics import acceptance_metrics, divide, merge
from decoding.settings import Generation, Round, Seconds


def generation(rounds):
    return Generation([0] * (1 + sum(r.committed for r in rounds)), rounds, "stop", Seconds(0, 0, 0, 0, 0))


def random_generations(seed):
    """Rounds made by playing them: each draft token passes or not, each committed one may be the stop token."""
    rng = random.Random(seed)
    generations, plays = [], []
    for _ in range(50):
        rounds, events = [], []
        for _ in range(rng.randrange(0, 12)):
            drafted = rng.randrange(0, 8)
            trail, stopped = [], False  # one entry per counted draft token: accepted, rejected, or unseen after a rejection
            for _ in range(drafted):
                if trail and trail[-1] != "accepted":
                    trail.append("unseen")
                    continue
                trail.append("accepted" if rng.random() < 0.7 else "rejected")
                if trail[-1] == "accepted" and rng.random() < 0.05:
                    stopped = True
                    break
            accepted = trail.count("accepted")
            rounds.append(Round(drafted, accepted, accepted + (not stopped)))
            events.append((trail, stopped))
            if stopped:
                break
        generations.append(generation(rounds))
        plays.append(events)
    return generations, plays


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_a_naive_count(seed):
    generations, plays = random_generations(seed)
    metrics = acceptance_metrics(generations)
    everything = [event for events in plays for event in events]
    for k in range(1, 8):
        reached = [trail[k - 1] for trail, _ in everything if len(trail) >= k]
        trials = [outcome for outcome in reached if outcome != "unseen"]
        assert metrics.get(f"accept_cond@{k}", (0, 0)) == (trials.count("accepted"), len(trials))
        assert metrics.get(f"accept_prefix@{k}", (0, 0)) == (reached.count("accepted"), len(reached))
    tokens = [[trail.count("accepted") + (not stopped) for trail, stopped in events] for events in plays]
    assert metrics["tau"] == (sum(map(sum, tokens)), len(everything))
    means = [sum(t) / len(t) for t in tokens if t]
    assert metrics["tau_per_request"] == (pytest.approx(sum(means)), len(means))
    verified = [outcome for trail, _ in everything for outcome in trail]
    assert metrics["verify_waste"] == (len(verified) - verified.count("accepted"), len(verified))
    full = [(trail, stopped) for trail, stopped in everything]
    assert metrics["verify_rate"] == (
        sum(trail.count("accepted") + (not stopped) for trail, stopped in full),
        sum(len(trail) + (not stopped) for trail, stopped in full),
    )


def test_merging_parts_equals_counting_the_whole():
    generations, _ = random_generations(9)
    parts = [acceptance_metrics(generations[start : start + 7]) for start in range(0, 50, 7)]
    merged, whole = merge(parts), acceptance_metrics(generations)
    assert merged.keys() == whole.keys()
    for name, pair in whole.items():
        assert merged[name] == pytest.approx(pair)


def test_pooled_and_per_request_tau_differ():
    long, short = generation([Round(3, 0, 1)] * 9), generation([Round(3, 3, 4)])
    figures = divide(acceptance_metrics([long, short]))
    assert figures["tau"] == pytest.approx(13 / 10)
    assert figures["tau_per_request"] == pytest.approx(2.5)


def test_a_stop_inside_the_draft_ends_the_trials():
    """4 drafted, the second accepted one is the stop token: two hits, no trial at position 3 or 4, nothing wasted."""
    metrics = acceptance_metrics([generation([Round(4, 2, 2)])])
    assert {k: v for k, v in metrics.items() if k.startswith("accept")} == {
        "accept_cond@1": (1, 1),
        "accept_prefix@1": (1, 1),
        "accept_cond@2": (1, 1),
        "accept_prefix@2": (1, 1),
    }
    assert metrics["tau"] == (2, 1)
    assert metrics["verify_waste"] == (0, 2)
    assert metrics["verify_rate"] == (2, 2)


def test_plain_decoding_has_a_tau_of_one_and_nothing_to_accept():
    figures = divide(acceptance_metrics([generation([Round(0, 0, 1)] * 5)]))
    assert figures["tau"] == figures["tau_per_request"] == figures["verify_rate"] == 1
    assert figures["verify_waste"] is None
    assert not any(name.startswith("accept") for name in figures)
