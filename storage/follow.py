"""Follow mode (DESIGN, section 4.5): the reading order of a run on a cache that still grows.

<run>/follow/<n>.json   the n-th segment: leases that were committed since the one before, and whether the cache is complete with them

Rank 0 writes a segment, once, before anybody reads from it; so where a sample comes in training stays a pure function of what is recorded,
for any number of workers and after any resumption. The first epoch goes through the segments one after another, shuffled inside each as
in ReadingOrder; once the cache is complete, later epochs shuffle all of it.
"""

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.commits import Commit, commit_key, read_commit, read_commits
from storage.errors import StorageError
from storage.manifest import Manifest, split_manifest
from storage.object_store import ObjectStore
from storage.order import ReadingOrder
from storage.shard import Entry

POLL_SECONDS = 2.0
_THREADS = 16


@dataclass(frozen=True)
class FollowSettings:
    """`rows` of the corpus, by which a complete cache is known; where nothing new comes for `patience_seconds`, the run stops."""

    rows: int
    patience_seconds: float = 1800.0


class FollowOrder:
    """Positions of samples, as far as they are known, and where each sample lies.

    Args:
        cache, record: the cache, and the run's folder for its segments.
        settings: see FollowSettings.
        seed: of the run.
        heldout_rows: how many rows of the first segment, those with the smallest ids, are kept out of training.
        writer: whether this rank writes the segments; exactly one does.
        tell: gets a line whenever it begins to wait for the cache.
    """

    def __init__(
        self,
        cache: ObjectStore,
        record: ObjectStore,
        settings: FollowSettings,
        seed: int,
        heldout_rows: int,
        writer: bool,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._cache, self._record, self._settings, self._seed, self._tell = cache, record, settings, seed, tell
        self._writer, self._heldout_rows = writer, heldout_rows
        self._recorded = 0  # segments
        self._leases: list[str] = []
        self._covered = 0  # rows of the corpus
        self._parts: list[_Part] = []  # segments that hold samples
        self._samples = 0
        self._whole: tuple[Manifest, ReadingOrder] | None = None  # of a complete cache
        self._asked = self._waiting_since = 0.0
        self.heldout: Manifest | None = None
        """The rows kept out of training, once the first segment is there."""
        while self._take_up():
            pass

    def wait_for_heldout(self) -> Manifest:
        """Block until the first segment is there."""
        while self.heldout is None:
            self._look()
            time.sleep(0.1)
        return self.heldout

    def global_batch(self, step: int, batch_size: int) -> tuple[int, NDArray[np.int64]] | None:
        """(epoch, [batch_size] positions) of a step as in ReadingOrder; None while its samples are not committed yet.

        Raises:
            StorageError: nothing new has come for as long as the patience lasts.
        """
        first_epoch = self._samples // batch_size  # whole batches in it, once complete
        if self._whole is None and step >= first_epoch:
            self._look()
            first_epoch = self._samples // batch_size
        if step < first_epoch:
            return 0, self._first_epoch(step * batch_size, (step + 1) * batch_size)
        if self._whole is None:
            return None
        if not first_epoch:
            raise StorageError(f"a global batch of {batch_size} samples cannot be drawn from {self._samples} samples")
        epoch, step = divmod(step, first_epoch)
        positions = self._whole[1].epoch(epoch)[step * batch_size : (step + 1) * batch_size]
        return epoch, self._samples + positions

    def entry(self, position: int) -> tuple[str, Entry]:
        """(shard key, entry) of the sample at a position; beyond the first epoch's positions lie those of the complete manifest."""
        if position >= self._samples and self._whole is not None:
            return self._whole[0].entry(position - self._samples)
        part = self._parts[self._part_of(position)]
        return part.manifest.entry(position - part.start)

    def _part_of(self, position: int) -> int:
        return bisect_right(self._parts, position, key=lambda part: part.start) - 1

    def _first_epoch(self, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at [start, stop) of the first epoch."""
        parts = self._parts[self._part_of(start) : self._part_of(stop - 1) + 1]
        return np.concatenate([part.start + part.order.epoch(0)[max(start - part.start, 0) : stop - part.start] for part in parts])

    def _look(self) -> None:
        """Learn of new segments, or write one if there is something new; not more often than every POLL_SECONDS."""
        now = time.monotonic()
        if now - self._asked < POLL_SECONDS:
            return
        self._asked = now
        if self._take_up() or (self._writer and self._record_new() and self._take_up()):
            self._waiting_since = 0.0
        elif not self._waiting_since:
            self._waiting_since = now
            self._tell(f"waiting for the cache: {self._told()}")
        elif now - self._waiting_since > self._settings.patience_seconds:
            raise StorageError(
                f"{self._cache.settings.root} has not grown for {now - self._waiting_since:.0f} s and is not complete ({self._told()}). "
                "Run `cache` to finish it, then this run again: it goes on from its last checkpoint"
            )

    def _told(self) -> str:
        return f"{self._covered} of {self._settings.rows} rows are committed"

    def _record_new(self) -> bool:
        """Record what has been committed since the last segment; False where that is nothing, or too little to begin with."""
        commits = read_commits(self._cache, known=self._leases)
        samples = sum(len(shard.entries) for commit in commits for shard in commit.shards)
        complete = self._covered + _rows(commits) >= self._settings.rows
        if not commits or (self._recorded == 0 and samples <= self._heldout_rows and not complete):
            return False
        segment = {"leases": [commit.lease_id for commit in commits], "complete": complete}
        self._record.put(_key(self._recorded), json.dumps(segment).encode())
        return True

    def _take_up(self) -> bool:
        """Read the next recorded segment; False where there is none yet."""
        key = _key(self._recorded)
        try:
            segment = json.loads(self._record.get(key))
            leases, complete = [str(lease) for lease in segment["leases"]], bool(segment["complete"])
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self._record.url(key)} is damaged ({error!r}): this run's order is lost. Begin another run") from error
        commits = _read(self._cache, leases)
        manifest = Manifest.from_commits(commits)
        if self._recorded == 0:
            manifest, self.heldout = split_manifest(manifest, self._heldout_rows)
        if len(manifest):
            self._parts.append(_Part(self._samples, manifest, ReadingOrder(manifest, self._seed)))
        self._recorded += 1
        self._leases += leases
        self._covered += _rows(commits)
        self._samples += len(manifest)
        if complete:
            whole = Manifest(pa.concat_tables([part.manifest.table for part in self._parts]), self._leases)
            self._whole = whole, ReadingOrder(whole, self._seed)
        return True


class _Part(NamedTuple):
    """A segment's samples: position of the first, and their order."""

    start: int
    manifest: Manifest
    order: ReadingOrder


def _key(number: int) -> str:
    return f"follow/{number:08d}.json"


def _rows(commits: Sequence[Commit]) -> int:
    return sum(commit.stop - commit.start for commit in commits)


def _read(cache: ObjectStore, leases: Sequence[str]) -> list[Commit]:
    def read(lease: str) -> Commit:
        try:
            return read_commit(cache, commit_key(lease))
        except FileNotFoundError:
            raise StorageError(f"{cache.url(commit_key(lease))} is gone, though this run has trained on it. Begin another run") from None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="follow") as pool:
        return list(pool.map(read, leases))
