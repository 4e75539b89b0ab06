"""The ledger with a clock of its own: random schedules against a naive model, restarts, growth, fencing, and what it refuses."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.errors import ActorError
from actors.ledger import FailedRange, Lease, LeaseResult, Ledger, LedgerSettings
from storage.commits import Commit, Skipped, read_commits, write_commit
from storage.errors import StorageError
from storage.manifest import Manifest
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


def take(ledger: Ledger, producer: str = "a") -> Lease | None:
    """One lease, if there is one."""
    return next(iter(ledger.lease(producer).leases), None)


def bring(ledger: Ledger, lease: str, shards: list[ShardInfo], skipped: list[Skipped]) -> bool:
    return ledger.complete([LeaseResult(lease, tuple(shards), tuple(skipped))])[0]


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
        """Whole until the last attempt, which every row has on its own."""
        used, single = self.ranges[key]["attempts"], key[1] - key[0] == 1
        if used == self.settings.max_attempts:
            self.failed |= set(range(*key))
        elif used < self.settings.max_attempts - 1 or single:
            self.ranges[key]["holder"] = None
            return
        else:
            for row in range(*key):
                self.ranges[row, row + 1] = {"holder": None, "deadline": 0.0, "attempts": used}
        del self.ranges[key]

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
        action = draw.choice(["lease"] * 4 + ["complete"] * 3 + ["fail", "give back", "heartbeat", "wait", "dies", "restart"])
        producer = draw.choice("abc")
        lease, holder = draw.choice(taken) if taken else ("0000000000-0000000001", "a")
        key = rows_of(lease)
        if action == "lease":
            model.expire(case.clock.now)
            count = draw.choice([1, 1, 2, 5])
            reply = ledger.lease(producer, count)
            assert reply.done == (not model.ranges)
            assert len(reply.leases) == min(count, sum(entry["holder"] is None for entry in model.ranges.values()))
            for lease in reply.leases:
                model.hand_out((lease.start, lease.stop), producer, case.clock.now)
                assert lease.seconds == case.settings.lease_seconds
                assert lease.attempt == model.ranges[lease.start, lease.stop]["attempts"]
                taken.append((lease.id, producer))
        elif action == "complete" and taken:
            skip = tuple(row for row in range(*key) if draw.random() < 0.2)
            accepted = bring(ledger, lease, *result(*key, who=f"{holder}{draw.random()}", skip=skip))
            assert accepted == (key in model.ranges)
            if accepted:
                del model.ranges[key]
                model.committed |= set(range(*key))
        elif action == "fail":
            ledger.fail(lease, holder, "broke")
            if key in model.ranges and model.ranges[key]["holder"] == holder:
                model.free(key)
        elif action == "give back":
            ledger.give_back(lease, holder)
            if key in model.ranges and model.ranges[key]["holder"] == holder:
                model.ranges[key]["holder"] = None
                model.ranges[key]["attempts"] -= 1
        elif action == "heartbeat":
            model.expire(case.clock.now)
            ledger.status()
            alive = not ledger.heartbeat(holder, [lease])
            assert alive == (key in model.ranges and model.ranges[key]["holder"] in (None, holder))
            if alive:
                deadline = case.clock.now + case.settings.lease_seconds
                model.ranges[key].update(holder=holder, deadline=deadline, attempts=max(1, model.ranges[key]["attempts"]))
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
        assert {row for failure in status.failed for row in range(failure.start, failure.stop)} == model.failed
        assert status.open == rows - len(model.committed) - len(model.failed)
        assert status.leased == sum(entry["holder"] is not None for entry in model.ranges.values())
        assert committed_rows(case.store) == sorted(model.committed)
    while not (reply := ledger.lease("last")).done:
        for lease in reply.leases:
            assert bring(ledger, lease.id, *result(lease.start, lease.stop))
        if not reply.leases:
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
    while len(worked) < limit and (lease := take(ledger)):
        assert bring(ledger, lease.id, *result(lease.start, lease.stop))
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
    slow = take(ledger, "slow")
    assert take(ledger, "other") is None
    case.clock.now += 10.5
    again = take(ledger, "other")
    assert (again.id, again.attempt) == (slow.id, 2)
    assert ledger.heartbeat("slow", [slow.id]) == {slow.id}
    assert bring(ledger, slow.id, *result(0, 4, "slow"))
    assert ledger.heartbeat("other", [again.id]) == {again.id}
    assert not bring(ledger, again.id, *result(0, 4, "other"))
    assert (ledger.status().commits, ledger.status().duplicates) == (1, 1)
    (commit,) = read_commits(case.store)
    assert [shard.name for shard in commit.shards] == ["shards/slow-0-4.arrow"]
    assert ledger.lease("slow").done


def test_heartbeats_keep_leases(case):
    ledger = case.ledger(8)
    leases = [lease.id for lease in ledger.lease("a", count=2).leases]
    for _ in range(5):
        case.clock.now += 9.0
        assert not ledger.heartbeat("a", leases)
        assert take(ledger, "b") is None
    case.clock.now += 9.0
    assert not ledger.heartbeat("a", leases[1:])
    case.clock.now += 9.0
    assert take(ledger, "b").id == leases[0]
    assert take(ledger, "b") is None


def test_a_new_ledger_learns_from_heartbeats_who_works_on_what(case):
    old = case.ledger(8)
    working = take(old, "a")
    new = case.ledger(8)
    assert not new.heartbeat("a", [working.id])
    assert take(new, "b").start == 4
    assert take(new, "b") is None
    assert new.heartbeat("b", [working.id]) == {working.id}
    assert bring(new, working.id, *result(0, 4))


def test_only_the_holder_gives_a_lease_back(case):
    ledger = case.ledger(4)
    lease = take(ledger)
    ledger.fail(lease.id, "b", "not mine")
    ledger.give_back(lease.id, "b")
    assert ledger.status().leased == 1
    ledger.fail(lease.id, "a", "broke")
    assert ledger.status().leased == 0


def test_a_lease_given_back_for_no_fault_of_its_rows_loses_no_attempt(case):
    ledger = case.ledger(4)
    for _ in range(10):
        lease = take(ledger)
        assert lease.attempt == 1
        ledger.give_back(lease.id, "a")
    assert not ledger.status().failed


def test_a_row_that_kills_its_producer_three_times_is_reported_and_the_rest_goes_on(case):
    ledger, deaths = case.ledger(8), 0
    while not (reply := ledger.lease(f"p{deaths}")).done:
        (lease,) = reply.leases
        if lease.start <= 5 < lease.stop:
            ledger.release_producer(f"p{deaths}", "its producer died: killed")
            deaths += 1
        else:
            assert bring(ledger, lease.id, *result(lease.start, lease.stop))
    assert deaths == 3
    status = ledger.status()
    assert status.failed == (FailedRange(5, 6, "its producer died: killed"),)
    assert (status.done, status.cached, status.open) == (7, 7, 0)
    assert committed_rows(case.store) == [0, 1, 2, 3, 4, 6, 7]
    assert work_off(case.ledger(8)) == [(5, 6)]  # another run tries again


def test_neighbouring_rows_that_fail_alike_are_reported_together(case):
    ledger = case.ledger(8)
    while lease := take(ledger):
        ledger.fail(lease.id, "a", "late" if lease.start == 6 else "out of memory")
    failed = (FailedRange(0, 6, "out of memory"), FailedRange(6, 7, "late"), FailedRange(7, 8, "out of memory"))
    assert ledger.status().failed == failed
    assert ledger.status().failed_rows == 8
    assert ledger.lease("a").done


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_a_row_has_as_many_attempts_as_are_set(case, attempts):
    ledger, tried = Ledger(case.store, 3, LedgerSettings(3, 10.0, attempts), case.clock), [0, 0, 0]
    while lease := take(ledger):
        for row in range(lease.start, lease.stop):
            tried[row] += 1
        ledger.fail(lease.id, "a", "broke")
    assert tried == [max(attempts, 2)] * 3  # once together, once alone at least


def test_a_commit_that_another_ledger_wrote_first_stands(case):
    """Between the look at the epoch and the write there is a gap; a commit that slips through it is found, not written over."""
    ledger = case.ledger(8)
    lease = take(ledger)
    theirs = tuple(result(0, 4, "theirs")[0])
    write_commit(case.store, Commit(lease.id, 0, 0, 4, theirs))
    assert not bring(ledger, lease.id, *result(0, 4, "ours"))
    assert read_commits(case.store)[0].shards == theirs
    assert (ledger.status().cached, ledger.status().duplicates) == (4, 1)
    assert work_off(ledger) == [(4, 8)]


def test_many_threads_bring_every_lease_once(case):
    """Each lease is brought by all threads at the same time; one is taken."""
    ledger = case.ledger(40)
    leases = [lease.id for lease in ledger.lease("a", count=10).leases]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda n: [bring(ledger, lease, *result(*rows_of(lease), who=f"t{n}")) for lease in leases], range(8)))
    assert [sum(column) for column in zip(*taken, strict=True)] == [1] * 10
    assert committed_rows(case.store) == list(range(40))
    assert (ledger.status().commits, ledger.status().duplicates) == (10, 70)


def test_results_are_taken_in_batches(case):
    ledger = case.ledger(40)
    leases = ledger.lease("a", count=10).leases
    results = [LeaseResult(lease.id, tuple(result(lease.start, lease.stop)[0])) for lease in leases]
    assert ledger.complete([*results, results[0]]) == [True] * 11  # twice in one batch: written once
    assert committed_rows(case.store) == list(range(40))
    assert ledger.status().commits == 10


def test_a_ledger_opens_from_a_manifest_and_the_commits_since(case):
    work_off(case.ledger(40), limit=6)
    Manifest.current(case.store).save(case.store)
    work_off(case.ledger(40), limit=2)
    reads, get = [], case.store.get

    def counted(key: str) -> bytes:
        reads.append(key)
        return get(key)

    case.store.get = counted
    status = case.ledger(40).status()
    assert (status.done, status.cached, status.tokens, status.bytes) == (32, 32, 160, 800)
    assert sorted(key for key in reads if key.startswith("commits/")) == [
        f"commits/{start:010d}-{start + 4:010d}.json" for start in (24, 28)
    ]
    assert work_off(case.ledger(40)) == [(32, 36), (36, 40)]


def test_its_name_stays_short_at_any_size(case):
    """Ray repeats it in every task's events."""
    assert len(repr(case.ledger(4000))) < 200


def test_status_counts_what_is_committed(case):
    ledger = case.ledger(4)
    lease = take(ledger)
    assert bring(ledger, lease.id, *result(0, 4, skip=(1,)))
    for status in (ledger.status(), case.ledger(4).status()):
        assert (status.done, status.cached, status.skipped, status.tokens, status.bytes) == (4, 3, 1, 15, 100)


@pytest.mark.parametrize(
    "shards_and_skipped",
    [result(0, 3), result(1, 5), result(0, 5), (result(0, 4)[0], result(0, 4, skip=(2,))[1]), ([], [])],
    ids=["missing", "shifted", "extra", "twice", "nothing"],
)
def test_a_result_that_does_not_cover_its_rows_once_is_refused(case, shards_and_skipped):
    ledger = case.ledger(8)
    lease = take(ledger)
    with pytest.raises(ActorError, match="rows 0 to 3"):
        bring(ledger, lease.id, *shards_and_skipped)
    assert not read_commits(case.store)
    assert bring(ledger, lease.id, *result(0, 4))


def test_a_ledger_that_lost_its_cache_to_another_commits_nothing_and_hands_out_nothing(case):
    old = case.ledger(8)
    lease = take(old)
    new = case.ledger(8)
    with pytest.raises(ActorError, match=r"another ledger has taken over .* \(epoch 1\)"):
        bring(old, lease.id, *result(0, 4))
    assert not read_commits(case.store)
    assert old.lease("a").done
    assert [(f.start, f.stop) for f in old.status().failed] == [(0, 8)]
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
