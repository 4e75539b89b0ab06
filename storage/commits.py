"""Commits: written last, they are the truth of a cache. A shard that no commit names does not belong to it."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from storage.errors import AlreadyCommitted, StorageError
from storage.object_store import ObjectStore
from storage.shard import ShardInfo

COMMITS = "commits/"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row of the lease that is not in the cache, and why."""

    row_id: str
    index: int
    reason: str


@dataclass(frozen=True)
class Commit:
    """The outcome of one lease over corpus rows [start, stop).

    Args:
        lease_id: deterministic, see lease_id().
        epoch: of the ledger that wrote it (fencing).
        shards: what was published for it.
        skipped: rows that were left out.
    """

    lease_id: str
    epoch: int
    start: int
    stop: int
    shards: tuple[ShardInfo, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass
class Tally:
    """Sums over commits: rows covered, samples, their tokens, bytes of the shards, and skipped rows by reason."""

    done: int = 0
    cached: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, commit: Commit) -> None:
        """Count one more commit."""
        self.done += commit.stop - commit.start
        self.cached += sum(len(shard.entries) for shard in commit.shards)
        self.tokens += sum(entry.tokens for shard in commit.shards for entry in shard.entries)
        self.bytes += sum(shard.bytes for shard in commit.shards)
        self.skipped.update(row.reason for row in commit.skipped)


def lease_id(start: int, stop: int) -> str:
    """The id of the lease over rows [start, stop)."""
    return f"{start:010d}-{stop:010d}"


def lease_rows(lease: str) -> tuple[int, int]:
    """(start, stop) of a lease id; inverse of lease_id."""
    start, stop = lease.split("-")
    return int(start), int(stop)


def commit_key(lease: str) -> str:
    """Where the commit of a lease lies."""
    return f"{COMMITS}{lease}.json"


def write_commit(store: ObjectStore, commit: Commit) -> None:
    """Publish a commit. Writing the same one again is fine.

    Raises:
        AlreadyCommitted: the lease's rows were committed before, with another outcome (which stands; our shards are garbage).
    """
    if commit.lease_id != lease_id(commit.start, commit.stop):
        raise StorageError(f"lease id {commit.lease_id!r} is not that of rows {commit.start}..{commit.stop}")
    key = commit_key(commit.lease_id)
    if store.exists(key):
        if read_commit(store, key) != commit:
            raise AlreadyCommitted(f"{store.url(key)} exists with another outcome: these rows were committed by another producer")
        return
    store.put(key, _encode(commit))


def read_commit(store: ObjectStore, key: str) -> Commit:
    """One commit; StorageError that names it where it is truncated, edited or of another form."""
    data = store.get(key)
    where = store.url(key)
    remedy = "Delete it to have its rows cached again"
    try:
        document = json.loads(data)
        checksum = document.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StorageError(f"commit {where} is truncated or damaged ({error}). {remedy}") from error
    if checksum != _checksum(document):
        raise StorageError(f"commit {where} was changed after it was written: its checksum differs. {remedy}")
    try:
        shards = tuple(ShardInfo.from_json(shard) for shard in document["shards"])
        skipped = tuple(Skipped(*row) for row in document["skipped"])
        commit = Commit(document["lease_id"], document["epoch"], document["start"], document["stop"], shards, skipped)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"commit {where} has an unknown form ({error}): it was written by another version. {remedy}") from error
    if key != commit_key(commit.lease_id):
        raise StorageError(f"commit {where} is that of lease {commit.lease_id}. {remedy}")
    return commit


def read_commits(store: ObjectStore, known: Collection[str] = (), threads: int = 16) -> list[Commit]:
    """All commits of a cache except those of the `known` lease ids, sorted by start."""
    skip = {commit_key(lease) for lease in known}
    keys = [key for key in store.list(COMMITS) if key not in skip and key.endswith(".json")]
    if not keys:
        return []
    with ThreadPoolExecutor(min(threads, len(keys)), thread_name_prefix="commits") as pool:
        return sorted(pool.map(lambda key: read_commit(store, key), keys), key=lambda commit: (commit.start, commit.stop))


def _encode(commit: Commit) -> bytes:
    document: dict[str, Any] = {
        "lease_id": commit.lease_id,
        "epoch": commit.epoch,
        "start": commit.start,
        "stop": commit.stop,
        "shards": [shard.to_json() for shard in commit.shards],
        "skipped": [[row.row_id, row.index, row.reason] for row in commit.skipped],
    }
    return _canonical({**document, "checksum": _checksum(document)})


def _checksum(document: Any) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
