"""Sweeps as a person runs them, on a tiny random target: a grid with its dashboard, its trackers and its commands; kills and failures;
several workers; what is fetched from a store. And their parts against naive references."""

import contextlib
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from pipeline_runs import ROOT, Here, Workshop, contents, result_of, start, write_rows
from s3_proxy import proxy
from s3_server import S3Server
from test_pipelines_chains import write_cache
from tiny_models import write_tiny_model
from wandb_offline import offline_runs

from actors.sweeping import OBJECTIVE, STEP, Halving, Told, _asha
from actors.trial_record import TrialRecord
from decoding.prediction import ServingCost
from decoding.throughput import Curve, ThroughputTable
from pipelines import train_config  # noqa: F401  # its resolvers
from pipelines.sweep_config import Dimension, Point, drawn, grid, overrides_between, parse_space
from pipelines.sweep_report import dashboard, write_dashboard
from pipelines.sweep_search import OptunaSearch
from pipelines.sweep_trials import Book, Result, SweepFacts, Trial, best_of
from storage.object_store import ObjectStore, StorageSettings

pytestmark = pytest.mark.timeout(900)
RANKS, BLOCKS = (0, 8), (2, 3)
GRID = [f"sweep.space.drafter.head_rank=[{RANKS[0]},{RANKS[1]}]", f"sweep.space.drafter.block_length=[{BLOCKS[0]},{BLOCKS[1]}]"]
SERVING = ["sweep.serving.requests=2", "sweep.serving.context=16", "sweep.serving.repeats=1", "sweep.serving.dtype=float32"]
NAMES = [f"head_rank{rank}-block_length{block}" for rank, block in itertools.product(RANKS, BLOCKS)]
SET_BY_TRIALS = ("run.name", "drafter.head_rank", "drafter.block_length")


class SweepShop(Workshop):
    """Overrides of a sweep: those of a training but for what trials differ in."""

    def sweep(self, name: str, *more: str) -> list[str]:
        given = [each for each in self.overrides("train") if not each.startswith(SET_BY_TRIALS)]
        steps = ["train.score_every=3", "sweep.refresh_seconds=0.5", "sweep.serving.threads=1"]
        return ["+experiment=rank_by_block", *given, *GRID, *SERVING, *steps, f"sweep.name={name}", *more]

    def folder_of(self, sweep: str) -> Path:
        return self.output / "sweeps" / sweep

    def record(self, sweep: str, trial: str) -> TrialRecord:
        return TrialRecord.read(ObjectStore(StorageSettings(str(self.stored / "runs" / f"{sweep}.{trial}"))))

    def weights(self, sweep: str, trial: str) -> bytes:
        return (self.stored / "runs" / f"{sweep}.{trial}" / "drafter" / "model.safetensors").read_bytes()


def make_sweep_shop(folder: Path) -> SweepShop:
    shop = SweepShop(folder)
    write_tiny_model(shop.folder / "tiny llama", "llama")
    write_rows(shop.folder / "prompts.jsonl", [{"prompt": "What is 1?"}])
    write_rows(shop.folder / "heldout.jsonl", [{"prompt": "Name 2 colours."}])
    write_cache(shop, "supervised")
    return shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> SweepShop:
    return make_sweep_shop(tmp_path_factory.mktemp("shop"))


@dataclass(frozen=True)
class Swept:
    shop: SweepShop
    result: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.shop.folder_of("first")

    def trial(self, name: str) -> dict[str, Any]:
        return next(row for row in self.result["trials"] if row["trial"] == name)


@pytest.fixture(scope="module")
def swept(shop: SweepShop) -> Swept:
    """One undisturbed sweep that the tests look at from all sides."""
    return Swept(shop, finished(start("sweep", shop.sweep("first", "sweep.tensorboard=true"))))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


def finished(process: "subprocess.Popen[str]", code: int = 0) -> dict[str, Any]:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, errors
    assert "Traceback" not in errors, errors
    return result_of(output)


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 500) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


# One sweep, looked at from all sides


def test_every_combination_is_trained_and_judged(swept: Swept) -> None:
    assert [row["trial"] for row in swept.result["trials"]] == NAMES
    for row, (rank, block) in zip(swept.result["trials"], itertools.product(RANKS, BLOCKS), strict=True):
        assert (row["outcome"], row["step"], row["starts"]) == ("finished", 6, 1)
        assert (row["drafter.head_rank"], row["drafter.block_length"], row["cost"]["block"]) == (rank, block, block)
        accept = row["one_minus_tv"]
        assert len(accept) == block
        assert 1 <= row["tau"] <= 1 + block
        cost = row["cost"]
        assert row["predicted_tokens_per_second"] == pytest.approx(2 * row["tau"] / (cost["draft"] + cost["verify"]))
        config = json.loads((Path(row["drafter"]) / "config.json").read_text())
        assert (config["head"], config["confidence_markov"]) == (("none", False) if rank == 0 else ("markov", True))
    taus = {row["trial"]: row["tau"] for row in swept.result["trials"]}
    assert swept.result["best"] == max(taus, key=lambda name: taus[name])


def test_the_decay_follows_the_block(swept: Swept) -> None:
    for block in BLOCKS:
        facts = json.loads((swept.shop.stored / "runs" / f"first.head_rank8-block_length{block}" / "run.json").read_text())
        assert facts["settings"]["decay"] == pytest.approx(4 * block / 7, abs=1e-5)


def test_the_command_of_a_trial_trains_the_same_drafter_bit_for_bit(swept: Swept) -> None:
    name = NAMES[-1]
    words = shlex.split(swept.trial(name)["command"])
    assert words[:3] == ["python", "-m", "pipelines.train"]
    again = finished(start("train", [*words[3:], "tracking=none"]))
    assert (Path(again["drafter"]) / "model.safetensors").read_bytes() == swept.shop.weights("first", name)


def test_nothing_is_done_twice(swept: Swept) -> None:
    before = contents(swept.shop.stored)
    result = finished(start("sweep", ["--resume", "sweep=first", f"output={swept.shop.output}"]))
    assert contents(swept.shop.stored) == before
    assert [row["seconds"] for row in result["trials"]] == [row["seconds"] for row in swept.result["trials"]]


def test_best_names_the_winner_and_its_drafter(swept: Swept, here: Here) -> None:
    code, output, _ = here.run("sweep", ["mode=best", "sweep.name=first", f"output={swept.shop.output}"])
    assert code == 0
    best = result_of(output)
    assert best["trial"] == swept.result["best"]
    assert (Path(best["drafter"]) / "model.safetensors").is_file()
    assert best["trial"] in output


@pytest.mark.slow
def test_a_trial_is_trained_longer(swept: Swept) -> None:
    options = ["+experiment=from_sweep", "sweep=first", "trial=best", f"output={swept.shop.output}", "train.steps=8", "tracking=none"]
    result = finished(start("train", options))
    best = swept.trial(swept.result["best"])
    facts = json.loads((Path(result["drafter"]).parent / "run.json").read_text())
    before = json.loads((Path(best["drafter"]).parent / "run.json").read_text())
    assert result["steps_now"] == 8
    assert facts["drafter"] == before["drafter"]
    assert {key for key, value in facts["settings"].items() if value != before["settings"][key]} == {"steps"}


def test_the_commands_on_the_page_find_the_sweep_from_anywhere(swept: Swept, here: Here) -> None:
    shown = [line for line in Page.of(swept.folder / "index.html").codes if "from_sweep" in line or "--resume" in line]
    assert len(shown) == 2
    for command in shown:
        words = shlex.split(command)
        assert f"output={swept.shop.output}" in words
    longer = shlex.split(shown[1].replace("NUMBER", "8").replace("trial=best", "trial=nosuch"))
    assert NAMES[0] in here.refused("train", longer[3:])


def test_wandb_has_the_trials_as_one_group_and_a_summary(swept: Swept) -> None:
    runs = offline_runs(swept.folder)
    assert {run["name"] for run in runs} == {*NAMES, "first"}
    assert len({run["id"] for run in runs}) == len(NAMES) + 1
    assert {run["group"] for run in runs} == {"first"}
    for run in runs:
        if run["name"] in NAMES:
            record = swept.shop.record("first", run["name"])
            assert [row["loss"] for row in run["rows"] if "loss" in row] == [row["loss"] for row in record.rows if "loss" in row]
            assert run["config"]["drafter.head_rank"] == swept.trial(run["name"])["drafter.head_rank"]
            assert run["summary"]["tau"] == pytest.approx(swept.trial(run["name"])["tau"])
        else:
            assert {"trials", "heat-tau", "heat-speed", "parallel"} <= {key.partition(".")[0] for key in run["summary"]}


def test_tensorboard_has_every_row(swept: Swept) -> None:
    for name in NAMES:
        files = list((swept.folder / "tensorboard" / name).glob("events*"))
        assert files
        assert b"heldout/tau_teacher_forced" in b"".join(path.read_bytes() for path in files)


def test_the_wandb_sweep_file_leads_to_the_same_trainings(swept: Swept) -> None:
    sweep = yaml.safe_load((swept.folder / "wandb-sweep.yaml").read_text())
    assert sweep["method"] == "grid"
    assert sweep["parameters"] == {"drafter.head_rank": {"values": [0, 8]}, "drafter.block_length": {"values": [2, 3]}}
    assert sweep["metric"]["name"] in swept.shop.record("first", NAMES[0]).rows[-1]
    command = sweep["command"]
    assert (command[0], command[1:4], command[-1]) == ("${env}", ["python", "-m", "pipelines.train"], "${args_no_hyphens}")
    name, drawn_values = NAMES[-1], ["drafter.head_rank=8", "drafter.block_length=3"]
    by_agent = [*command[4:-1], *drawn_values]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_RUN_ID", "abc")
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base=None):
            agent = OmegaConf.to_container(compose("train", by_agent), resolve=True)
            trial = OmegaConf.to_container(compose("train", shlex.split(swept.trial(name)["command"])[3:]), resolve=True)
    assert isinstance(agent, dict)
    assert isinstance(trial, dict)
    assert agent.pop("run") == {"name": "first.abc"}
    trial.pop("run")
    assert agent == trial


# Killed, failing, stopped early


def trial_processes(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ImplicitFunc" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_killed_sweep_goes_on_and_loses_nothing(swept: Swept) -> None:
    shop, name = swept.shop, "killed"
    process = start("sweep", shop.sweep(name, "train.checkpoint_every=1"))
    wait_until(lambda: any(shop.record(name, trial).finished for trial in NAMES), process)
    process.kill()
    process.communicate()
    done = {trial: contents(shop.stored / "runs" / f"{name}.{trial}") for trial in NAMES if shop.record(name, trial).finished}
    assert 0 < len(done) < len(NAMES), "killed while there was more to do"
    result = finished(start("sweep", ["--resume", f"sweep={name}", f"output={shop.output}"]))
    assert [row["outcome"] for row in result["trials"]] == ["finished"] * 4
    for trial in NAMES:
        assert shop.weights(name, trial) == shop.weights("first", trial), trial
    for trial, before in done.items():
        assert contents(shop.stored / "runs" / f"{name}.{trial}") == before, trial
    told = offline_runs(shop.folder_of(name))
    for trial in NAMES:
        runs = [run for run in told if run["name"] == trial]
        assert len({run["id"] for run in runs}) == 1, "parts of one run meet when they are synced"
        steps = [row["_step"] for row in runs[-1]["rows"] if "loss" in row]
        assert steps == [row["step"] for row in shop.record(name, trial).rows if "loss" in row]


def test_a_trial_whose_process_is_killed_is_tried_again_and_sigterm_ends_the_sweep(shop: SweepShop) -> None:
    long = ["train.steps=20000", "train.checkpoint_every=10", "train.log_every=10", "train.score_every=10000", "sweep.serving=null"]
    one = ["sweep.space.drafter.head_rank=[8]", "sweep.space.drafter.block_length=[2]", "tracking=none"]
    process, name = start("sweep", shop.sweep("struck", *long, *one)), "head_rank8-block_length2"
    wait_until(lambda: shop.record("struck", name).step >= 20, process)
    struck = trial_processes(process)
    assert len(struck) == 1
    struck[0].kill()
    wait_until(lambda: shop.record("struck", name).starts == 2 and shop.record("struck", name).step >= 20, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 143, errors
    assert result_of(output)["trials"][0]["outcome"] == "waiting"
    trial = Book.open(shop.folder_of("struck")).trials[name]
    assert len(trial.failures) == 1
    assert "its process ended" in trial.failures[0]


def test_a_trial_that_cannot_work_is_tried_again_then_reported_and_the_others_are_kept(shop: SweepShop) -> None:
    space = ["sweep.space.drafter.head_rank=null", "sweep.space.drafter.block_length=[2]", "+sweep.space.train.learning_rate=[1e30,1e-3]"]
    options = shop.sweep("failing", *space, "sweep.retries=1", "sweep.serving=null", "tracking=none", "drafter.head_rank=8")
    result = finished(start("sweep", options), code=1)
    bad, good = result["trials"]
    assert (bad["outcome"], bad["starts"], len(bad["failures"])) == ("failed", 2, 2)
    assert "is not finite" in bad["why"]
    assert (good["outcome"], good["failures"]) == ("finished", [])
    assert result["best"] == good["trial"]
    page = Page.of(shop.folder_of("failing") / "index.html")
    assert "is not finite" in page.text


@pytest.mark.slow
def test_trials_of_several_workers_are_never_starved_by_their_drivers(shop: SweepShop) -> None:
    options = ["workers.count=2", "cluster.cpus=2", "sweep.concurrency=2", "train.micro_batch=1", "sweep.serving=null", "tracking=none"]
    result = finished(start("sweep", shop.sweep("pairs", *options, "sweep.space.drafter.head_rank=[8]")))
    assert [(row["outcome"], row["starts"]) for row in result["trials"]] == [("finished", 1)] * 2
    assert all(row["store_bytes"] > 0 for row in result["trials"])


@pytest.mark.slow
def test_trials_that_would_cost_too_much_are_left_out(shop: SweepShop) -> None:
    options = ["sweep.constraints.draft_ms=1e-6", "tracking=none"]
    result = finished(start("sweep", shop.sweep("dear", *options)))
    assert {row["outcome"] for row in result["trials"]} == {"left out"}
    assert all("sweep.constraints.draft_ms" in row["why"] for row in result["trials"])
    assert not list((shop.stored / "runs").glob("dear.*"))


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


@pytest.mark.slow
def test_a_sweep_with_early_stopping_lets_the_better_half_go_on(shop: SweepShop) -> None:
    space = ["sweep.space.drafter.head_rank=null", "sweep.space.drafter.block_length=[3]", "drafter.head_rank=8"]
    rates = ["+sweep.space.train.learning_rate=[1e-2,1e-9,1e-8,5e-3]", "train.steps=30", "train.score_every=10"]
    early = ["sweep.early_stopping={grace_steps:10,factor:2}", "sweep.serving=null", "tracking=none"]
    result = finished(start("sweep", shop.sweep("asha", *space, *rates, *early)))
    outcomes = {row["train.learning_rate"]: (row["outcome"], row["step"]) for row in result["trials"]}
    assert outcomes[1e-2] == ("finished", 30)
    assert outcomes[1e-9] == outcomes[1e-8] == ("stopped", 10)


# One cache, read once


def test_a_second_sweep_fetches_nothing_that_the_node_holds(shop: SweepShop, s3: S3Server, tmp_path: Path) -> None:
    local = ObjectStore(StorageSettings(str(shop.stored / "cache")))
    remote = s3.store("sweeps")
    for key in local.list(""):
        remote.put(f"tiny_llama/jsonl/cache/{key}", local.get(key))
    shard_bytes = sum(local.size(key) for key in local.list("shards/"))
    with proxy(s3) as between:
        on_s3 = ["storage=s3", f"storage.root={remote.settings.root}", f"storage.endpoint_url={between.server.endpoint_url}"]
        more = [*on_s3, f"train.disk_cache={tmp_path / 'disk'}", "train.disk_cache_gib=0.1", "sweep.serving=null", "tracking=none"]
        one = "sweep.space.drafter.head_rank=[8]"

        def fetched() -> int:
            return sum(count for path, count in between.fetched.items() if "/shards/" in path)

        first = finished(start("sweep", shop.sweep("remote", *more, one)))
        once = fetched()
        assert 0 < once <= shard_bytes, "two trials fetched every sample once at most"
        told = sum(row["store_bytes"] for row in first["trials"])
        assert told == once, "the dashboard tells what the server saw"
        assert first["trials"][1]["store_bytes"] == 0
        assert first["trials"][1]["disk_bytes"] >= first["trials"][0]["store_bytes"]
        second = finished(start("sweep", shop.sweep("remote2", *more, one)))
        assert fetched() == once, "the second sweep fetched no byte of a shard"
        assert all(row["store_bytes"] == 0 and row["disk_bytes"] > 0 for row in second["trials"])


# What is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("+sweep.space.drafter.hed_rank=[1]", ["sweep.space.drafter.hed_rank"]),
        ("+sweep.space.train.loss=[1]", ["sweep.space.train.loss", "ce"]),
        ("sweep.space.drafter.head_rank=[]", ["head_rank", "no values"]),
        ("sweep.space.drafter.head_rank=7", ["head_rank", "list of values"]),
        ("sweep.space.drafter.head_rank=1..9", ["sweep.search=grid", "random"]),
        ("sweep.space.drafter.block_length=[3,0]", ["head_rank0-block_length0", "block_length"]),
        ("sweep.space.drafter.head_rank=9..1", ["head_rank", "lower"]),
        ("sweep.search=random", ["sweep.trials"]),
        ("sweep.serving=null sweep.objective=speed", ["sweep.serving"]),
        ("sweep.name=a/b", ["sweep.name"]),
        ("mode=best sweep.name=nosuch", ["nosuch", "first"]),
        ("train.follow=true", ["train.follow"]),
        ("train.steps=7", ["settings.steps", "sweep.name"]),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(swept: Swept, here: Here, given: str, words: list[str]) -> None:
    name = [] if "sweep.name" in given else ["sweep.name=first"]
    told = here.refused("sweep", [*swept.shop.sweep("first"), "sweep.serving.repeats=1", *name, *given.split()], swept.shop.stored)
    for word in words:
        assert word in told, told


def test_train_refuses_a_sweeps_experiment_and_an_unknown_trial(swept: Swept, here: Here) -> None:
    output = f"output={swept.shop.output}"
    assert "pipelines.sweep" in here.refused("train", ["+experiment=rank_by_block", output])
    assert NAMES[0] in here.refused("train", ["+experiment=from_sweep", "sweep=first", "trial=nosuch", output])


# Parts


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


def test_without_optuna_the_user_is_told(swept: Swept, here: Here) -> None:
    here.patch.setitem(sys.modules, "optuna", None)
    told = here.refused("sweep", swept.shop.sweep("guided", "sweep.search=optuna", "sweep.trials=2", "sweep.serving=null"))
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


# The page


class Page(HTMLParser):
    """What a browser would show, ask for and run."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.codes: list[str] = []
        self.text = ""

    @classmethod
    def of(cls, path: Path) -> "Page":
        page = cls()
        page.feed(path.read_text())
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "xlink:href") and not (value or "").startswith("#")
        ]
        if tag == "code":
            self.codes.append("")
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append(dict(attrs).get("data-value") or "")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.codes and not self.codes[-1]:
            self.codes[-1] = data


def made_up(count: int = 6, name: str = "made_up", running: bool = True) -> tuple[SweepFacts, dict[str, Result]]:
    """A sweep in the middle of its work, with every outcome there is."""
    draw, outcomes = (
        np.random.default_rng(0),
        ["finished", "finished", "stopped", "failed", "left out", "running" if running else "finished"],
    )
    found = {}
    for index in range(count):
        rank, block = (0, 64, 256)[index % 3], (3, 7)[index // 3 % 2]
        outcome: Any = outcomes[index % len(outcomes)]
        values = {"drafter.head_rank": rank, "drafter.block_length": block}
        trial = Trial(
            f"head_rank{rank}-block_length{block}",
            values,
            f"run{index}",
            10_000 * (rank + 1),
            ServingCost(8, block, 0.01, 0.02, 0.02),
            "python -m x",
        )
        trial.outcome, trial.failures = outcome, ["<script>alert(1)</script> & died"] if outcome == "failed" else []
        trial.why = "too <b>slow</b>" if outcome == "left out" else ""
        record = TrialRecord(seconds=10.0 * index, starts=1)
        if outcome != "left out":
            for step in (100, 200, 300):
                tv = {f"heldout/one_minus_tv@{k + 1}": float(draw.uniform(0.2, 0.4)) for k in range(block)}
                record.add(
                    {
                        "step": step,
                        "heldout/tau_teacher_forced": 1.2 + step / 1000 + 0.05 * index,
                        "store_bytes": 1e6,
                        "disk_bytes": 2e6,
                        **tv,
                    }
                )
        found[trial.name] = Result(trial, record)
    facts = SweepFacts(
        name,
        "tiny",
        "corpus",
        {"root": "/somewhere"},
        [],
        ["drafter.head_rank", "drafter.block_length"],
        "grid",
        "abc",
        "tau",
        "measured",
        "now",
    )
    return facts, found


def test_the_page_needs_nothing_from_outside_and_shows_every_trial(tmp_path: Path) -> None:
    facts, found = made_up()
    page = Page.of(write_dashboard(facts, found, tmp_path, 60, 15, final=False))
    assert page.links == []
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert "://" not in re.sub(r"http://www\.w3\.org\S*", "", (tmp_path / "index.html").read_text())
    cells = [row for row in page.rows if row]
    assert {row[0]: row[2] for row in cells} == {name: result.trial.outcome for name, result in found.items()}
    assert "<script>alert(1)</script> & died" in page.text, "what failed is told, as text"
    assert page.tags.count("script") == 1
    assert "location.reload" in (tmp_path / "index.html").read_text()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_the_table_sorts_in_a_browser(tmp_path: Path) -> None:
    facts, found = made_up(running=False)
    path = write_dashboard(facts, found, tmp_path, 60, 0, final=False)
    click = "<script>document.querySelectorAll('#trials th button')[1].click()</script></body>"
    path.write_text(path.read_text().replace("</body>", click))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom", f"file://{path}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    page = Page()
    page.feed(shown)
    taus = [row[1] for row in page.rows if row]
    scored = [float(tau) for tau in taus if tau]
    assert scored == sorted(scored, reverse=True)
    assert taus[-1] == "", "what has no figure comes last"
    assert 'aria-sort="descending"' in shown


def test_the_finished_page_stays_as_it_is_and_leaves_pictures(tmp_path: Path) -> None:
    facts, found = made_up(running=False)
    page = write_dashboard(facts, found, tmp_path, 60, 0, final=True).read_text()
    assert "location.reload" not in page
    assert "http-equiv" not in page
    for name in ("heat-tau", "heat-speed", "learning", "acceptance", "parallel"):
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [0, 1])
def test_a_page_with_hardly_anything_on_it(tmp_path: Path, count: int) -> None:
    facts, found = made_up(count)
    assert write_dashboard(facts, found, tmp_path, 0, 15, final=True).is_file()


def test_the_best_is_the_finished_trial_with_the_highest_objective() -> None:
    _, found = made_up()
    best = best_of(found.values(), "tau")
    assert best is not None
    assert best.trial.name == list(found)[1]
    slow = replace(found[best.trial.name], trial=replace(best.trial, cost=ServingCost(8, 3, 10, 10, 1)))
    by_speed = best_of([*(result for result in found.values() if result is not best), slow], "speed")
    assert by_speed is not None
    assert by_speed.trial.name == next(iter(found))
    assert best_of([], "tau") is None


def test_rows_of_a_record_come_again_after_a_restart_once() -> None:
    record = TrialRecord()
    for row in (
        {"step": 2, "loss": 3.0},
        {"step": 4, "loss": 2.0},
        {"step": 4, "heldout/tau_teacher_forced": 1.5},
        {"step": 6, "loss": 1.0},
    ):
        record.add(row)
    record.drop_after(4)
    for row in ({"step": 6, "loss": 1.1, "store_bytes": 5.0}, {"step": 4, "loss": 2.1, "store_bytes": 7.0}):
        record.add(row)
    assert [(row["step"], row.get("loss")) for row in record.rows] == [(2, 3.0), (4, 2.1)]
    assert record.total("store_bytes") == 7.0
    assert record.scores == []


def test_a_dashboard_of_one_field_draws_one_row() -> None:
    facts, found = made_up()
    one = [replace(result, trial=replace(result.trial, values={"drafter.head_rank": index})) for index, result in enumerate(found.values())]
    page = dashboard(replace(facts, dimensions=["drafter.head_rank"]), one, 0, 0)
    assert [drawing.name for row in page.figures for drawing in row] == ["heat-tau", "heat-speed", "learning", "acceptance"]
