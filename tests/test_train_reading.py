"""What training reads, and from where: a cache many times larger than the node, and one that still grows."""

import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from s3_server import S3Server
from storage_cases import sample
from test_trainer import LAYER_IDS, SETTINGS, Recording, contract, trained
from tiny_models import VOCABULARY, write_tiny_model

from actors.train_recipe import CHECKPOINTS, FOLLOWS, TrainRecipe
from drafters.config import config_from_target
from storage import follow
from storage.checkpoint import load_checkpoint
from storage.commits import Commit, lease_id, write_commit
from storage.contract import ensure_contract
from storage.follow import FollowSettings
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.shard import ShardWriter, encode_sample
from storage.target_files import read_model_config

MIB = 2**20
CAP = 3 * MIB // 2
ROWS = 30


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama")


def make_recipe(model: Path, cache: ObjectStore, run: ObjectStore, manifest_hash: str, **changes: object) -> TrainRecipe:
    drafter = config_from_target(
        read_model_config(model),
        len(LAYER_IDS),
        mask_token_id=VOCABULARY - 1,
        num_layers=1,
        block_length=4,
        head="markov",
        head_rank=8,
    )
    return TrainRecipe(cache, run, contract(), manifest_hash, str(model), drafter, replace(SETTINGS, **changes))  # type: ignore[arg-type]


def commit_rows(cache: ObjectStore, start: int, stop: int, tokens: int) -> None:
    case = contract()
    ensure_contract(cache, case)
    with ShardWriter(cache, case, 2 * MIB) as writer:
        for row in range(start, stop):
            item = sample(case, tokens + row % 7, row)
            writer.add(encode_sample(item, case), item.row_id, row)
        shards = writer.close()
    write_commit(cache, Commit(lease_id(start, stop), 1, start, stop, tuple(shards)))


def train_on_node(recipe: TrainRecipe, node: Path, log: Path) -> None:
    os.chdir(node)
    torch.set_num_threads(1)
    worker = Recording(recipe)
    worker.run()
    assert worker.disk_cache is not None
    log.write_text(f"{worker.disk_cache.fetched_bytes} {worker.disk_cache.hit_bytes}")


def bytes_on(node: Path) -> int:
    """What all files below a folder take on the disk."""
    total = 0
    for folder, _, files in os.walk(node):
        for file in files:
            try:
                total += os.stat(os.path.join(folder, file)).st_blocks * 512  # noqa: PTH116, PTH118
            except FileNotFoundError:
                continue
    return total


def test_training_from_ten_times_the_nodes_cap_leaves_no_more_than_the_cap(
    model: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core claim. All that a process can write to lies on the watched node: home, working folder, temporary files, disk cache."""
    cache, node = s3.store("large"), tmp_path / "node"
    commit_rows(cache, 0, 176, tokens=100)
    manifest = Manifest.current(cache)
    manifest.save(cache)
    assert manifest.lengths.sum() >= 10 * CAP
    recipe = make_recipe(
        model,
        cache,
        s3.store("run"),
        manifest.hash,
        steps=86,  # two epochs
        checkpoint_every=43,
        score_every=86,
        prefetch_mib=1,
        disk_cache=str(node / "disk cache"),
        disk_cache_gib=CAP / 2**30,
    )
    for name, folder in (("HOME", "home"), ("TMPDIR", "tmp"), ("XDG_CACHE_HOME", "home/cache")):
        (node / folder).mkdir(parents=True)
        monkeypatch.setenv(name, str(node / folder))
    process = multiprocessing.get_context("spawn").Process(target=train_on_node, args=(recipe, node, tmp_path / "log"))
    process.start()
    largest = 0
    while process.is_alive():
        largest = max(largest, bytes_on(node))
        time.sleep(0.002)
    process.join()
    assert process.exitcode == 0
    fetched, hits = map(int, (tmp_path / "log").read_text().split())
    assert fetched + hits >= 2 * 0.95 * manifest.lengths.sum(), "both epochs were read whole, but for the held-out rows"
    assert CAP / 2 < largest <= CAP
    assert bytes_on(node) <= CAP


def test_a_run_on_a_growing_cache_takes_the_same_steps_when_it_is_repeated_or_resumed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.0)
    cache = ObjectStore(StorageSettings(str(tmp_path / "cache")))
    commit_rows(cache, 0, 8, tokens=20)

    def recipe(name: str) -> TrainRecipe:
        run = ObjectStore(StorageSettings(str(tmp_path / name)))
        made = make_recipe(model, cache, run, FOLLOWS, steps=12, checkpoint_every=4, score_every=12)
        return replace(made, follow=FollowSettings(ROWS, 60.0))

    def grow() -> None:
        for start in (20, 8, 14):
            time.sleep(0.3)
            commit_rows(cache, start, {20: ROWS, 8: 14, 14: 20}[start], tokens=20)

    producer = threading.Thread(target=grow)
    producer.start()
    first = Recording(recipe("first"))
    first.run()
    producer.join()
    assert [row["epoch"] for row in first.rows if "epoch" in row] == [0] * 7 + [1] * 5  # 28 samples, 4 a step
    whole = load_checkpoint(first.recipe.run, CHECKPOINTS)[0]
    segments = first.recipe.run.list("follow/")
    assert len(segments) > 1, "training began before the cache was complete"

    repeated, resumed = recipe("repeated"), recipe("resumed")
    for again in (repeated, resumed):
        for key in segments:
            again.run.put(key, first.recipe.run.get(key))
    broken = Recording(resumed)
    broken.stop_at = 8
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    for again in (repeated, resumed):
        weights = trained(again)
        assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())
