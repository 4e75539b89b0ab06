"""Follow mode: what is committed comes once, in an order that a later start sees again, for any number of workers."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from storage_cases import build_cache, contract, same

from storage import follow
from storage.commits import Commit, Skipped, commit_key, lease_id, write_commit
from storage.errors import StorageError
from storage.follow import FollowOrder, FollowSettings
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.order import rank_slots
from storage.reader import SampleReader

CASE = contract("lossless")
ROWS, HELDOUT, BATCH = 40, 3, 4


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.0)


@pytest.fixture
def cache(tmp_path: Path) -> ObjectStore:
    return ObjectStore(StorageSettings(str(tmp_path / "cache")))


@pytest.fixture
def run(tmp_path: Path) -> ObjectStore:
    return ObjectStore(StorageSettings(str(tmp_path / "run")))


def order(cache: ObjectStore, run: ObjectStore, writer: bool = True, patience: float = 60.0, **also: object) -> FollowOrder:
    return FollowOrder(cache, run, FollowSettings(ROWS, patience), 5, HELDOUT, writer, **also)  # type: ignore[arg-type]


def grow(cache: ObjectStore, first: int, count: int) -> None:
    build_cache(cache, CASE, count, leases=2, first=first)


def skip_rows(cache: ObjectStore, first: int, count: int) -> None:
    """A lease of which nothing was cached."""
    skipped = tuple(Skipped(f"row-{row}", row, "empty") for row in range(first, first + count))
    write_commit(cache, Commit(lease_id(first, first + count), 1, first, first + count, (), skipped))


def rows_of(order: FollowOrder, steps: range) -> list[tuple[int, list[str]]]:
    """(epoch, row ids) of each step."""
    batches = [order.global_batch(step, BATCH) for step in steps]
    return [(batch[0], [order.entry(position)[1].row_id for position in batch[1]]) for batch in batches if batch is not None]


def test_everything_comes_once_as_it_is_committed_and_then_again_and_again(cache: ObjectStore, run: ObjectStore) -> None:
    grow(cache, 0, 10)
    follower = order(cache, run)
    assert follower.global_batch(1, BATCH) is None, "ten rows, three of them held out: one batch and three samples"
    grow(cache, 20, 12)  # leases are committed in any order
    skip_rows(cache, 10, 2)
    seen = rows_of(follower, range(4))
    assert len(seen) == 4
    assert follower.global_batch(4, BATCH) is None
    grow(cache, 12, 8)
    grow(cache, 32, 8)
    held = set(sorted(f"row-{row}" for row in range(10))[:HELDOUT])
    assert set(follower.wait_for_heldout().table["row_id"].to_pylist()) == held
    everything = {f"row-{row}" for row in range(ROWS)} - held - {"row-10", "row-11"}
    seen += rows_of(follower, range(4, 8))
    told = [row for _, rows in seen for row in rows]
    assert len(set(told)) == len(told) == 32
    assert set(told[:7]) == {f"row-{row}" for row in range(10)} - held, "one segment after the other"
    assert set(told) <= everything
    assert {epoch for epoch, _ in seen} == {0}
    later = rows_of(follower, range(8, 24))
    for epoch in (1, 2):
        rows = [row for own, batch in later for row in batch if own == epoch]
        assert len(set(rows)) == len(rows) == 32
        assert set(rows) <= everything
    assert [rows for _, rows in later[:8]] != [rows for _, rows in later[8:]], "another order in every epoch"
    assert run.list() == [f"follow/{number:08d}.json" for number in range(3)]


def test_a_later_start_and_other_ranks_see_the_same_order(cache: ObjectStore, run: ObjectStore) -> None:
    writer, reader = order(cache, run), order(cache, run, writer=False)
    assert reader.global_batch(0, BATCH) is None
    seen = []
    for first, count in ((0, 12), (28, 12), (12, 16)):
        grow(cache, first, count)
        assert reader.global_batch(len(seen), BATCH) is None, "only what the writer has recorded counts"
        seen += rows_of(writer, range(len(seen), 10))
        assert rows_of(reader, range(len(seen))) == seen
    assert len(seen) == 10  # 9 batches of the first epoch, then the second
    for own in (True, False):
        assert rows_of(order(cache, run, writer=own), range(30)) == rows_of(writer, range(30))
    batch = order(cache, run).global_batch(5, BATCH)
    assert batch is not None
    shares = [rank_slots(batch[1], rank, 3) for rank in range(3)]
    assert sorted(np.concatenate(shares)) == sorted(batch[1])


def test_a_cache_that_stops_growing_is_an_error_that_says_how_far_it_is(cache: ObjectStore, run: ObjectStore) -> None:
    grow(cache, 0, 10)
    told: list[str] = []
    follower = order(cache, run, patience=0.2, tell=told.append)
    for _ in ("takes what is there", "begins to wait"):
        assert follower.global_batch(5, BATCH) is None
    time.sleep(0.3)
    with pytest.raises(StorageError, match=r"has not grown for .* \(10 of 40 rows are committed\). Run `cache` to finish it"):
        follower.global_batch(5, BATCH)
    assert told == ["waiting for the cache: 10 of 40 rows are committed"]


def test_too_few_rows_to_hold_any_out(cache: ObjectStore, run: ObjectStore) -> None:
    skip_rows(cache, 0, ROWS - 3)
    grow(cache, ROWS - 3, 3)
    with pytest.raises(StorageError, match=r"train.heldout_rows=3 leaves nothing of the cache's 3 samples"):
        order(cache, run).wait_for_heldout()


def test_what_is_lost_is_named(cache: ObjectStore, run: ObjectStore) -> None:
    grow(cache, 0, ROWS)
    assert order(cache, run).global_batch(0, BATCH) is not None
    gone = commit_key(lease_id(0, 20))
    kept = cache.get(gone)
    cache.delete(gone)
    with pytest.raises(StorageError, match=f"{gone} is gone, though this run has trained on it"):
        order(cache, run)
    cache.put(gone, kept)
    run.put("follow/00000000.json", run.get("follow/00000000.json")[:-3])
    with pytest.raises(StorageError, match=r"follow/00000000.json is damaged .* Begin another run"):
        order(cache, run)


def test_the_reader_hands_over_what_it_has_before_it_waits(cache: ObjectStore) -> None:
    """Two ranks would wait for each other for ever otherwise."""
    samples = build_cache(cache, CASE, 6)
    received = []
    more = threading.Event()

    def positions() -> "itertools.chain[int | None]":
        yield from (0, 1)
        while not more.is_set():
            yield None
        yield 2

    with SampleReader(cache, CASE, Manifest.current(cache)) as reader:
        for sample in reader.stream(positions()):
            received.append(sample)
            if len(received) == 2:
                threading.Timer(0.3, more.set).start()
        assert reader.wait_seconds > 0.2, "waiting for the cache is waiting for data"
    assert all(same(got, want) for got, want in zip(received, samples[:3], strict=True))
