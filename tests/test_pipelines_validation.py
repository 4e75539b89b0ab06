"""Schedules on the real decoder: what a run counts, that order and texts change between repetitions, and the comparison."""

from pathlib import Path

import numpy as np
import pytest
from decoding_cases import LAYERS, PROMPTS, tiny_drafter, tiny_model

from actors.decoder import Prompt
from decoding.loop import speculative_decode
from decoding.policies import Policy, StaticLength
from decoding.rounds import RecordedRounds
from decoding.settings import SamplingSettings
from decoding.simulator import Contender
from decoding.target import TransformersTarget
from decoding.throughput import Curve, ThroughputTable
from pipelines.job import JobError
from pipelines.validation import Load, Schedule, Trial, Validation, comparisons, validations

BLOCK = 3
SETTINGS = SamplingSettings(temperature=1.0, max_new_tokens=9, seed=4)
TABLE = ThroughputTable((Curve(1, (1, 4), (0.1, 0.2), (0.0, 0.01, 0.02, 0.03), (0.0, 0.01, 0.02, 0.03), 0.05),), 30, BLOCK, "assumed")


def trial(folder: Path) -> Trial:
    target = TransformersTarget(tiny_model("llama"), LAYERS)
    prompts = [Prompt(100 + number, tuple(ids)) for number, ids in enumerate(PROMPTS)]
    return Trial(target, tiny_drafter("llama", "markov", block_length=BLOCK), prompts, SETTINGS, folder, "key")


def schedule(name: str, make=Policy, drafted: bool = True, fixed: bool = True) -> Schedule:
    return Schedule(name, make, Contender(name, make, drafted), fixed, name.replace(" ", ""))


def recorded(one: Trial, requests: int = 10) -> RecordedRounds:
    """As calibrate records: every prompt several times, whole blocks."""
    numbers = range(requests)
    asked = [one.prompts[number % len(one.prompts)] for number in numbers]
    generations = speculative_decode(one.target, one.drafter, [prompt.token_ids for prompt in asked], SETTINGS, request_ids=numbers)
    return RecordedRounds.from_generations(
        generations, BLOCK, [prompt.number for prompt in asked], ["chat"] * requests, [len(prompt.token_ids) for prompt in asked]
    )


def test_a_run_counts_what_plain_calls_of_the_decoder_give(tmp_path: Path) -> None:
    one, load = trial(tmp_path), Load.changing([2, 1, 3])
    run = one.run(schedule("two", lambda: StaticLength(2)), load, repeat=1)
    generations = []
    for first, count in ((0, 2), (2, 1), (3, 3)):
        numbers = range(first, first + count)
        generations += speculative_decode(
            one.target,
            one.drafter,
            [one.prompts[number % 5].token_ids for number in numbers],
            SamplingSettings(1.0, 9, (), 4 + 1_000_003 + 1),
            request_ids=numbers,
            policy=StaticLength(2),
        )
    assert run.tokens == sum(len(generation.tokens) - 1 for generation in generations)
    assert run.rounds == sum(len(generation.rounds) for generation in generations)
    assert run.verified == sum(r.drafted for generation in generations for r in generation.rounds)
    assert run.accepted == sum(r.accepted for generation in generations for r in generation.rounds)
    assert len(run.speeds) == 6
    # A request cannot take longer than its whole batch, nor all of them less than one after the other.
    assert min(run.speeds) > 8 / run.seconds
    assert 0 < run.scheduler_seconds < run.seconds


def test_schedules_go_forwards_and_backwards_with_other_texts(tmp_path: Path) -> None:
    one, told = trial(tmp_path), []
    schedules = [schedule("whole"), schedule("one", lambda: StaticLength(1)), schedule("none", drafted=False)]
    found = one.runs(schedules, [Load.steady(2, 3)], 3, told.append)
    assert [note.partition(",")[0] for note in told] == ["whole", "one", "none", "none", "one", "whole", "whole", "one", "none"]
    assert len({run.rounds for run in found["whole", "2"]}) > 1
    assert {run.tokens for run in found["none", "2"]} == {4 * 8}, "two batches of two"
    assert {run.verified for run in found["none", "2"]} == {0}


def test_a_prediction_needs_every_prompt(tmp_path: Path) -> None:
    one = trial(tmp_path)
    rounds, schedules = recorded(one), [schedule("whole"), schedule("none", drafted=False)]
    found = validations(one, schedules, [Load.steady(2, 2)], 1, rounds, TABLE, lambda note: None)
    assert found[1].predicted == pytest.approx(2 / 0.05), "two requests, a token each in every plain round"
    assert found[1].predicted_user_speed == pytest.approx(1 / 0.05)
    assert found[0].predicted_tau == pytest.approx(found[0].tau, rel=0.5)
    known = np.isin(rounds.prompt[rounds.request], [100])
    with pytest.raises(JobError, match="calibrate"):
        validations(one, schedules, [Load.steady(2, 2)], 1, rounds.select(known), TABLE, lambda note: None)


def test_comparison_with_the_best_fixed_schedule() -> None:
    def one(name: str, load: str, measured: float) -> Validation:
        return Validation(name, load, None, 1, measured, measured, measured, 1, 1, 1, 1, 1, 0, 1, 1, 0)

    rows = [("none", "1", 10), ("static 2", "1", 12), ("aware", "1", 15), ("none", "8", 50), ("static 2", "8", 40), ("aware", "8", 45)]
    found = comparisons([one(*row) for row in rows], ["none", "static 2"])
    assert [(c.load, c.best_fixed, c.measured) for c in found] == [("1", "static 2", 12), ("8", "none", 50)]
    assert [c.over_best_fixed["aware"] for c in found] == pytest.approx([0.25, -0.1])
