"""Sweeps as a person runs them, on a tiny random target: a grid with its dashboard, its trackers and its commands; kills and failures;
several workers; what is fetched from a store."""

import itertools
import json
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from pipeline_runs import ROOT, Here, contents, result_of, start
from s3_proxy import proxy
from s3_server import S3Server
from sweep_runs import BLOCKS, NAMES, RANKS, Page, SweepShop, Swept, finished, make_sweep_shop, trial_processes, wait_until
from wandb_offline import offline_runs

from pipelines.sweep_trials import Book
from storage.object_store import ObjectStore, StorageSettings

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> SweepShop:
    return make_sweep_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def swept(shop: SweepShop) -> Swept:
    """One undisturbed sweep that the tests look at from all sides. Some options are typed twice, as a script that adds its own does."""
    twice = [f"output={shop.output}", "drafter.head_rank=4"]  # the latter is what trials differ in, too
    return Swept(shop, finished(start("sweep", shop.sweep("first", "sweep.tensorboard=true", *twice))))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


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
        facts = json.loads((swept.shop.run_of("first", f"head_rank8-block_length{block}") / "run.json").read_text())
        assert facts["settings"]["decay"] == pytest.approx(4 * block / 7, abs=1e-5)


def test_no_command_names_an_option_twice(swept: Swept) -> None:
    shown = Page.of(swept.folder / "index.html").codes
    commands = [*(row["command"] for row in swept.result["trials"]), *(line for line in shown if line.startswith("python -m"))]
    assert len(commands) > 2 * len(NAMES)
    for command in commands:
        keys = [word.partition("=")[0].lstrip("+") for word in shlex.split(command)[3:]]
        assert len(set(keys)) == len(keys), command


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


def test_a_killed_sweep_goes_on_and_loses_nothing(swept: Swept) -> None:
    shop, name = swept.shop, "killed"
    process = start("sweep", shop.sweep(name, "train.checkpoint_every=1"))
    wait_until(lambda: any(shop.record(name, trial).finished for trial in NAMES), process)
    process.kill()
    process.communicate()
    done = {trial: contents(shop.run_of(name, trial)) for trial in NAMES if shop.record(name, trial).finished}
    assert 0 < len(done) < len(NAMES), "killed while there was more to do"
    result = finished(start("sweep", ["--resume", f"sweep={name}", f"output={shop.output}"]))
    assert [row["outcome"] for row in result["trials"]] == ["finished"] * 4
    for trial in NAMES:
        assert shop.weights(name, trial) == shop.weights("first", trial), trial
    for trial, before in done.items():
        assert contents(shop.run_of(name, trial)) == before, trial
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
    struck = trial_processes(process.pid)
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
