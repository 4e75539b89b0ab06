"""Random faults over the real Ledger, Producers, engine and storage, in one process: who dies when is drawn from a seed.

    python tests/fault_schedules.py --schedules 220

A producer that dies does nothing more: from that moment each of its calls to storage, ledger or engine ends in `Killed`, and what it was
sending stays half sent. The ledger's
process is killed before or after it has done what it was asked, started anew, and asked again, as Ray does. A jump of the ledger's clock
takes leases from producers that go on working. Outages outlast every attempt. Some schedules write to S3 through the spoiling proxy.
"""

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from s3_proxy import Proxy, proxy
from s3_server import aws_environment, start
from safetensors.torch import load_file, save_file
from storage_cases import same
from tiny_models import write_tiny_model

from actors import producer as producer_module
from actors.answers import AnswerStore, write_part
from actors.engines.base import Captured, EngineSettings
from actors.engines.hf import HfEngine
from actors.ledger import Ledger, LedgerSettings, LedgerStatus
from actors.producer import ByteBudget, Producer
from actors.rows import CacheRecipe, ProducerSettings
from corpus.answers import AnsweredRow
from corpus.template import ChatTemplate
from storage import connection, object_store
from storage.commits import read_commits
from storage.contract import Capture, Contract, ensure_contract
from storage.errors import StorageUnavailable
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.reader import SampleReader
from storage.sample import Sample
from storage.shard import verify_shard
from storage.target_files import target_identity

ROWS, LEASE_ROWS = 26, 4
NAN, KILLER = 9, 8  # tokens: a NaN embedding; kills the engine's process
LAYER_IDS, MAX_LENGTH, ENGINE_LENGTH = (0, 3, 5), 60, 40
SETTINGS = LedgerSettings(LEASE_ROWS, lease_seconds=0.4, max_attempts=3)  # real seconds for heartbeats; the ledger's clock is ours


class Killed(BaseException):
    """The process of this producer is gone."""


@dataclass
class World:
    """What all schedules share: the rows, the engine, and what an undisturbed run stored."""

    recipe: CacheRecipe
    engine: HfEngine
    rows: list[AnsweredRow]
    expected: dict[str, Sample]
    lock: threading.Lock = field(default_factory=threading.Lock)


def make_world(folder: Path) -> World:
    """A tiny Llama, the cache of an undisturbed run, and 26 rows: one is NaN, one kills, one is longer than the engine's limit, two are
    truncated."""
    torch.set_num_threads(1)
    model = write_tiny_model(folder / "model", "llama", tied=False)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    root, template = ObjectStore(StorageSettings(str(folder / "quiet"))), ChatTemplate(model)
    engine = EngineSettings(str(model), LAYER_IDS, engine="hf", dtype="float32", max_length=ENGINE_LENGTH, batch_tokens=70)
    recipe = CacheRecipe(
        cache=root.child("cache"),
        answers=root.child("answers"),
        contract=Contract(target_identity(model, "tiny"), Capture(LAYER_IDS, MAX_LENGTH, "lossless")),
        engine=engine,
        mask_token_id=template.vocabulary()["<|reserved_0|>"],
        stop_ids=template.stop_ids,
        settings=ProducerSettings(shard_bytes=40_000, pending_bytes=60_000),
    )
    rows = [_row(n, recipe.stop_ids[0]) for n in range(ROWS)]
    AnswerStore(recipe.answers).register(write_part(recipe.answers, rows, {}, "test"), 1.0)
    ensure_contract(recipe.cache, recipe.contract)
    world = World(recipe, HfEngine(engine), rows, {})
    run_schedule(world, recipe.cache, Plan(random.Random(0), producers=1, quiet=True))
    world.expected = samples(recipe)
    return world


def _row(number: int, stop: int) -> AnsweredRow:
    ids = np.random.default_rng(number).integers(10, 300, ENGINE_LENGTH + 5 if number == 17 else 12 + number)
    ids[-1] = stop
    ids[7] = {3: NAN, 10: KILLER}.get(number, ids[7])
    return AnsweredRow(f"row{number:02d}", 0, "test", "chat", ids[:6], ids[6:], "length" if number in (5, 21) else "stop")


def samples(recipe: CacheRecipe) -> dict[str, Sample]:
    """All cached samples by row id."""
    manifest = Manifest.from_commits(read_commits(recipe.cache))
    with SampleReader(recipe.cache, recipe.contract, manifest) as reader:
        return {sample.row_id: sample for sample in reader.stream(range(len(manifest)))}


@dataclass
class Plan:
    """What goes wrong. `quiet`: nothing but what the rows themselves do."""

    draw: random.Random
    producers: int = 2
    quiet: bool = False
    deaths: int = 0
    ledger_kills: int = 0
    double_kills: int = 0
    jumps: int = 0
    outages: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, seed: int) -> "Plan":
        draw = random.Random(seed)
        counts = {name: draw.randrange(4) for name in ("deaths", "ledger_kills", "double_kills", "jumps", "outages")}
        return cls(draw, producers=draw.randint(1, 3), **counts)

    def count(self, what: str) -> None:
        with self.lock:
            self.hits[what] += 1

    def strikes(self, what: str, probability: float, moment: str = "") -> bool:
        """Whether the fault happens now, at any moment that is; each at most as often as planned."""
        with self.lock:
            if self.quiet or not getattr(self, what) or self.draw.random() > probability:
                return False
            setattr(self, what, getattr(self, what) - 1)
            self.hits[what] += 1
            return True


@dataclass
class Life:
    """Whether a producer's process still runs; it may end before or after any call."""

    plan: Plan
    kill_ledger: Callable[[], None]
    dead: bool = False
    budget: ByteBudget | None = None  # of the producer; its threads must not wait in it for the dead

    def pass_by(self, moment: str) -> None:
        if self.dead:
            raise Killed
        if self.plan.strikes("deaths", 0.06, moment):
            self.die(moment)
        if self.plan.strikes("double_kills", 0.03, moment):
            self.kill_ledger()
            self.die(moment)

    def die(self, moment: str) -> None:
        self.dead = True
        if self.budget:
            self.budget.limit = 1 << 60
            self.budget.give(0)
        self.plan.count(f"died {moment}")
        raise Killed


class Mortal:
    """Passes calls on for as long as its producer lives."""

    def __init__(self, inner: Any, life: Life, what: str) -> None:
        self._inner, self._life, self._what = inner, life, what

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self._life.pass_by(f"before {self._what}.{name}")
            if self._what == "storage" and self._life.plan.strikes("outages", 0.05):
                raise StorageUnavailable("the store did not answer properly")
            result = found(*arguments)
            self._life.pass_by(f"after {self._what}.{name}")
            return result

        return call


def mortal_uploads(store: ObjectStore, life: Life) -> ObjectStore:
    """The store, whose uploads end in the middle when their producer dies: a part is missing, or half a file lies there."""
    mortal = ObjectStore(store.settings)
    mortal._connection = store._connection
    s3, put_local = mortal._s3, mortal._put_local

    def call(method: str, key: str, **arguments: Any) -> Any:
        if life.dead:
            raise Killed
        if method == "upload_part":
            life.pass_by("mid storage.put")
        return s3(method, key, **arguments)

    def write(path: Path, data: bytes | bytearray | memoryview) -> None:
        try:
            life.pass_by("mid storage.put")
        except Killed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.dead.tmp").write_bytes(memoryview(data)[: len(data) // 2])
            raise
        put_local(path, data)

    mortal._s3, mortal._put_local = call, write  # type: ignore[method-assign]
    return mortal


class MortalEngine:
    """The shared engine; one token kills the process that runs it."""

    def __init__(self, world: World, life: Life) -> None:
        self.world, self.life = world, life

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        self.life.pass_by("before engine")
        if any(KILLER in row for row in rows):
            self.life.die("of the row that kills")
        with self.world.lock:
            captured = self.world.engine.prefill(rows)
        self.life.pass_by("after engine")
        return captured


class LedgerHost:
    """Stands for the ledger's Ray actor: killed, started anew, and asked again."""

    def __init__(self, cache: ObjectStore, plan: Plan) -> None:
        self.cache, self.plan, self.now, self.lock = cache, plan, 0.0, threading.RLock()
        self.duplicates = 0
        self.ledger = self._make()

    def _make(self) -> Ledger:
        return Ledger(self.cache, ROWS, SETTINGS, lambda: self.now)

    def kill(self) -> None:
        with self.lock:
            self.duplicates += self.ledger.status().duplicates
            self.ledger = self._make()

    def look(self) -> LedgerStatus:
        """The status, without anything happening."""
        with self.lock:
            return self.ledger.status()

    def release_all_but(self, alive: Collection[str]) -> None:
        """Take back what producers hold that are no more."""
        with self.lock:
            holders = {self.ledger._open[lease].holder for lease in self.ledger._leased}
            for name in holders - {None, *alive}:
                self.ledger.release_producer(str(name), "its producer died")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self.lock:
                if self.plan.strikes("jumps", 0.05):
                    self.now += 1.0
                if self.plan.strikes("ledger_kills", 0.04):
                    self.kill()
                result = getattr(self.ledger, name)(*arguments)
                if self.plan.strikes("ledger_kills", 0.04):
                    self.kill()
                    result = getattr(self.ledger, name)(*arguments)
                return result

        return call


def run_schedule(world: World, cache: ObjectStore, plan: Plan) -> tuple[LedgerStatus, Counter[str]]:
    """Cache all rows under the plan's faults, with new producers for those that died; what happened, counted."""
    host = LedgerHost(cache, plan)
    counts: Counter[str] = Counter()
    running: dict[threading.Thread, str] = {}

    def work(name: str, life: Life) -> None:
        try:
            recipe = replace(world.recipe, cache=Mortal(mortal_uploads(cache, life), life, "storage"))
            worker = Producer(name, recipe)
            worker.source.engine, life.budget = MortalEngine(world, life), worker.budget
            worker.run(Mortal(host, life, "ledger"))
        except Killed:
            plan.count("producers killed")
        except StorageUnavailable:
            plan.count("producers ended by an outage")
        finally:
            life.dead = True
            host.release_producer(name, "its producer died")

    deadline = time.monotonic() + 150
    # A ledger that is killed at the very end knows nothing of failed rows any more, and hands them out again.
    while running or host.look().open:
        assert time.monotonic() < deadline, f"{host.look()} after minutes"
        for thread in [thread for thread in running if not thread.is_alive()]:
            del running[thread]
        # A heartbeat that was on its way when its producer died may hold a lease.
        host.release_all_but(running.values())
        while host.look().open and len(running) < plan.producers:
            name = f"producer-{counts['producers started']}"
            counts["producers started"] += 1
            thread = threading.Thread(target=work, args=(name, Life(plan, host.kill)), daemon=True)
            running[thread] = name
            thread.start()
        time.sleep(0.005)
    status = host.look()
    counts["duplicates refused"] = host.duplicates + status.duplicates
    counts["ledgers started"] = host.ledger.epoch
    return status, counts + plan.hits


def check(world: World, cache: ObjectStore, failed: set[int]) -> Counter[str]:
    """Every row once: cached bit for bit as undisturbed, skipped with its reason, or reported as failed."""
    commits = read_commits(cache)
    cached = [entry for commit in commits for shard in commit.shards for entry in shard.entries]
    skipped = {row.index: row.reason for commit in commits for row in commit.skipped}
    assert sorted([entry.index for entry in cached] + list(skipped) + list(failed)) == list(range(ROWS))
    assert set(skipped) <= {3, 5, 21}
    assert all(("NaN" if index == 3 else "truncated") in reason for index, reason in skipped.items())
    for commit in commits:
        for shard in commit.shards:
            verify_shard(cache, shard)
    found = samples(replace(world.recipe, cache=cache))
    assert set(found) == {world.rows[entry.index].row_id for entry in cached}
    assert all(same(sample, world.expected[row_id]) for row_id, sample in found.items())
    return Counter({"rows cached": len(cached), "rows skipped": len(skipped), "rows failed": len(failed)})


def disturbed(world: World, cache: ObjectStore, seed: int) -> Counter[str]:
    """One schedule, then a second, undisturbed run that must bring everything which can be cached."""
    ensure_contract(cache, world.recipe.contract)
    status, counts = run_schedule(world, cache, Plan.of(seed))
    failed = {row for failure in status.failed for row in range(failure.start, failure.stop)}
    assert {10, 17} <= failed
    counts += check(world, cache, failed)
    status, _ = run_schedule(world, cache, Plan(random.Random(seed), quiet=True))
    failed = {row for failure in status.failed for row in range(failure.start, failure.stop)}
    assert failed == {10, 17}
    check(world, cache, failed)
    counts["uploads aborted"] = cache.abort_uploads("shards/")
    return counts


def stores(folder: Path, through: Proxy, seed: int) -> ObjectStore:
    """A folder; for every tenth schedule S3, where one request in twenty is spoiled."""
    if seed % 10:
        return ObjectStore(StorageSettings(str(folder / f"{seed}")))
    through.rate, through.draw = 0.05, random.Random(seed)
    return ObjectStore(replace(through.server.settings(f"schedule-{seed}"), attempts=9))


def patches() -> dict[tuple[Any, str], Any]:
    """What to patch, (module, name) -> value: waiting costs no time, engines are shared, and the dead are not mourned on stderr."""
    return {
        (object_store, "FIRST_DELAY_SECONDS"): 0.001,
        (object_store, "LONGEST_DELAY_SECONDS"): 0.01,
        (object_store, "MULTIPART_BYTES"): 10_000,
        (connection, "READ_SECONDS"): 0.5,
        (producer_module, "FIRST_PAUSE_SECONDS"): 0.005,
        (producer_module, "LONGEST_PAUSE_SECONDS"): 0.02,
        (producer_module, "make_engine"): lambda settings: None,
        (threading, "excepthook"): lambda arguments: None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=220)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so long no further schedule is begun")
    args = parser.parse_args()
    os.environ.update(aws_environment())
    for (module, name), value in patches().items():
        setattr(module, name, value)
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        server, process = start(Path(scratch) / "s3")
        try:
            world = make_world(Path(scratch))
            with proxy(server) as through:
                for seed in range(args.first, args.first + args.schedules):
                    if time.perf_counter() - began > 60 * args.minutes:
                        break
                    counts["schedules"] += 1
                    counts += disturbed(world, stores(Path(scratch), through, seed), seed)
                    through.rate = 0.0
                counts.update({f"S3 {kind}": hits for kind, hits in through.hits.items()})
        finally:
            process.terminate()
            process.wait(timeout=20)
    print(json.dumps({"first": args.first, "seconds": time.perf_counter() - began, **dict(sorted(counts.items()))}, indent=2))


if __name__ == "__main__":
    main()
