"""Caching with real Ray actors: every row once, skipped rows with their reasons, and producers and ledgers that are killed."""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle
from s3_proxy import Fault, proxy
from s3_server import S3Server
from safetensors.torch import load_file, save_file
from storage_cases import to_bf16
from tiny_models import write_tiny_model

from actors import caching
from actors.answers import AnswerStore, write_part
from actors.caching import ProducerActor, run_cache
from actors.cluster import ClusterSettings, cluster
from actors.engines.base import Captured, EngineSettings
from actors.engines.hf import HfEngine
from actors.errors import ActorError
from actors.ledger import LedgerSettings, LedgerStatus
from actors.producer import ByteBudget
from actors.rows import CacheRecipe, ProducerSettings, batches
from corpus.answers import AnsweredRow
from corpus.template import ChatTemplate
from storage import object_store
from storage.commits import read_commits
from storage.contract import Capture, Contract, ensure_contract
from storage.errors import StorageUnavailable
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.reader import SampleReader
from storage.sample import Sample
from storage.shard import verify_shard
from storage.target_files import target_identity

LAYER_IDS = (0, 3, 5)
MAX_LENGTH = 48
LEASES = LedgerSettings(lease_rows=4, lease_seconds=20.0)
POISON = 9  # token id whose embedding is NaN in the poisoned model
DEADLY = 8


@pytest.fixture(scope="module")
def running_ray(s3: S3Server) -> Iterator[None]:
    """Ray for this module; started after the S3 server, so that its workers inherit the credentials."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test's classes
    with cluster(ClusterSettings("local", cpus=4)):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in which one token's embedding is NaN."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_recipe(model: Path, root: ObjectStore, **settings: object) -> CacheRecipe:
    capture = Capture(layer_ids=LAYER_IDS, max_length=MAX_LENGTH, codec="lossless")
    recipe = CacheRecipe(
        cache=root.child("cache"),
        answers=root.child("answers"),
        contract=Contract(target_identity(model, "tiny"), capture),
        engine=EngineSettings(str(model), LAYER_IDS, engine="hf", dtype="float32", max_length=MAX_LENGTH, batch_tokens=100),
        mask_token_id=ChatTemplate(model).vocabulary()["<|reserved_0|>"],
        stop_ids=ChatTemplate(model).stop_ids,
        settings=ProducerSettings(producers=2, shard_bytes=30_000, **settings),
    )
    ensure_contract(recipe.cache, recipe.contract)
    return recipe


def answer(recipe: CacheRecipe, name: str, seed: int, tokens: int = 20, reason: str = "stop", holds: int | None = None) -> AnsweredRow:
    """A row of random ids that ends with the stop token; `holds` is put into its answer."""
    ids = np.random.default_rng(seed).integers(10, 300, tokens)
    if holds is not None:
        ids[-2] = holds
    if reason == "stop":
        ids[-1] = recipe.stop_ids[0]
    return AnsweredRow(name, 0, "test", "chat", ids[:6], ids[6:], reason)


def add_answers(recipe: CacheRecipe, rows: list[AnsweredRow]) -> int:
    """Append rows as one part; returns how many there are in all."""
    store = AnswerStore(recipe.answers)
    store.register(write_part(recipe.answers, rows, {}, "test"), 1.0)
    return store.rows


def ignore(status: LedgerStatus) -> None:
    pass


def cached_samples(recipe: CacheRecipe) -> dict[str, Sample]:
    manifest = Manifest.from_commits(read_commits(recipe.cache))
    with SampleReader(recipe.cache, recipe.contract, manifest) as reader:
        return {sample.row_id: sample for sample in reader.stream(range(len(manifest)))}


def check_whole(recipe: CacheRecipe, rows: list[AnsweredRow], skipped: dict[str, str]) -> None:
    """Every row is in exactly one commit; the cached ones hold the states of exactly their tokens; shards are whole."""
    commits = read_commits(recipe.cache)
    indices = [entry.index for commit in commits for shard in commit.shards for entry in shard.entries]
    indices += [row.index for commit in commits for row in commit.skipped]
    assert sorted(indices) == list(range(len(rows)))
    for commit in commits:
        for shard in commit.shards:
            verify_shard(recipe.cache, shard)
        for row in commit.skipped:
            assert rows[row.index].row_id == row.row_id
            assert skipped[row.row_id] in row.reason
    samples = cached_samples(recipe)
    assert set(samples) == {row.row_id for row in rows} - set(skipped)
    engine = HfEngine(recipe.engine)
    for row in rows:
        if row.row_id in samples:
            sample, ids = samples[row.row_id], [*row.prompt_ids.tolist(), *row.answer_ids.tolist()]
            (states,) = engine.prefill([ids])
            assert sample.input_ids.tolist() == ids
            assert sample.spans.tolist() == [[6, len(ids)]]
            assert sample.last_rows.tolist() == list(range(5, len(ids) - 1))
            assert_same_states(sample.context, to_bf16(states.context.numpy()))
            assert_same_states(sample.last_hidden, to_bf16(states.last_hidden.numpy()[5:-1]))


def assert_same_states(stored: np.ndarray, computed: np.ndarray) -> None:
    """Equal bits, but for the few values that two processes' float32 products put on either side of a rounding: those are neighbours."""
    assert (stored != computed).mean() < 0.01
    assert np.abs(stored.astype(np.int32) - computed.astype(np.int32)).max() <= 1


def test_two_producers_cache_a_local_store_then_only_what_grows(running_ray, model, tmp_path):
    # A budget far below what one lease holds: a producer must not wait for itself.
    recipe = make_recipe(model, ObjectStore(StorageSettings(str(tmp_path))), pending_bytes=40_000)
    rows = [answer(recipe, f"row{n:02d}", n, tokens=8 + n) for n in range(22)]
    rows[2] = answer(recipe, "truncated", 100, reason="length")
    rows[5] = answer(recipe, "long", 101, tokens=MAX_LENGTH + 1)
    rows[7] = answer(recipe, "masked", 102, holds=recipe.mask_token_id)
    rows[8] = answer(recipe, "poisoned", 103, holds=POISON)
    rows[13] = answer(recipe, "fits", 104, tokens=MAX_LENGTH)
    rows[14] = answer(recipe, "empty", 105, tokens=7)
    rows[15] = AnsweredRow("failed", 0, "test", "chat", rows[0].prompt_ids, [], "failed", "no room")
    skipped = {
        "truncated.0": "truncated",
        "long.0": "longer than max_length",
        "masked.0": "holds the mask token",
        "poisoned.0": "NaN or infinite",
        "empty.0": "empty",
        "failed.0": "failed",
    }
    seen: list[LedgerStatus] = []
    status, reports = run_cache(recipe, add_answers(recipe, rows), LEASES, seen.append)
    assert (status.rows, status.done, status.cached, status.skipped, status.failed) == (22, 22, 16, 6, ())
    assert len(reports) == 2
    assert sum(report["tokens"] for report in reports) == status.tokens + 20  # the poisoned row's too
    assert [s.done for s in seen] == sorted(s.done for s in seen)
    check_whole(recipe, rows, skipped)

    # Again: nothing to do, no producer starts, no object changes.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cache/[cs]*/*")}
    again, reports = run_cache(recipe, len(rows), LEASES, ignore)
    assert (again, reports) == (dataclasses.replace(status, commits=0), [])
    # A grown corpus: only what is new.
    rows += [answer(recipe, f"new{n}", 200 + n) for n in range(3)]
    grown, reports = run_cache(recipe, add_answers(recipe, rows[22:]), LEASES, ignore)
    assert (grown.rows, grown.done, grown.cached) == (25, 25, 19)
    assert sum(report["tokens"] for report in reports) == 60
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cache/[cs]*/*")}
    assert before.items() < after.items()
    check_whole(recipe, rows, skipped)


def processes(kind: str) -> list[psutil.Process]:
    """Ray worker processes of our own Ray that hold an actor of that class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [""])[0].startswith(f"ray::{kind}"):
                found.append(process)
        except psutil.Error:
            continue
    return found


class InParts(ProducerActor):
    """Sends even these small shards in several parts."""

    def __init__(self, name: str, recipe: CacheRecipe) -> None:
        object_store.MULTIPART_BYTES = 10_000
        super().__init__(name, recipe)


def unfinished_uploads(store: ObjectStore) -> list[str]:
    """Keys of multi-part uploads that were neither finished nor aborted."""
    bucket, _, prefix = store.settings.root.removeprefix("s3://").partition("/")
    listed = store._connection.filesystem().call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
    return [upload["Key"] for upload in listed.get("Uploads", [])]


def test_every_row_is_cached_once_on_s3_though_producers_and_the_ledger_are_killed(running_ray, model, s3, monkeypatch):
    """Real processes, killed at the very request that they send to the store, before or after it is carried out."""
    monkeypatch.setattr(caching, "TargetProducer", ray.remote(max_restarts=0)(InParts))
    earlier = {process.pid for process in processes("Ledger")}
    together: list[int] = []
    left: list[list[str]] = []

    def kill_ledger() -> None:
        deadline = time.monotonic() + 60
        while not together and time.monotonic() < deadline:  # else it has just been killed, and is not back yet
            for process in processes("Ledger"):
                if process.pid not in earlier:
                    process.kill()
                    together.append(process.pid)
            time.sleep(0.02)

    with proxy(s3) as through:
        recipe = make_recipe(model, through.server.store("killed"))
        rows = [answer(recipe, f"row{n:03d}", n, tokens=40) for n in range(80)]
        through.faults = [
            Fault("killed", "POST", r"/shards/.*\?uploads"),  # a producer, before its upload
            Fault("killed", "PUT", "/shards/.*partNumber=2"),  # in the middle of it
            Fault("killed after", "POST", r"/shards/.*\?uploadId"),  # when the shard is there, and no commit
            Fault("killed", "PUT", "/commits/"),  # the ledger, before its commit
            Fault("killed after", "PUT", "/commits/", also=lambda: left.append(unfinished_uploads(s3.store("killed")))),  # and after it
            Fault("killed", "HEAD", "/shards/", also=kill_ledger),  # both
        ]
        status, reports = run_cache(recipe, add_answers(recipe, rows), LEASES, ignore)
        assert through.hits == {"killed": 4, "killed after": 2}
    assert len(together) == 1
    assert (status.done, status.cached, status.failed) == (80, 80, ())
    assert len(reports) == 2
    assert max(commit.epoch for commit in read_commits(s3.store("killed/cache"))) == 4
    assert left[0], "a producer that was killed in the middle of an upload leaves its parts behind"
    assert unfinished_uploads(s3.store("killed")) == []
    check_whole(dataclasses.replace(recipe, cache=s3.store("killed/cache")), rows, {})


class DeadlyEngine(HfEngine):
    """Takes its whole process along when it meets a certain token."""

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        if any(DEADLY in row for row in rows):
            os._exit(1)
        return super().prefill(rows)


class DeadlyProducer(ProducerActor):
    def __init__(self, name: str, recipe: CacheRecipe) -> None:
        super().__init__(name, recipe)
        self.source.engine = DeadlyEngine(recipe.engine)


@pytest.mark.slow
def test_a_row_that_kills_its_producer_is_reported_and_the_rest_is_cached(running_ray, model, tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "TargetProducer", ray.remote(max_restarts=0)(DeadlyProducer))
    recipe = make_recipe(model, ObjectStore(StorageSettings(str(tmp_path))))
    rows = [answer(recipe, f"row{n:02d}", n, holds=DEADLY if n == 6 else 11) for n in range(12)]
    status, _ = run_cache(recipe, add_answers(recipe, rows), LEASES, ignore)
    assert (status.done, status.cached, status.open) == (11, 11, 0)
    (failure,) = status.failed
    assert (failure.start, failure.stop) == (6, 7)
    assert failure.reason.startswith("its producer died: ")
    assert set(cached_samples(recipe)) == {row.row_id for row in rows} - {"row06.0"}


@pytest.mark.slow
def test_expired_credentials_stop_the_job_with_one_line_and_the_next_run_goes_on(running_ray, model, s3):
    with proxy(s3) as through:
        root = ObjectStore(dataclasses.replace(through.server.settings("expired"), attempts=2))
        recipe = make_recipe(model, root)
        rows = [answer(recipe, f"row{n:02d}", n) for n in range(12)]
        count = add_answers(recipe, rows)
        through.faults = [Fault("expired", "PUT", "shards", times=10**6)]
        with pytest.raises(StorageUnavailable, match="the S3 credentials have expired; renew them and run the same command again"):
            run_cache(recipe, count, LEASES, ignore)
        assert not read_commits(recipe.cache)
        through.faults = []
        status, _ = run_cache(recipe, count, LEASES, ignore)
        assert (status.cached, status.failed) == (12, ())
        check_whole(recipe, rows, {})


def test_an_engine_that_cannot_start_is_named_at_once(running_ray, model, tmp_path):
    recipe = make_recipe(model, ObjectStore(StorageSettings(str(tmp_path))))
    missing = dataclasses.replace(recipe, engine=dataclasses.replace(recipe.engine, layer_ids=(0,), model=str(tmp_path / "missing")))
    with pytest.raises(ActorError, match=r"producer-\d cannot start: .*missing"):
        run_cache(missing, add_answers(recipe, [answer(recipe, "row", 1)]), LEASES, ignore)
    assert not read_commits(recipe.cache)


def test_a_damaged_cache_is_named_before_any_actor_starts(running_ray, model, tmp_path):
    recipe = make_recipe(model, ObjectStore(StorageSettings(str(tmp_path))))
    recipe.cache.put("ledger.json", b"{")
    with pytest.raises(ActorError, match=r"ledger\.json is damaged"):
        run_cache(recipe, add_answers(recipe, [answer(recipe, "row", 1)]), LEASES, ignore)


# -- without Ray


def test_batches_hold_every_row_once_within_their_bounds(model, tmp_path):
    recipe = make_recipe(model, ObjectStore(StorageSettings(str(tmp_path))))
    lengths = [int(n) for n in np.random.default_rng(0).integers(8, 40, 50)] + [150]
    rows = [(index, answer(recipe, f"row{index}", index, tokens=length).masked()) for index, length in enumerate(lengths)]
    found = list(batches(rows, batch_tokens=100, batch_rows=5))
    assert sorted(index for batch in found for index, _ in batch) == list(range(51))
    sizes = [[lengths[index] for index, _ in batch] for batch in found]
    assert sizes[0] == [150]
    assert all(sum(size) <= 100 for size in sizes[1:])
    assert max(map(len, sizes)) == 5
    assert [length for size in sizes for length in size] == sorted(lengths, reverse=True)


def test_the_byte_budget_lets_through_what_fits_and_one_that_never_would():
    budget, passed, full = ByteBudget(100), [], []

    def take(amount: int) -> None:
        budget.take(amount, when_full=lambda: full.append(amount))
        passed.append(amount)

    take(60)
    assert not full
    for amount in (50, 500):
        held = budget.held
        thread = threading.Thread(target=take, args=(amount,), daemon=True)
        thread.start()
        time.sleep(0.1)
        assert (passed[-1], full[-1], budget.waiting) == (held, amount, True)
        budget.give(held)
        thread.join(timeout=10)
        assert (passed[-1], budget.held, budget.waiting) == (amount, amount, False)
