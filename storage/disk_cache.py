"""A capped cache on a node's disk, shared by all processes of the node: workers of a run, trials of a sweep.

<folder>/index.sqlite   name, size and last use of every file; one transaction makes room and reserves it before a byte is written
<folder>/<name>         one cached object
<folder>/lock-<n>       whoever holds it fetches; the others wait and find the file

Local disks only (the locks need them). A file is in the index from before its first byte until after its last, so whatever dies when, the
folder's bytes never pass the cap. Content is checked by whoever reads it; nothing is synced, since a torn file is only fetched again.
"""

import fcntl
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StorageError

log = logging.getLogger(__name__)

_INDEX = "index.sqlite"
_LOCKS = 64
_BLOCK = 4096
_SLACK = 256 * 1024  # what the index and its journal may grow by in one transaction
_NAME = re.compile(r"[0-9a-f]{16,128}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON files (used);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON files BEGIN UPDATE total SET bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON files BEGIN UPDATE total SET bytes = bytes - old.bytes; END;
"""


@dataclass(frozen=True)
class DiskCacheSettings:
    """`folder` is made on each node that reads; all its processes together keep at most `cap_bytes` in it."""

    folder: str
    cap_bytes: int


class DiskCache:
    """Least recently used goes first. Thread-safe; make one in each process.

    Trouble with the disk (full, read-only, broken) never stops a reader: the cache switches itself off and says so once.

    Args:
        settings: where, and how large.
        tell: gets the one line that says why the cache is off.
    """

    def __init__(self, settings: DiskCacheSettings, tell: Callable[[str], None] = log.warning) -> None:
        if settings.cap_bytes < 4 * _SLACK:
            raise StorageError(f"a disk cache of {settings.cap_bytes} bytes holds little but its index: give it at least {4 * _SLACK}")
        self._folder, self._cap, self._tell = Path(settings.folder).expanduser(), settings.cap_bytes, tell
        self._lock = threading.Lock()
        self._off = False
        self._index: sqlite3.Connection | None = None
        self.hit_bytes = 0
        """Bytes that came from the disk so far."""
        self.fetched_bytes = 0
        """Bytes that had to be fetched so far."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # synchronous off: a crash of the machine may cost the index, and with it the cached files, which are only copies.
            self._index = sqlite3.connect(self._folder / _INDEX, timeout=60, isolation_level=None, check_same_thread=False)
            self._index.execute("PRAGMA synchronous = OFF")
            self._index.execute("PRAGMA journal_mode = TRUNCATE")
            with self._transaction():
                for statement in _SCHEMA.strip().split("\n"):
                    self._index.execute(statement)
        except (OSError, sqlite3.Error) as error:
            self._switch_off(error)

    def read(self, name: str, intact: Callable[[bytes], bool], fetch: Callable[[], bytes]) -> bytes:
        """The object `name`, from the disk if it lies there `intact`, else from `fetch`, whose result is kept.

        Of several that want the same at once, in whatever thread or process, one fetches. What `fetch` raises is passed on.
        """
        lock = None
        try:
            if not self._off:
                lock = self._hold(name)
        except OSError as error:
            self._switch_off(error)
        if lock is None:
            return self._fetched(fetch())
        try:
            data = self._load(name)
            if data is not None and intact(data):
                with self._lock:
                    self.hit_bytes += len(data)
                return data
            data = self._fetched(fetch())
            self._keep(name, data)
            return data
        finally:
            os.close(lock)

    def close(self) -> None:
        """Close the index; the files stay for the next reader."""
        with self._lock:
            if self._index is not None:
                self._index.close()
            self._off = True

    def _fetched(self, data: bytes) -> bytes:
        with self._lock:
            self.fetched_bytes += len(data)
        return data

    def _hold(self, name: str) -> int:
        """Wait for the lock that `name` falls under; closing the returned file descriptor frees it, and so does dying."""
        if not _NAME.fullmatch(name):
            raise StorageError(f"{name!r} is not a name for a cached file: write a hash in hex")
        lock = os.open(self._folder / f"lock-{int(name[:8], 16) % _LOCKS}", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def _load(self, name: str) -> bytes | None:
        try:
            data = (self._folder / name).read_bytes()
            with self._transaction() as index:
                index.execute("UPDATE files SET used = ? WHERE name = ?", (time.time_ns(), name))
        except FileNotFoundError:
            return None
        except (OSError, sqlite3.Error) as error:
            self._switch_off(error)
            return None
        return data

    def _keep(self, name: str, data: bytes) -> None:
        if self._off:
            return
        path = self._folder / name
        temporary = self._folder / f"{name}.tmp"  # one name is enough: we hold its lock
        try:
            if not self._reserve(name, -(-len(data) // _BLOCK) * _BLOCK):
                return
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            with self._transaction() as index:
                if not index.execute("UPDATE files SET used = ? WHERE name = ?", (time.time_ns(), name)).rowcount:
                    path.unlink(missing_ok=True)  # evicted while it was written: nobody counts it any more
        except (OSError, sqlite3.Error) as error:
            self._switch_off(error)

    def _reserve(self, name: str, size: int) -> bool:
        """Make room for `size` bytes, by evicting what was used longest ago, and count them as taken; False where they never fit."""
        with self._transaction() as index:
            self._evict(index, name)
            room = self._cap - _SLACK - sum(path.stat().st_blocks * 512 for path in self._folder.glob(f"{_INDEX}*"))
            if size > room:
                return False
            while index.execute("SELECT bytes FROM total").fetchone()[0] + size > room:
                self._evict(index, index.execute("SELECT name FROM files ORDER BY used LIMIT 1").fetchone()[0])
            index.execute("INSERT INTO files VALUES (?, ?, ?)", (name, size, time.time_ns()))
        return True

    def _evict(self, index: sqlite3.Connection, name: str) -> None:
        # Files first: dying in between leaves an entry without a file, never a file without an entry.
        for path in (self._folder / name, self._folder / f"{name}.tmp"):
            path.unlink(missing_ok=True)
        index.execute("DELETE FROM files WHERE name = ?", (name,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._index is None:
                raise sqlite3.OperationalError("the index is not open")
            self._index.execute("BEGIN IMMEDIATE")
            try:
                yield self._index
            except BaseException:
                self._index.execute("ROLLBACK")
                raise
            self._index.execute("COMMIT")

    def _switch_off(self, error: Exception) -> None:
        with self._lock:
            before, self._off = self._off, True
        if not before:
            reason = getattr(error, "strerror", None) or str(error)
            self._tell(f"the disk cache in {self._folder} is off from now on ({reason}): every sample comes from storage. See to the disk")
