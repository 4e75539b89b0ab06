"""The ledger with a clock of its own: random schedules against a naive model, restarts, growth, fencing, and what it refuses."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.errors import ActorError
from actors.ledger import FailedRange, Ledger, LedgerSettings
from storage.commits import Skipped, read_commits
from storage.errors import StorageError
from storage.object_store import ObjectStore, StorageSettings
from storage.shard import Entry, ShardInfo

SETTINGS = LedgerSettings(lease_rows=4, lease_seconds=10.0, max_attempts=3)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Case:
    """A store, a clock, and ledgers over them."""

    store: ObjectStore
    settings: LedgerSettings = SETTINGS
    clock: Clock = field(default_factory=Clock)

    def ledger(self, rows: int) -> Ledger:
        return Ledger(self.store, rows, self.settings, self.clock)


@pytest.fixture
def case(tmp_path) -> Case:
    return Case(ObjectStore(StorageSettings(str(tmp_path))))


def result(start: int, stop: int, who: str = "a", skip: tuple[int, ...] = ()) -> tuple[list[ShardInfo], list[Skipped]]:
    """What a producer brings: one shard that is its own, some rows skipped."""
    kept = [index for index in range(start, stop) if index not in skip]
    entries = tuple(Entry(f"row{index}", index, 0, 10, 0, tokens=5, supervised=2) for index in kept)
    shards = [ShardInfo(f"shards/{who}-{start}-{stop}.arrow", 100, "0" * 64, entries)] if entries else []
    return shards, [Skipped(f"row{index}", index, "too long") for index in skip]


def rows_of(lease_id: str) -> tuple[int, int]:
    start, stop = lease_id.split("-")
    return int(start), int(stop)


def committed_rows(store: ObjectStore) -> list[int]:
    """Every row that some commit holds, as often as commits hold it."""
    commits = read_commits(store)
    cached = [entry.index for commit in commits for shard in commit.shards for entry in shard.entries]
    return sorted(cached + [row.index for commit in commits for row in commit.skipped])


# -- random schedules


class Model:
    """The rules again, over a dictionary that is searched from end to end each time."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.committed: set[int] = set()
        self.start(0)

    def start(self, rows: int) -> None:
        """A new ledger: rows not committed, cut at multiples of the lease's size and at what is committed."""
        self.ranges: dict[tuple[int, int], dict] = {}
        self.rows, self.failed = rows, set()
        start = 0
        for row in range(rows + 1):
            border = row == rows or row % self.settings.lease_rows == 0 or (row in self.committed) != (row - 1 in self.committed)
            if border and start < row and start not in self.committed:
                self.ranges[start, row] = {"holder": None, "deadline": 0.0, "attempts": 0}
            start = row if border else start

    def expire(self, now: float) -> None:
        for key, entry in list(self.ranges.items()):
            if entry["holder"] is not None and entry["deadline"] < now:
                self.free(key)

    def free(self, key: tuple[int, int]) -> None:
        self.ranges[key]["holder"] = None
        if self.ranges[key]["attempts"] == self.settings.max_attempts:
            del self.ranges[key]
            self.failed.add(key)

    def hand_out(self, key: tuple[int, int], producer: str, now: float) -> None:
        entry = self.ranges[key]
        assert entry["holder"] is None
        entry.update(holder=producer, deadline=now + self.settings.lease_seconds, attempts=entry["attempts"] + 1)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_committed_once_or_reported_whatever_happens(case, seed):
    """Producers that finish, die, come late or twice, ledgers that restart, a corpus that grows: the ledger does what the model says."""
    draw = random.Random(seed)
    model, rows = Model(case.settings), draw.randrange(1, 30)
    ledger = case.ledger(rows)
    model.start(rows)
    taken: list[tuple[str, str]] = []  # every (lease, producer) that ever was, so that results may come late and repeatedly
    for _ in range(120):
        action = draw.choice(["lease"] * 4 + ["complete"] * 3 + ["fail", "heartbeat", "wait", "dies", "restart"])
        producer = draw.choice("abc")
        lease, holder = draw.choice(taken) if taken else ("0000000000-0000000001", "a")
        key = rows_of(lease)
        if action == "lease":
            model.expire(case.clock.now)
            reply = ledger.lease(producer)
            assert reply.done == (not model.ranges)
            assert (reply.lease is None) == all(entry["holder"] is not None for entry in model.ranges.values())
            if reply.lease:
                model.hand_out((reply.lease.start, reply.lease.stop), producer, case.clock.now)
                assert reply.lease.deadline == case.clock.now + case.settings.lease_seconds
                assert reply.lease.attempt == model.ranges[reply.lease.start, reply.lease.stop]["attempts"]
                taken.append((reply.lease.id, producer))
        elif action == "complete" and taken:
            skip = tuple(row for row in range(*key) if draw.random() < 0.2)
            accepted = ledger.complete(lease, *result(*key, who=f"{holder}{draw.random()}", skip=skip))
            assert accepted == (key in model.ranges)
            if accepted:
                del model.ranges[key]
                model.committed |= set(range(*key))
        elif action == "fail":
            ledger.fail(lease, holder, "broke")
            if key in model.ranges and model.ranges[key]["holder"] == holder:
                model.free(key)
        elif action == "heartbeat":
            alive = ledger.heartbeat(lease, holder)
            assert alive == (key in model.ranges and model.ranges[key]["holder"] == holder)
            if alive:
                model.ranges[key]["deadline"] = case.clock.now + case.settings.lease_seconds
        elif action == "wait":
            case.clock.now += draw.choice([1.0, 6.0, 20.0])
        elif action == "dies":
            ledger.release_producer(producer, "died")
            for held in [held for held, entry in model.ranges.items() if entry["holder"] == producer]:
                model.free(held)
        elif action == "restart":
            rows += draw.choice([0, 0, 3])
            ledger = case.ledger(rows)
            model.start(rows)
        model.expire(case.clock.now)
        status = ledger.status()
        assert (status.rows, status.done) == (rows, len(model.committed))
        assert {(failure.start, failure.stop) for failure in status.failed} == model.failed
        assert status.leased == sum(entry["holder"] is not None for entry in model.ranges.values())
        assert committed_rows(case.store) == sorted(model.committed)
    while not (reply := ledger.lease("last")).done:
        if reply.lease:
            assert ledger.complete(reply.lease.id, *result(reply.lease.start, reply.lease.stop))
        else:
            case.clock.now += 20.0
    status = ledger.status()
    failed = [row for failure in status.failed for row in range(failure.start, failure.stop)]
    assert sorted(committed_rows(case.store) + failed) == list(range(rows))
    assert status.done + len(failed) == rows


# -- one property each


def commit_files(store: ObjectStore) -> list[Path]:
    return sorted(Path(store.settings.root, "commits").iterdir())


def work_off(ledger: Ledger, limit: int = 10**6) -> list[tuple[int, int]]:
    """Complete up to `limit` leases; returns their rows."""
    worked = []
    while len(worked) < limit and (lease := ledger.lease("a").lease):
        assert ledger.complete(lease.id, *result(lease.start, lease.stop))
        worked.append((lease.start, lease.stop))
    return worked


def test_a_restart_cuts_at_the_same_borders(case):
    first = work_off(case.ledger(18), limit=2)
    second = work_off(case.ledger(18))
    assert [*first, *second] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
    assert case.ledger(18).lease("a").done


def test_a_grown_corpus_redoes_nothing(case):
    work_off(case.ledger(10))
    before = {path: path.stat().st_mtime_ns for path in commit_files(case.store)}
    grown = case.ledger(21)
    assert grown.status().done == 10
    assert work_off(grown) == [(10, 12), (12, 16), (16, 20), (20, 21)]
    after = commit_files(case.store)
    assert set(before) < set(after)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert committed_rows(case.store) == list(range(21))


def test_an_expired_lease_goes_to_another_and_the_late_result_still_counts(case):
    ledger = case.ledger(4)
    slow = ledger.lease("slow").lease
    assert ledger.lease("other").lease is None
    case.clock.now += 10.5
    again = ledger.lease("other").lease
    assert (again.id, again.attempt) == (slow.id, 2)
    assert not ledger.heartbeat(slow.id, "slow")
    assert ledger.complete(slow.id, *result(0, 4, "slow"))
    assert not ledger.heartbeat(again.id, "other")
    assert not ledger.complete(again.id, *result(0, 4, "other"))
    (commit,) = read_commits(case.store)
    assert [shard.name for shard in commit.shards] == ["shards/slow-0-4.arrow"]
    assert ledger.lease("slow").done


def test_heartbeats_keep_a_lease(case):
    ledger = case.ledger(4)
    lease = ledger.lease("a").lease
    for _ in range(5):
        case.clock.now += 9.0
        assert ledger.heartbeat(lease.id, "a")
        assert ledger.lease("b").lease is None


def test_only_the_holder_gives_a_lease_back(case):
    ledger = case.ledger(4)
    lease = ledger.lease("a").lease
    ledger.fail(lease.id, "b", "not mine")
    assert ledger.status().leased == 1
    ledger.fail(lease.id, "a", "broke")
    assert ledger.status().leased == 0


def test_rows_whose_attempts_are_used_up_are_reported_with_the_last_reason(case):
    ledger = case.ledger(6)
    for attempt in (1, 2, 3):
        lease = ledger.lease("a").lease
        while lease.start != 0:  # the other range is cached in between
            assert ledger.complete(lease.id, *result(lease.start, lease.stop))
            lease = ledger.lease("a").lease
        assert lease.attempt == attempt
        ledger.fail(lease.id, "a", f"out of memory, {attempt}")
    assert ledger.lease("a").done
    status = ledger.status()
    assert status.failed == (FailedRange(0, 4, "out of memory, 3"),)
    assert (status.done, status.cached, status.tokens) == (2, 2, 10)
    assert work_off(case.ledger(6)) == [(0, 4)]  # another run tries again


def test_status_counts_what_is_committed(case):
    ledger = case.ledger(4)
    lease = ledger.lease("a").lease
    assert ledger.complete(lease.id, *result(0, 4, skip=(1,)))
    for status in (ledger.status(), case.ledger(4).status()):
        assert (status.done, status.cached, status.skipped, status.tokens, status.bytes) == (4, 3, 1, 15, 100)


@pytest.mark.parametrize(
    "shards_and_skipped",
    [result(0, 3), result(1, 5), result(0, 5), (result(0, 4)[0], result(0, 4, skip=(2,))[1]), ([], [])],
    ids=["missing", "shifted", "extra", "twice", "nothing"],
)
def test_a_result_that_does_not_cover_its_rows_once_is_refused(case, shards_and_skipped):
    ledger = case.ledger(8)
    lease = ledger.lease("a").lease
    with pytest.raises(ActorError, match="rows 0 to 3"):
        ledger.complete(lease.id, *shards_and_skipped)
    assert not read_commits(case.store)
    assert ledger.complete(lease.id, *result(0, 4))


def test_a_ledger_that_lost_its_cache_to_another_commits_nothing_and_hands_out_nothing(case):
    old = case.ledger(8)
    lease = old.lease("a").lease
    new = case.ledger(8)
    with pytest.raises(ActorError, match=r"another ledger has taken over .* \(epoch 1\)"):
        old.complete(lease.id, *result(0, 4))
    assert not read_commits(case.store)
    assert old.lease("a").done
    assert {(f.start, f.stop) for f in old.status().failed} == {(0, 4), (4, 8)}
    assert work_off(new) == [(0, 4), (4, 8)]
    assert {commit.epoch for commit in read_commits(case.store)} == {2}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"epoch": "soon"}', b"{}", b"7"])
def test_a_damaged_ledger_file_is_named(case, damage):
    case.ledger(4)
    case.store.put("ledger.json", damage)
    with pytest.raises(ActorError, match=r"ledger\.json is damaged .*Remove it while no `cache` job runs"):
        case.ledger(4)
    case.store.delete("ledger.json")
    assert work_off(case.ledger(4)) == [(0, 4)]


def test_a_damaged_commit_stops_the_ledger_by_name(case):
    work_off(case.ledger(4))
    case.store.put("commits/0000000000-0000000004.json", b"{}")
    with pytest.raises(StorageError, match="0000000000-0000000004"):
        case.ledger(4)
