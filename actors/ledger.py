"""Who caches which rows: leases with deadlines, and the commits that make their results count.

`Ledger` is a plain class, so that tests drive it with their own clock; `actors.producer` runs it as the Ray actor `CacheLedger`.
It holds metadata only. Its whole state can be rebuilt from the commits on storage, so it may die at any moment.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.errors import ActorError
from storage.commits import Commit, Skipped, lease_id, read_commits, write_commit
from storage.object_store import ObjectStore
from storage.shard import ShardInfo

_EPOCH_KEY = "ledger.json"


@dataclass(frozen=True)
class Lease:
    """Rows [start, stop) of the corpus, promised to one producer until `deadline` (seconds since the epoch)."""

    id: str
    start: int
    stop: int
    deadline: float
    attempt: int


@dataclass(frozen=True)
class LeaseReply:
    """A lease, or None: then either all is `done`, or the rest is in other hands and may come back."""

    lease: Lease | None
    done: bool


@dataclass(frozen=True)
class LedgerSettings:
    """`lease_rows` rows a lease; a lease that shows no sign of life for `lease_seconds` goes to another, `max_attempts` times at most."""

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
    """How far the cache is. Rows count as done when committed, cached or skipped; `tokens` and `bytes` are those cached."""

    rows: int
    done: int
    cached: int
    skipped: int
    tokens: int
    bytes: int
    leased: int
    failed: tuple[FailedRange, ...] = ()


@dataclass
class _Open:
    """A range not yet committed: waiting (holder None) or leased."""

    start: int
    stop: int
    attempts: int = 0
    holder: str | None = None
    deadline: float = 0.0
    reason: str = ""


@dataclass
class _Totals:
    done: int = 0
    cached: int = 0
    skipped: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, commit: Commit) -> None:
        entries = [entry for shard in commit.shards for entry in shard.entries]
        self.done += commit.stop - commit.start
        self.cached += len(entries)
        self.skipped += len(commit.skipped)
        self.tokens += sum(entry.tokens for entry in entries)
        self.bytes += sum(shard.bytes for shard in commit.shards)


@dataclass
class Ledger:
    """Leases over rows [0, rows) of a corpus whose row indices never change (it only grows at its end).

    Args:
        store: the cache's folder.
        rows: how many rows the corpus has now.
        settings: see LedgerSettings.
        clock: seconds since the epoch; a test brings its own.
    """

    store: ObjectStore
    rows: int
    settings: LedgerSettings = LedgerSettings()
    clock: Callable[[], float] = time.time
    _open: dict[str, _Open] = field(default_factory=dict)
    _waiting: deque[str] = field(default_factory=deque)
    _leased: set[str] = field(default_factory=set)
    _failed: list[FailedRange] = field(default_factory=list)
    _totals: _Totals = field(default_factory=_Totals)

    def __post_init__(self) -> None:
        # Whoever claimed last owns the cache; an older ledger finds out before its next commit.
        self.epoch = _stored_epoch(self.store) + 1
        self.store.put(_EPOCH_KEY, json.dumps({"epoch": self.epoch}).encode())
        commits = read_commits(self.store)
        for commit in commits:
            self._totals.add(commit)
        for start, stop in _gaps([(commit.start, commit.stop) for commit in commits], self.rows, self.settings.lease_rows):
            name = lease_id(start, stop)
            self._open[name] = _Open(start, stop)
            self._waiting.append(name)

    def lease(self, producer: str) -> LeaseReply:
        """Promise the next free range to `producer`."""
        self._expire()
        if not self._waiting:
            return LeaseReply(None, done=not self._open)
        name = self._waiting.popleft()
        entry = self._open[name]
        entry.attempts += 1
        entry.holder, entry.deadline = producer, self.clock() + self.settings.lease_seconds
        self._leased.add(name)
        return LeaseReply(Lease(name, entry.start, entry.stop, entry.deadline, entry.attempts), done=False)

    def heartbeat(self, lease: str, producer: str) -> bool:
        """Extend the lease; False tells the producer that it has lost it and may stop."""
        entry = self._open.get(lease)
        if entry is None or entry.holder != producer:
            return False
        entry.deadline = self.clock() + self.settings.lease_seconds
        return True

    def complete(self, lease: str, shards: Sequence[ShardInfo], skipped: Sequence[Skipped]) -> bool:
        """Commit a lease's result. False: its rows are not open, another's result was committed before; the shards are garbage.

        A result is taken from whoever brings it first, holder or not: the rows are the same, and the work is done.

        Raises:
            ActorError: the result does not cover the lease's rows exactly once, or another ledger has taken over this cache.
        """
        entry = self._open.get(lease)
        if entry is None:
            return False
        covered = sorted([e.index for shard in shards for e in shard.entries] + [s.index for s in skipped])
        if covered != list(range(entry.start, entry.stop)):
            raise ActorError(f"lease {lease} came back with {len(covered)} rows that are not rows {entry.start} to {entry.stop - 1}")
        if _stored_epoch(self.store) != self.epoch:
            reason = f"another ledger has taken over {self.store.settings.root}: this one (epoch {self.epoch}) stops"
            self._give_up(reason)
            raise ActorError(reason)
        commit = Commit(lease, self.epoch, entry.start, entry.stop, tuple(shards), tuple(skipped))
        write_commit(self.store, commit)
        self._totals.add(commit)
        self._close(lease)
        return True

    def fail(self, lease: str, producer: str, reason: str) -> None:
        """Give a lease back; after `max_attempts` its rows are reported as failed and nobody gets them again."""
        entry = self._open.get(lease)
        if entry is not None and entry.holder == producer:
            self._release(lease, reason)

    def release_producer(self, producer: str, reason: str) -> None:
        """Free everything a dead producer held, without waiting for the deadlines."""
        for lease in [lease for lease in self._leased if self._open[lease].holder == producer]:
            self._release(lease, reason)

    def status(self) -> LedgerStatus:
        """Counts so far; expired leases are freed on the way."""
        self._expire()
        totals = self._totals
        return LedgerStatus(
            self.rows, totals.done, totals.cached, totals.skipped, totals.tokens, totals.bytes, len(self._leased), tuple(self._failed)
        )

    def _expire(self) -> None:
        now = self.clock()
        for lease in [lease for lease in self._leased if self._open[lease].deadline < now]:
            self._release(lease, f"no sign of life from {self._open[lease].holder} for {self.settings.lease_seconds:.0f} s")

    def _release(self, lease: str, reason: str) -> None:
        entry = self._open[lease]
        entry.holder, entry.reason = None, reason
        if entry.attempts >= self.settings.max_attempts:
            self._failed.append(FailedRange(entry.start, entry.stop, reason))
            self._close(lease)
        else:
            self._leased.discard(lease)
            self._waiting.append(lease)

    def _give_up(self, reason: str) -> None:
        """Hand out nothing more: whatever is open could never be committed."""
        self._failed += [FailedRange(entry.start, entry.stop, reason) for entry in self._open.values()]
        for lease in list(self._open):
            self._close(lease)

    def _close(self, lease: str) -> None:
        del self._open[lease]
        self._leased.discard(lease)
        if lease in self._waiting:
            self._waiting.remove(lease)


def committed_status(store: ObjectStore, rows: int) -> LedgerStatus:
    """How far a cache of `rows` rows is by its commits alone: nothing needs to run for it."""
    totals = _Totals()
    for commit in read_commits(store):
        totals.add(commit)
    return LedgerStatus(rows, totals.done, totals.cached, totals.skipped, totals.tokens, totals.bytes, leased=0)


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


def _gaps(done: Sequence[tuple[int, int]], rows: int, lease_rows: int) -> list[tuple[int, int]]:
    """Split what `done` leaves of [0, rows) at multiples of `lease_rows`, so that a restarted ledger cuts where the last one cut."""
    gaps, position = [], 0
    for start, stop in [*sorted(done), (rows, rows)]:
        while position < start:
            end = min(start, (position // lease_rows + 1) * lease_rows)
            gaps.append((position, end))
            position = end
        position = max(position, stop)
    return gaps
