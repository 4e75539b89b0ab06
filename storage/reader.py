"""Reads samples in a given order through a thread pool, prefetching within a byte budget."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from storage.contract import Contract
from storage.errors import StorageError
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.sample import Sample
from storage.shard import Entry, read_sample

_MOST_AHEAD = 1024  # futures: tiny samples must not queue by the hundred thousand


class SampleReader:
    """Streams decoded samples; fetching, checking and decoding happen in threads.

    Args:
        store: of the cache.
        contract: of the cache; its codec and shapes rule the decoding.
        manifest: where the samples lie.
        threads: how many ranged reads and decodes run at once.
        prefetch_bytes: bound on encoded plus decoded bytes of samples that were requested and not yet handed over. A single sample
            larger than that is still read, alone.
    """

    def __init__(
        self, store: ObjectStore, contract: Contract, manifest: Manifest, threads: int = 4, prefetch_bytes: int = 256 * 2**20
    ) -> None:
        if threads < 1 or prefetch_bytes < 1:
            raise StorageError(f"a reader needs at least one thread and one byte of prefetch, not {threads} and {prefetch_bytes}")
        self._store, self._contract, self._manifest = store, contract, manifest
        self._prefetch_bytes = prefetch_bytes
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

    def stream(self, positions: Iterable[int]) -> Iterator[Sample]:
        """Samples at `positions` of the manifest, in that order. Taken lazily, so the iterable may be endless.

        Raises:
            CorruptShard: names shard, row and cause; nothing is skipped silently.
            StorageUnavailable: the store cannot be reached.
        """
        upcoming = iter(positions)
        ahead: deque[tuple[Future[Sample], int, int]] = deque()  # future, bytes it may hold, bytes it reads
        in_flight = 0
        following = self._next(upcoming)
        try:
            while following or ahead:
                while following and len(ahead) < _MOST_AHEAD and (not ahead or in_flight + following[2] <= self._prefetch_bytes):
                    shard, entry, size = following
                    ahead.append((self._pool.submit(read_sample, self._store, shard, entry, self._contract), size, entry.length))
                    in_flight += size
                    self.peak_bytes = max(self.peak_bytes, in_flight)
                    following = self._next(upcoming)
                future, size, length = ahead.popleft()
                started = time.perf_counter()
                sample = future.result()
                self.wait_seconds += time.perf_counter() - started
                self.read_bytes += length
                in_flight -= size
                del future  # it would hold the sample while the consumer works
                yield sample
        finally:
            for future, _, _ in ahead:
                future.cancel()

    def close(self) -> None:
        """Stop the threads; streams that are still open end with an error."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _next(self, positions: Iterator[int]) -> tuple[str, Entry, int] | None:
        position = next(positions, None)
        if position is None:
            return None
        shard, entry = self._manifest.entry(int(position))
        capture, hidden = self._contract.capture, self._contract.target.hidden_size
        rows = entry.tokens if capture.last_hidden_rows == "all" else entry.supervised
        decoded = 2 * hidden * (len(capture.layer_ids) * entry.tokens + rows)
        return shard, entry, entry.length + decoded
