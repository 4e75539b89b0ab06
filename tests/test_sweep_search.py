"""Where a sweep looks next and what that rests on: spaces, random and guided search, early stopping, costs. Against naive references."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pipeline_runs import ROOT, Here, start
from sweep_runs import SweepShop, finished, make_sweep_shop

from actors.sweeping import OBJECTIVE, STEP, Halving, Told, _asha
from decoding.prediction import ServingCost
from decoding.throughput import Curve, ThroughputTable
from pipelines import train_config  # noqa: F401  # its resolvers
from pipelines.sweep_config import Dimension, Point, drawn, each_once, grid, overrides_between, parse_space
from pipelines.sweep_search import OptunaSearch

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> SweepShop:
    return make_sweep_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


# The space


def test_a_space_is_read_and_its_points_named() -> None:
    space = parse_space(
        {"drafter": {"head_rank": [0, 64], "window": None}, "train": {"learning_rate": "1e-4..1e-2 log", "anchors": "2 .. 9"}}
    )
    rate, anchors = Dimension("train.learning_rate", (), 1e-4, 1e-2, True, False), Dimension("train.anchors", (), 2, 9, False, True)
    assert space == (Dimension("drafter.head_rank", (0, 64)), rate, anchors)
    points = grid(
        (Dimension("train.loss.ce", (0.1, 1.0)), Dimension("train.loss.tv", (0.9,)), Dimension("target.layer_ids", ((1, 2), (3,))))
    )
    assert [point.name for point in points] == [f"ce{ce}-tv0.9-layer_ids{ids}" for ce in ("0.1", "1") for ids in ("1_2", "3")]
    clash = Point((("a.steps", 1), ("b.steps", 2)))
    assert clash.name == "a_steps1-b_steps2"
    long = Point(tuple((f"drafter.a_rather_long_name_{i}", i) for i in range(9)))
    other = Point(tuple((f"drafter.a_rather_long_name_{i}", i + (i == 8)) for i in range(9)))
    assert len(long.name) <= 60
    assert long.name != other.name


def test_random_points_are_the_same_again_and_within_their_ranges() -> None:
    space = (Dimension("a", (1, 2, 3)), Dimension("b", (), 1e-4, 1e-1, True), Dimension("c", (), 2, 9, False, True))
    points = drawn(space, 300, 4)
    assert points == drawn(space, 300, 4)
    assert len(set(points)) == 300
    assert drawn(space, 10, 5) != points[:10]
    values = np.array([[value for _, value in point.values] for point in points])
    assert set(values[:, 0]) == {1, 2, 3}
    assert values[:, 1].min() >= 1e-4
    assert values[:, 1].max() <= 1e-1
    assert 0.3 < (values[:, 1] < 10**-2.5).mean() < 0.7, "even in the logarithm"
    assert set(values[:, 2]) == set(range(2, 10))
    assert len(drawn((Dimension("a", (1, 2)),), 9, 0)) == 2


def test_overrides_between_lead_from_one_config_to_the_other() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        plain = compose("train", ["run.name=x"])
        wanted = [
            "train.learning_rate=1e-05",
            "train.betas=[0.5,0.6]",
            "drafter.window=null",
            "target.model=\"a b, c='d'\"",
            "train.ema=0.5",
        ]
        full = OmegaConf.to_container(compose("train", ["run.name=x", *wanted]), resolve=True)
        found = overrides_between(OmegaConf.to_container(plain, resolve=True), full)
        assert OmegaConf.to_container(compose("train", ["run.name=x", *found]), resolve=True) == full
    assert len(found) == len(wanted)


@pytest.mark.parametrize(
    ("given", "once"),
    [
        ("output=a train.steps=1 output=b", "train.steps=1 output=b"),
        ("output=a output=a", "output=a"),
        ("+extra.a=1 extra.a=2", "+extra.a=2"),
        ("train.ema=0.5 ++train.ema=null", "++train.ema=null"),
        ("run.name='a=b' run.name=c", "run.name=c"),
        ("train.steps=1 ~train.loss.tv train.steps=2", "~train.loss.tv train.steps=2"),
        ("train.loss={ce:1} train.loss={tv:1} train.loss.tv=2", "train.loss={ce:1} train.loss={tv:1} train.loss.tv=2"),
    ],
)
def test_a_field_is_named_once_and_gets_the_value_that_hydra_would_give_it(given: str, once: str) -> None:
    assert each_once(given.split()) == once.split()
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        assert compose("train", once.split()) == compose("train", given.split())


# Guided by what is known


def test_optuna_finds_the_better_end_and_goes_on_where_it_was() -> None:
    pytest.importorskip("optuna")
    space = (Dimension("x", (), 0.0, 1.0), Dimension("kind", ("good", "bad")))

    def value(point: Point) -> float:
        found = point.as_dict()
        return float(-((found["x"] - 0.7) ** 2) - (found["kind"] == "bad"))

    known: list[tuple[Point, float | None, bool]] = []
    for stop in (15, 40):  # killed after 15, of which the last was still at work
        search = OptunaSearch(space, 40, 0, known)
        if known:
            assert search.next() == known[-1][0], "what was not finished comes first"
            search.told(known[-1][0], value(known[-1][0]))
            known[-1] = (known[-1][0], value(known[-1][0]), True)
        while len(known) < stop and (point := search.next()) is not None:
            last = len(known) + 1 == stop == 15
            known.append((point, None if last else value(point), not last))
            if not last:
                search.told(point, value(point))
    assert search.next() is None
    points = [point for point, _, _ in known]
    assert len(set(points)) == len(points) == 40
    late = [point.as_dict() for point in points[25:]]
    assert np.mean([found["kind"] == "good" for found in late]) > 0.7
    assert abs(np.median([found["x"] for found in late]) - 0.7) < 0.15


def test_without_optuna_the_user_is_told(shop: SweepShop, here: Here) -> None:
    here.patch.setitem(sys.modules, "optuna", None)
    told = here.refused("sweep", shop.sweep("guided", "sweep.search=optuna", "sweep.trials=2", "sweep.serving=null"))
    assert "pip install optuna" in told


@pytest.mark.slow
def test_a_guided_sweep(shop: SweepShop) -> None:
    pytest.importorskip("optuna")
    space = ["sweep.space.drafter.head_rank=1..8", "sweep.search=optuna", "sweep.trials=3", "tracking=none"]
    result = finished(start("sweep", shop.sweep("guided", *space, "sweep.objective=speed")))
    assert [row["outcome"] for row in result["trials"]] == ["finished"] * 3
    assert all(1 <= row["drafter.head_rank"] <= 8 for row in result["trials"])
    speeds = {row["trial"]: row["predicted_tokens_per_second"] for row in result["trials"]}
    assert result["best"] == max(speeds, key=lambda name: speeds[name])


def test_early_stopping_compares_with_trials_of_earlier_starts() -> None:
    """Against the rule itself: at a rung, a trial goes on unless it is below the top 1/factor of those that came there before it."""
    draw, factor, rungs = np.random.default_rng(0), 3.0, (10, 30, 90)
    curves = {f"t{i}": {step: float(value) for step, value in zip(rungs, draw.random(3), strict=True)} for i in range(12)}

    def naive(names: list[str]) -> dict[str, int]:
        seen: dict[int, list[float]] = {rung: [] for rung in rungs}
        ended = {}
        for name in names:
            for rung in rungs:
                value, ended[name] = curves[name][rung], rung
                stop = bool(seen[rung]) and value < np.percentile(seen[rung], 100 * (1 - 1 / factor))
                seen[rung].append(value)
                if stop:
                    break
        return ended

    expected = naive(list(curves))
    before = [Told(name, tuple((step, curves[name][step]) for step in rungs if step <= expected[name])) for name in list(curves)[:6]]
    scheduler: Any = _asha(Halving(10, factor), 200, before)
    for name in list(curves)[6:]:
        trial: Any = Told(name, ())
        trial = type("T", (), {"trial_id": name})()
        scheduler.on_trial_add(None, trial)
        for step in rungs:
            last = step
            if scheduler.on_trial_result(None, trial, {STEP: step, OBJECTIVE: curves[name][step]}) == "STOP":
                break
        assert last == expected[name], name


# What a round costs


def test_predicted_speed_weighs_acceptance_against_cost() -> None:
    short, long = ServingCost(8, 3, 0.010, 0.040, 0.030), ServingCost(8, 15, 0.030, 0.110, 0.030)
    assert short.tokens_per_second(1.5) == pytest.approx(8 * 1.5 / 0.05)
    assert short.speedup(1.5) == pytest.approx(1.5 * 0.03 / 0.05)
    assert long.tokens_per_second(1.8) < short.tokens_per_second(1.5), "accepts more, costs more"


def test_verification_is_read_from_a_cost_table_also_beyond_its_block() -> None:
    def seconds(requests: int, tokens: int) -> float:
        return 0.01 + 0.001 * requests + 0.0005 * tokens

    block, draft = 4, 0.02
    curves = tuple(
        Curve(
            r,
            (r, 3 * r, 5 * r),
            tuple(seconds(r, t) + draft for t in (r, 3 * r, 5 * r)),
            (0.0, *[draft] * block),
            (0.0, *[draft] * block),
            seconds(r, r),
        )
        for r in (2, 8)
    )
    table = ThroughputTable(curves, 64, block, "measured")
    for requests, width in itertools.product((2, 5, 8), (0, 2, 4, 7, 15)):
        assert table.verify_seconds(requests, width) == pytest.approx(seconds(requests, requests * (width + 1)))
