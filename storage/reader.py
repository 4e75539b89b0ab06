"""Reads samples in a given order through a thread pool, prefetching within a byte budget."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

from storage.contract import Contract
from storage.disk_cache import DiskCache
from storage.errors import StorageError, StorageUnavailable
from storage.object_store import ObjectStore
from storage.sample import Sample
from storage.shard import Entry, read_sample

_MOST_AHEAD = 1024  # futures: tiny samples must not queue by the hundred thousand
_ASK_AGAIN_SECONDS = 0.1


class Entries(Protocol):
    """Where samples lie, by position: a manifest, or what has been committed of a cache that still grows."""

    def entry(self, position: int) -> tuple[str, Entry]:
        """(shard key, entry) of a sample."""
        ...


class _Wanted(NamedTuple):
    shard: str
    entry: Entry
    size: int  # bytes that reading it may hold


class SampleReader:
    """Streams decoded samples; fetching, checking and decoding happen in threads.

    Args:
        store: of the cache.
        contract: of the cache; its codec and shapes rule the decoding.
        entries: where the samples lie.
        threads: how many ranged reads and decodes run at once.
        prefetch_bytes: bound on encoded plus decoded bytes of samples that were requested and not yet handed over. A single sample
            larger than that is still read, alone.
        stall_seconds: how long the consumer waits for one sample; longer than a store takes to fail by itself after all its attempts.
        disk_cache: of the node, if there is one.
    """

    def __init__(
        self,
        store: ObjectStore,
        contract: Contract,
        entries: Entries,
        threads: int = 4,
        prefetch_bytes: int = 256 * 2**20,
        stall_seconds: float = 900,
        disk_cache: DiskCache | None = None,
    ) -> None:
        if threads < 1 or prefetch_bytes < 1:
            raise StorageError(f"a reader needs at least one thread and one byte of prefetch, not {threads} and {prefetch_bytes}")
        self._store, self._contract, self._entries = store, contract, entries
        self._prefetch_bytes, self._disk_cache = prefetch_bytes, disk_cache
        self._stall_seconds, self._stalled = stall_seconds, False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reader")
        self.wait_seconds = 0.0
        """How long the consumer waited for data, in all."""
        self.read_bytes = 0
        """Encoded bytes handed over so far."""
        self.peak_bytes = 0
        """Largest number of bytes that were in flight at once."""

    def __enter__(self) -> "SampleReader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def stream(self, positions: Iterable[int | None]) -> Iterator[Sample]:
        """Samples at `positions`, in that order. Taken lazily, so the iterable may be endless.

        A None among them means "not known yet": what was requested before is handed over first, then the iterable is asked again.

        Raises:
            CorruptShard: names shard, row and cause; nothing is skipped silently.
            StorageUnavailable: the store cannot be reached, or hangs.
        """
        upcoming = iter(positions)
        ahead: deque[tuple[Future[Sample], _Wanted]] = deque()
        in_flight = 0
        following: _Wanted | None = None
        try:
            while True:
                while len(ahead) < _MOST_AHEAD:
                    following = following or self._ask(upcoming, patient=not ahead)
                    if following is None or (ahead and in_flight + following.size > self._prefetch_bytes):
                        break
                    ahead.append((self._submit(following), following))
                    in_flight += following.size
                    self.peak_bytes = max(self.peak_bytes, in_flight)
                    following = None
                if not ahead:
                    return
                future, wanted = ahead.popleft()
                started = time.perf_counter()
                if future not in wait([future], self._stall_seconds).done:
                    self._stalled = True
                    where = f"row {wanted.entry.row_id} has not come from {self._store.url(wanted.shard)}"
                    raise StorageUnavailable(
                        f"{where} for {self._stall_seconds:.0f} s, nor an error: the storage hangs ({len(ahead)} more rows wait behind). "
                        "Check the mount or the server, then run this again."
                    )
                sample = future.result()
                self.wait_seconds += time.perf_counter() - started
                self.read_bytes += wanted.entry.length
                in_flight -= wanted.size
                del future  # it would hold the sample while the consumer works
                yield sample
        finally:
            for future, _ in ahead:
                future.cancel()

    def close(self) -> None:
        """Stop the threads; streams that are still open end with an error."""
        self._pool.shutdown(wait=not self._stalled, cancel_futures=True)

    def _ask(self, upcoming: Iterator[int | None], patient: bool) -> _Wanted | None:
        """What is to be read next; None at the end, and where it is not known yet unless `patient`."""
        started = time.perf_counter()
        try:
            for position in upcoming:
                if position is not None:
                    return self._wanted(position)
                if not patient:
                    return None
                time.sleep(_ASK_AGAIN_SECONDS)
            return None
        finally:
            self.wait_seconds += time.perf_counter() - started

    def _submit(self, wanted: _Wanted) -> Future[Sample]:
        return self._pool.submit(read_sample, self._store, wanted.shard, wanted.entry, self._contract, self._disk_cache)

    def _wanted(self, position: int) -> _Wanted:
        shard, entry = self._entries.entry(int(position))
        capture, hidden = self._contract.capture, self._contract.target.hidden_size
        rows = entry.tokens if capture.last_hidden_rows == "all" else entry.supervised
        decoded = 2 * hidden * (len(capture.layer_ids) * entry.tokens + rows)
        return _Wanted(shard, entry, entry.length + decoded)
