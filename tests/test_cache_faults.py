"""Caching under faults: every row once, bit for bit as in an undisturbed run, or reported; and one clear line where a job must stop."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_schedules import ROWS, Plan, World, check, disturbed, make_world, patches, run_schedule, stores
from s3_proxy import Fault, Proxy, proxy
from s3_server import S3Server

from storage.contract import ensure_contract
from storage.object_store import ObjectStore, StorageSettings


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in patches().items():
            patch.setattr(module, name, value)
        yield


@pytest.fixture(scope="module")
def world(patched: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def through(s3: S3Server) -> Iterator[Proxy]:
    with proxy(s3) as running:
        yield running


def test_an_undisturbed_run_reports_what_its_rows_do(world: World, tmp_path: Path) -> None:
    cache = ObjectStore(StorageSettings(str(tmp_path)))
    ensure_contract(cache, world.recipe.contract)
    status, counts = run_schedule(world, cache, Plan(random.Random(0), quiet=True))
    assert [(failure.start, failure.stop) for failure in status.failed] == [(10, 11), (17, 18)]
    assert status.failed[0].reason == "its producer died"
    assert status.failed[1].reason == "a row of 45 tokens is longer than this engine's limit of 40"
    assert counts["producers killed"] == 3  # by one row: twice in its lease, once alone
    assert (status.cached, status.skipped, status.open) == (ROWS - 5, 3, 0)
    check(world, cache, {10, 17})


SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 220))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_lose_nothing_and_double_nothing(world: World, through: Proxy, tmp_path: Path, seed: int) -> None:
    try:
        counts = disturbed(world, stores(tmp_path, through, seed), seed)
    finally:
        through.rate = 0.0
    assert counts["rows cached"] + counts["rows skipped"] + counts["rows failed"] == ROWS


MOMENTS = {
    "before the upload": "before storage.put",
    "in the middle of the upload": "mid storage.put",
    "between shard and commit": "before ledger.complete",
    "after the commit": "after ledger.complete",
    "in the engine": "after engine",
    "with a fresh lease": "after ledger.lease",
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("with_ledger", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["producer", "both"])
def test_a_producer_killed_at_any_moment_costs_nothing(world: World, s3: S3Server, moment: str, with_ledger: bool) -> None:
    cache = s3.store(f"killed/{moment.replace(' ', '-')}-{with_ledger}")
    ensure_contract(cache, world.recipe.contract)
    plan = KillAt(random.Random(0), moment=moment, with_ledger=with_ledger)
    status, _ = run_schedule(world, cache, plan)
    assert plan.hits[f"died {moment}"] == 1
    check(world, cache, {row for failure in status.failed for row in range(failure.start, failure.stop)})
    assert [(failure.start, failure.stop) for failure in status.failed] == [(10, 11), (17, 18)]
    assert cache.exists("ledger.json")
    assert cache.abort_uploads("shards/") == (moment == "mid storage.put"), "parts that a dead producer sent stay until someone aborts"


class KillAt(Plan):
    """Kills the first producer that comes to one moment, and the ledger with it."""

    def __init__(self, draw: random.Random, moment: str, with_ledger: bool) -> None:
        super().__init__(draw, producers=1)
        self.moment, self.with_ledger, self.done = moment, with_ledger, False

    def strikes(self, what: str, probability: float, moment: str = "") -> bool:
        """Once, at the moment asked for."""
        wanted = "double_kills" if self.with_ledger else "deaths"
        with self.lock:
            if self.done or what != wanted or moment != self.moment:
                return False
            self.done = True
            return True


def test_two_producers_hold_the_same_lease(world: World, tmp_path: Path) -> None:
    """The clock jumps whenever a lease is asked for, so that producers work on what others hold."""
    cache = ObjectStore(StorageSettings(str(tmp_path)))
    ensure_contract(cache, world.recipe.contract)
    status, counts = run_schedule(world, cache, Plan(random.Random(1), producers=3, jumps=12))
    assert counts["jumps"] > 0
    check(world, cache, {row for failure in status.failed for row in range(failure.start, failure.stop)})


def test_clocks_of_nodes_that_differ_change_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day jumps by hours at every look; no lease is lost over it."""
    import time

    real, draw = time.time, random.Random(0)
    monkeypatch.setattr(time, "time", lambda: real() + draw.uniform(-90_000, 90_000))
    cache = ObjectStore(StorageSettings(str(tmp_path)))
    ensure_contract(cache, world.recipe.contract)
    status, counts = run_schedule(world, cache, Plan(random.Random(0), producers=2, quiet=True))
    assert (status.cached, counts["duplicates refused"], counts["producers killed"]) == (ROWS - 5, 0, 3)


@pytest.mark.parametrize("kind", ["expired", "503", "refused"])
def test_an_outage_costs_no_row_an_attempt(world: World, through: Proxy, s3: S3Server, kind: str) -> None:
    """Storage fails for good under running producers, again and again; once it is back every row comes in."""
    cache = through.server.store(f"outage-{kind}")
    ensure_contract(cache, world.recipe.contract)
    through.faults = [Fault(kind, "PUT|POST", "shards", times=20)]
    status, counts = run_schedule(world, cache, Plan(random.Random(0), producers=2, quiet=True))
    assert counts["producers ended by an outage"] >= 2
    assert [(failure.start, failure.stop) for failure in status.failed] == [(10, 11), (17, 18)]
    check(world, s3.store(f"outage-{kind}"), {10, 17})


def test_schedules_are_of_all_kinds() -> None:
    planned = Counter[str]()
    for seed in range(220):
        plan = Plan.of(seed)
        planned.update({name: getattr(plan, name) for name in ("deaths", "ledger_kills", "double_kills", "jumps", "outages")})
    assert min(planned.values()) > 250
