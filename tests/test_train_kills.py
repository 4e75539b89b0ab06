"""Training killed with -9 at random moments, twenty in all: a process, a Ray worker, the driver, a node. The weights are those of an
undisturbed run, bit for bit. And SIGTERM, which loses nothing at all."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from pipeline_runs import Workshop, run, start, write_cache, write_rows
from test_trainer import Make, Recording, random_cache, recipe_maker, tiny_target, trained, with_one_thread  # noqa: F401  # fixtures
from tiny_models import write_tiny_model

from actors import checkpointing
from actors.cluster import ClusterSettings, cluster
from actors.train_recipe import TrainRecipe
from actors.training import Workers, run_training
from storage.object_store import ObjectStore, StorageSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHANGES = {"checkpoint_every": 5, "score_every": 20, "log_every": 10, "ema": 0.9, "heldout_rows": 1}
ONE = Workers(1, 1, 0.0)


def same(recipe: TrainRecipe, whole: TrainRecipe) -> None:
    """Last and best checkpoint of both runs are equal; the runs are at their end."""
    for which in ("last", "best"):
        ours, theirs = (checkpointing.load(one.run, which) for one in (recipe, whole))
        assert ours is not None
        assert theirs is not None
        assert ours.standing == theirs.standing
        assert ours.tensors.keys() == theirs.tensors.keys()
        assert [name for name, tensor in theirs.tensors.items() if not torch.equal(ours.tensors[name], tensor)] == []


def train_in_process(recipe: TrainRecipe, ready: Any) -> None:
    torch.set_num_threads(1)
    worker = Recording(recipe)
    ready.set()
    worker.run()


def test_a_process_killed_twelve_times(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**CHANGES, "steps": 300, "checkpoint_every": 3}
    whole, recipe = make("whole", **changes), make("killed", **changes)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_train_kills"])  # imports take longer than all the rest
    ready = context.Event()

    def started_on(recipe: TrainRecipe) -> Any:
        ready.clear()
        process = context.Process(target=train_in_process, args=(recipe, ready))
        process.start()
        ready.wait()
        return process

    train, began = started_on(whole), time.monotonic()
    train.join()
    duration, dice, steps = time.monotonic() - began, random.Random(1), [0]
    for _ in range(12):
        train = started_on(recipe)
        train.join(timeout=dice.uniform(0, 0.08) * duration)
        train.kill()
        train.join()
        assert train.exitcode == -signal.SIGKILL, "killed while it was at work"
        steps.append(checkpointing.standing_of(recipe.run).step)
    assert len(set(steps)) > 4, f"the kills hit the run at different places: {steps}"
    train_in_process(recipe, ready)
    same(recipe, whole)


def kill(processes: Sequence[psutil.Process]) -> int:
    """How many of them were still there."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed


def training_workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayTrainWorker" in (process.cmdline() or [""])[0]:
                found.append(process)
    return found


@contextlib.contextmanager
def disturbing(recipe: TrainRecipe, times: int, disturb: Callable[[], int]) -> Iterator[list[int]]:
    """Call `disturb` that often, each time some moments after a new checkpoint; the steps after which it really killed somebody."""
    dice, at, end = random.Random(2), [], threading.Event()

    def body() -> None:
        step = 0
        while len(at) < times:
            while not end.is_set() and (reached := checkpointing.standing_of(recipe.run).step) <= step:
                time.sleep(0.05)
            time.sleep(dice.random())
            if end.is_set():
                return
            step = reached
            if disturb():
                at.append(step)

    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(body)
        try:
            yield at
        finally:
            end.set()
        disturbed.result()


def test_a_ray_worker_killed_three_times(make: Make, tmp_path: Path) -> None:
    changes = {**CHANGES, "steps": 300}
    whole, recipe = make("whole", **changes), make("killed", **changes)
    trained(whole)
    with cluster(ClusterSettings(cpus=1)), disturbing(recipe, 3, lambda: kill(training_workers())) as at:
        run_training(recipe, ONE, tmp_path / "scratch", lambda row: None)
    assert len(at) == 3, at
    same(recipe, whole)


def test_a_node_killed_twice(make: Make, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    changes = {**CHANGES, "steps": 300}
    whole, recipe = make("whole", **changes), make("killed", **changes)
    trained(whole)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    raylets = {nodes.add_node(num_cpus=1).all_processes["raylet"][0].process.pid for _ in range(3)}
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")

    def kill_node() -> int:
        """All processes of the node on which training runs."""
        hit = {process.ppid() for process in training_workers()} & raylets
        for raylet in map(psutil.Process, hit):
            kill([raylet, *raylet.children(recursive=True)])
        return len(hit)

    try:
        with disturbing(recipe, 2, kill_node) as at:
            run_training(recipe, ONE, tmp_path / "scratch", lambda row: None)
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert len(at) == 2, at
    same(recipe, whole)


# The driver, as a person runs it


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("shop"))
    write_tiny_model(shop.folder / "tiny llama", "llama")
    write_rows(shop.folder / "prompts.jsonl", [{"prompt": "What is 1?"}])
    write_rows(shop.folder / "heldout.jsonl", [{"prompt": "Name 2 colours."}])
    write_cache(shop, "supervised")
    return shop


STEPS = 1000  # workers go on for some seconds after their driver was killed
OPTIONS = [f"train.steps={STEPS}", "train.checkpoint_every=20", "train.score_every=500", "train.log_every=100", "train.ema=0.9"]


@pytest.fixture(scope="module")
def undisturbed(shop: Workshop) -> bytes:
    run("train", shop.overrides("train", *OPTIONS, "run.name=undisturbed", "tracking=none"))
    return weights(shop, "undisturbed")


def weights(shop: Workshop, name: str) -> bytes:
    return (shop.stored / "runs" / name / "drafter" / "model.safetensors").read_bytes()


def step_of(shop: Workshop, name: str) -> int:
    return checkpointing.standing_of(ObjectStore(StorageSettings(str(shop.stored / "runs" / name)))).step


def started(shop: Workshop, name: str) -> "subprocess.Popen[str]":
    """The job, once it has written another checkpoint."""
    before = step_of(shop, name)
    process = start("train", shop.overrides("train", *OPTIONS, f"run.name={name}"))
    while step_of(shop, name) <= before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


def test_the_driver_killed_three_times(shop: Workshop, undisturbed: bytes) -> None:
    dice, steps = random.Random(3), []
    for whole_family in (False, True, False):
        process = started(shop, "killed")
        time.sleep(0.3 * dice.random())
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        kill(family if whole_family else [])
        assert process.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(family, timeout=180)
        assert alive == [], "Ray and its workers go with the driver"
        steps.append(step_of(shop, "killed"))
    assert sorted(steps) == steps
    assert steps[-1] < STEPS
    result, _ = run("train", shop.overrides("train", *OPTIONS, "run.name=killed"))
    assert 0 < result["steps_now"] < STEPS
    assert weights(shop, "killed") == undisturbed
    folders = list((shop.stored / "runs" / "killed" / "wandb").glob("offline-run-*"))
    assert len(folders) == 4
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1, "one W&B run, continued"
    logged = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
    for name in ("git_revision", "weights_fingerprint", "heldout/one_minus_tv@1", "heldout/confidence_bias", "data_wait_share"):
        assert name.encode() in logged, name


def test_sigterm_loses_nothing(shop: Workshop, undisturbed: bytes) -> None:
    process = started(shop, "stopped")
    process.terminate()
    output, errors = process.communicate(timeout=120)
    step = step_of(shop, "stopped")
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    assert "result:" not in output
    assert errors.splitlines()[-1] == f"stopped at step {step} of {STEPS}: run the same command again to go on"
    result, _ = run("train", shop.overrides("train", *OPTIONS, "run.name=stopped"))
    assert result["steps_now"] == STEPS - step
    assert weights(shop, "stopped") == undisturbed
