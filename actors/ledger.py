"""Who caches which rows: leases with deadlines, and the commits that make their results count.

`Ledger` is a plain class, so that tests drive it with their own clock; `actors.caching` runs it as the Ray actor `CacheLedger`, several
calls at a time. It holds metadata only. Its whole state can be rebuilt from the commits on storage, so it may die at any moment.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from actors.errors import ActorError
from storage.commits import Commit, Skipped, Tally, commit_key, lease_id, lease_rows, read_commit, write_commit
from storage.errors import AlreadyCommitted
from storage.manifest import committed
from storage.object_store import ObjectStore
from storage.shard import ShardInfo

_EPOCH_KEY = "ledger.json"


@dataclass(frozen=True)
class Lease:
    """Rows [start, stop) of the corpus, promised to one producer until it shows no sign of life for `seconds`.

    A duration and no time of day, since the clocks of nodes differ. `attempt` counts from 1.
    """

    id: str
    start: int
    stop: int
    seconds: float
    attempt: int


@dataclass(frozen=True)
class LeaseReply:
    """Leases, or none: then either all is `done`, or the rest is in other hands and may come back."""

    leases: tuple[Lease, ...]
    done: bool


@dataclass(frozen=True)
class LeaseResult:
    """What a producer brings for a lease: the shards that hold its rows, and the rows that it left out."""

    lease: str
    shards: tuple[ShardInfo, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class LedgerSettings:
    """`lease_rows` rows a lease; a lease that shows no sign of life for `lease_seconds` goes to another, `max_attempts` times at most.

    Before its last attempt a lease is split into single rows, so that a row which kills its producer costs only itself.
    """

    lease_rows: int = 64
    lease_seconds: float = 120.0
    max_attempts: int = 3


@dataclass(frozen=True)
class FailedRange:
    """Rows that no producer could cache, with the last reason."""

    start: int
    stop: int
    reason: str


@dataclass(frozen=True)
class LedgerStatus:
    """How far the cache is. Rows count as done when committed, cached or skipped; `tokens` and `bytes` are those cached.

    `leased` counts leases; `commits` and `duplicates` what was brought since this ledger started: taken, and refused as done before.
    """

    rows: int
    done: int
    cached: int
    skipped: int
    tokens: int
    bytes: int
    leased: int = 0
    failed: tuple[FailedRange, ...] = ()
    commits: int = 0
    duplicates: int = 0

    @property
    def failed_rows(self) -> int:
        return sum(failure.stop - failure.start for failure in self.failed)

    @property
    def open(self) -> int:
        """Rows that are neither done nor given up."""
        return self.rows - self.done - self.failed_rows


@dataclass
class _Open:
    """A range not yet committed: waiting (holder None) or leased. `committing` while its commit is being written."""

    start: int
    stop: int
    attempts: int = 0
    holder: str | None = None
    deadline: float = 0.0
    committing: bool = False


@dataclass(repr=False)
class Ledger:
    """Leases over rows [0, rows) of a corpus whose row indices never change (it only grows at its end). Thread-safe.

    Args:
        store: the cache's folder.
        rows: how many rows the corpus has now.
        settings: see LedgerSettings.
        clock: seconds from any start that never jump; a test brings its own.
    """

    store: ObjectStore
    rows: int
    settings: LedgerSettings = LedgerSettings()
    clock: Callable[[], float] = time.monotonic
    _open: dict[str, _Open] = field(default_factory=dict)
    _waiting: OrderedDict[str, None] = field(default_factory=OrderedDict)  # every operation costs the same at any size
    _leased: OrderedDict[str, None] = field(default_factory=OrderedDict)  # by deadline, the earliest first
    _failed: list[FailedRange] = field(default_factory=list)
    _commits: int = 0
    _duplicates: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._writers = ThreadPoolExecutor(16, thread_name_prefix="commit")
        # Whoever claimed last owns the cache; an older ledger finds out before its next commit.
        self.epoch = _stored_epoch(self.store) + 1
        self.store.put(_EPOCH_KEY, json.dumps({"epoch": self.epoch}).encode())
        leases, self._tally = committed(self.store)
        for start, stop in _gaps(map(lease_rows, leases), self.rows, self.settings.lease_rows):
            self._put_back(_Open(start, stop))

    def __repr__(self) -> str:
        # Ray sends this along with every task's events: with all open leases in it, they grow to gigabytes and abort the actor.
        return f"Ledger({self.store.settings.root!r})"

    def lease(self, producer: str, count: int = 1) -> LeaseReply:
        """Promise the next free ranges to `producer`, at most `count`."""
        with self._lock:
            self._expire()
            leases: list[Lease] = []
            while self._waiting and len(leases) < count:
                name, _ = self._waiting.popitem(last=False)
                entry = self._open[name]
                entry.attempts += 1
                self._promise(name, producer)
                leases.append(Lease(name, entry.start, entry.stop, self.settings.lease_seconds, entry.attempts))
            return LeaseReply(tuple(leases), done=not self._open)

    def heartbeat(self, producer: str, leases: Iterable[str]) -> frozenset[str]:
        """Extend the producer's leases; returns those that it has lost, and may stop working on.

        A lease that nobody else holds goes back to who works on it: a ledger that was started anew learns so of the leases at work.
        """
        lost = set()
        with self._lock:
            for name in leases:
                entry = self._open.get(name)
                if entry is None or entry.holder not in (None, producer):
                    lost.add(name)
                    continue
                if entry.holder is None:
                    del self._waiting[name]
                    entry.attempts = max(entry.attempts, 1)
                self._promise(name, producer)
        return frozenset(lost)

    def complete(self, results: Sequence[LeaseResult]) -> list[bool]:
        """Commit what producers bring. False: the rows are not open, another's result was committed before; the shards are garbage.

        A result is taken from whoever brings it first, holder or not: the rows are the same, and the work is done.

        Raises:
            ActorError: a result does not cover its lease's rows exactly once, or another ledger has taken over this cache.
            StorageUnavailable: the commit cannot be written; the lease stays open.
        """
        commits: dict[str, Commit] = {}
        with self._lock:
            for result in results:
                entry = self._open.get(result.lease)
                if entry is not None and not entry.committing and result.lease not in commits:
                    commits[result.lease] = self._commit(result, entry)
            for lease in commits:
                self._open[lease].committing = True
        taken = {commit.lease_id for commit in self._write(list(commits.values()))} if commits else set()
        with self._lock:
            self._duplicates += len(results) - len(taken)
        return [result.lease in taken for result in results]

    def _commit(self, result: LeaseResult, entry: _Open) -> Commit:
        brought = sorted([e.index for shard in result.shards for e in shard.entries] + [row.index for row in result.skipped])
        if brought != list(range(entry.start, entry.stop)):
            raise ActorError(f"lease {result.lease} came back with {len(brought)} rows that are not rows {entry.start} to {entry.stop - 1}")
        return Commit(result.lease, self.epoch, entry.start, entry.stop, tuple(result.shards), tuple(result.skipped))

    def _write(self, commits: list[Commit]) -> list[Commit]:
        """Write commits, without the lock: storage is slow, and other producers must not wait for it. Returns those that stand."""
        ours = []
        try:
            if _stored_epoch(self.store) != self.epoch:
                reason = f"another ledger has taken over {self.store.settings.root}: this one (epoch {self.epoch}) stops"
                self._give_up(reason)
                raise ActorError(reason)
            for commit, standing in zip(commits, self._writers.map(self._publish, commits), strict=True):
                with self._lock:
                    self._tally.add(standing)
                    self._close(commit.lease_id)
                    self._commits += standing is commit
                if standing is commit:
                    ours.append(commit)
        finally:
            with self._lock:
                for commit in commits:
                    if entry := self._open.get(commit.lease_id):
                        entry.committing = False
        return ours

    def _publish(self, commit: Commit) -> Commit:
        """Write one commit; returns the one that stands, ours or that of a ledger which wrote just before we took over."""
        try:
            write_commit(self.store, commit)
        except AlreadyCommitted:
            return read_commit(self.store, commit_key(commit.lease_id))
        return commit

    def fail(self, lease: str, producer: str, reason: str) -> None:
        """Give a lease back; after `max_attempts` its rows are reported as failed and nobody gets them again."""
        with self._lock:
            entry = self._open.get(lease)
            if entry is not None and entry.holder == producer:
                self._release(lease, reason)

    def give_back(self, lease: str, producer: str) -> None:
        """Give a lease back for a reason that has nothing to do with its rows: the attempt does not count."""
        with self._lock:
            entry = self._open.get(lease)
            if entry is not None and entry.holder == producer:
                entry.attempts -= 1
                self._leased.pop(lease)
                self._put_back(entry)

    def release_producer(self, producer: str, reason: str) -> None:
        """Free everything a dead producer held, without waiting for the deadlines."""
        with self._lock:
            for lease in [lease for lease in self._leased if self._open[lease].holder == producer]:
                self._release(lease, reason)

    def status(self) -> LedgerStatus:
        """Counts so far; expired leases are freed on the way."""
        with self._lock:
            self._expire()
            failed = tuple(_merged(self._failed))
            return _status(self.rows, self._tally, len(self._leased), failed, self._commits, self._duplicates)

    def _promise(self, lease: str, producer: str) -> None:
        entry = self._open[lease]
        entry.holder, entry.deadline = producer, self.clock() + self.settings.lease_seconds
        self._leased[lease] = None
        self._leased.move_to_end(lease)

    def _expire(self) -> None:
        now = self.clock()
        while self._leased and (entry := self._open[lease := next(iter(self._leased))]).deadline < now:
            self._release(lease, f"no sign of life from {entry.holder} for {self.settings.lease_seconds:.0f} s")

    def _release(self, lease: str, reason: str) -> None:
        """A lease comes back unfinished: once more as it is, then row by row, then its rows are reported."""
        entry = self._open[lease]
        self._leased.pop(lease)
        single, last = entry.stop - entry.start == 1, self.settings.max_attempts - 1
        if entry.committing:  # its result is on the way to storage
            self._put_back(entry)
        elif entry.attempts > last and single:
            self._failed.append(FailedRange(entry.start, entry.stop, reason))
            self._close(lease)
        elif entry.attempts >= last and not single:
            self._close(lease)
            for row in range(entry.start, entry.stop):
                self._put_back(_Open(row, row + 1, last))
        else:
            self._put_back(entry)

    def _put_back(self, entry: _Open) -> None:
        name = lease_id(entry.start, entry.stop)
        entry.holder = None
        self._open[name] = entry
        self._waiting[name] = None

    def _give_up(self, reason: str) -> None:
        """Hand out nothing more: whatever is open could never be committed."""
        with self._lock:
            self._failed += [FailedRange(entry.start, entry.stop, reason) for entry in self._open.values()]
            self._open.clear()
            self._waiting.clear()
            self._leased.clear()

    def _close(self, lease: str) -> None:
        self._open.pop(lease, None)
        self._leased.pop(lease, None)
        self._waiting.pop(lease, None)


def committed_status(store: ObjectStore, rows: int) -> LedgerStatus:
    """How far a cache of `rows` rows is by its commits alone: nothing needs to run for it."""
    _stored_epoch(store)  # damaged? Better told now than by an actor that cannot start
    return _status(rows, committed(store)[1])


def _status(
    rows: int, tally: Tally, leased: int = 0, failed: tuple[FailedRange, ...] = (), commits: int = 0, twice: int = 0
) -> LedgerStatus:
    skipped = tally.skipped.total()
    return LedgerStatus(rows, tally.done, tally.cached, skipped, tally.tokens, tally.bytes, leased, failed, commits, twice)


def _merged(failed: Iterable[FailedRange]) -> list[FailedRange]:
    """Neighbouring ranges that failed for one reason, as one."""
    merged: list[FailedRange] = []
    for failure in sorted(failed, key=lambda failure: failure.start):
        if merged and (merged[-1].stop, merged[-1].reason) == (failure.start, failure.reason):
            failure = FailedRange(merged.pop().start, failure.stop, failure.reason)
        merged.append(failure)
    return merged


def _stored_epoch(store: ObjectStore) -> int:
    """Epoch of the ledger that owns the cache; 0 before the first."""
    try:
        return int(json.loads(store.get(_EPOCH_KEY))["epoch"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise ActorError(
            f"{store.url(_EPOCH_KEY)} is damaged ({error!r}). Remove it while no `cache` job runs; the commits tell the rest."
        ) from error


def _gaps(done: Iterable[tuple[int, int]], rows: int, lease_rows: int) -> list[tuple[int, int]]:
    """Split what `done` leaves of [0, rows) at multiples of `lease_rows`, so that a restarted ledger cuts where the last one cut."""
    gaps, position = [], 0
    for start, stop in [*sorted(done), (rows, rows)]:
        while position < start:
            end = min(start, (position // lease_rows + 1) * lease_rows)
            gaps.append((position, end))
            position = end
        position = max(position, stop)
    return gaps
