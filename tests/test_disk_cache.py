"""The node's disk cache: never above its cap, one fetch for all who want the same, and no trouble of the disk stops a reader."""

import hashlib
import multiprocessing
import os
import resource
import signal
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from storage_cases import build_cache, contract, same

from storage.disk_cache import DiskCache, DiskCacheSettings
from storage.errors import StorageError
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.reader import SampleReader

MIB = 2**20
CAP = 2 * MIB
SPAWN = multiprocessing.get_context("spawn")


def content(number: int) -> bytes:
    """About 100 kB that belong to a number."""
    return np.random.default_rng(number).bytes(90_000 + 1000 * (number % 20))


def name(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def on_disk(folder: Path) -> int:
    """Bytes that the folder's files take on the disk, also while they come and go."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class Reads:
    """Reads numbers through a cache and counts what had to be fetched."""

    def __init__(self, folder: Path, cap: int = CAP) -> None:
        self.told: list[str] = []
        self.fetched: list[int] = []
        self.cache = DiskCache(DiskCacheSettings(str(folder), cap), self.told.append)

    def __call__(self, number: int) -> None:
        def fetch() -> bytes:
            self.fetched.append(number)
            return content(number)

        assert self.cache.read(name(number), lambda data: data == content(number), fetch) == content(number)


def test_what_was_read_comes_from_the_disk_for_whoever_reads_next(tmp_path: Path) -> None:
    first = Reads(tmp_path)
    for number in [0, 1, 2, 1, 0]:
        first(number)
    assert first.fetched == [0, 1, 2]
    assert first.cache.hit_bytes == len(content(0)) + len(content(1))
    first.cache.close()
    second = Reads(tmp_path)
    second(2)
    assert (second.fetched, second.told) == ([], [])


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    reads = Reads(tmp_path)
    for number in range(12):
        reads(number)
    reads(0)
    for number in range(12, 22):
        reads(number)
        reads(0)
    assert len(reads.fetched) == 22, "0 was used all the time and stays"
    reads(21)
    assert len(reads.fetched) == 22
    reads(1)
    assert reads.fetched[-1] == 1
    assert CAP / 2 < on_disk(tmp_path) <= CAP


def test_what_is_larger_than_the_cap_is_read_and_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(DiskCacheSettings(str(tmp_path), CAP))
    huge = bytes(CAP)
    assert cache.read(name(0), lambda data: True, lambda: huge) == huge
    assert on_disk(tmp_path) < CAP / 10
    with pytest.raises(StorageError, match="give it at least"):
        DiskCache(DiskCacheSettings(str(tmp_path), 1000))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_corrupt_file_is_fetched_again(tmp_path: Path, damage: str) -> None:
    reads = Reads(tmp_path)
    reads(7)
    data = bytearray(content(7))
    data[5000] ^= 1
    (tmp_path / name(7)).write_bytes({"flipped": bytes(data), "cut": content(7)[:-1], "empty": b""}[damage])
    reads(7)
    reads(7)
    assert (reads.fetched, reads.told) == ([7, 7], [])
    assert (tmp_path / name(7)).read_bytes() == content(7)


def test_what_fails_to_be_fetched_is_an_error_and_not_kept(tmp_path: Path) -> None:
    reads = Reads(tmp_path)

    def fail() -> bytes:
        raise StorageError("gone")

    with pytest.raises(StorageError, match="gone"):
        reads.cache.read(name(3), lambda data: True, fail)
    reads(3)
    assert reads.fetched == [3]


def lockstep(folder: Path, start: object, numbers: list[int], log: Path) -> None:
    reads = Reads(folder)
    start.wait()  # type: ignore[attr-defined]
    threads = [threading.Thread(target=lambda part=part: [reads(number) for number in numbers[part::2]]) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not reads.told
    log.write_text(" ".join(map(str, reads.fetched)))


def test_processes_that_want_the_same_fetch_it_once(tmp_path: Path) -> None:
    """Three trials with two reader threads each, all over the same samples in the same order."""
    folder, numbers = tmp_path / "node", list(range(15))
    barrier = SPAWN.Barrier(3)
    processes = [SPAWN.Process(target=lockstep, args=(folder, barrier, numbers, tmp_path / f"{trial}.log")) for trial in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    fetched = [int(number) for trial in range(3) for number in (tmp_path / f"{trial}.log").read_text().split()]
    assert sorted(fetched) == numbers


def hammer(folder: Path, seed: int) -> None:
    reads, draw = Reads(folder), np.random.default_rng(seed)
    while True:
        reads(int(draw.integers(80)))


def test_killed_processes_leave_neither_bytes_above_the_cap_nor_lost_files(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    draw, largest = np.random.default_rng(0), 0
    processes = [SPAWN.Process(target=hammer, args=(folder, seed), daemon=True) for seed in range(2)]
    for process in processes:
        process.start()
    for round_ in range(8):
        deadline, patience = time.monotonic() + 0.1 + draw.random() / 5, time.monotonic() + 60
        while time.monotonic() < deadline or (largest <= CAP / 2 and time.monotonic() < patience):  # until they are at work
            largest = max(largest, on_disk(folder))
        victim = int(draw.integers(2))
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        processes[victim].join()
        processes[victim] = SPAWN.Process(target=hammer, args=(folder, 10 + round_), daemon=True)
        processes[victim].start()
    for process in processes:
        process.kill()
        process.join()
    assert CAP / 2 < largest <= CAP
    reads = Reads(folder)
    for number in range(80):
        reads(number)
    assert not reads.told
    listed = dict(sqlite3.connect(folder / "index.sqlite").execute("SELECT name, bytes FROM files").fetchall())
    assert {path.name.removesuffix(".tmp") for path in folder.iterdir() if not path.name.startswith(("index", "lock-"))} <= listed.keys()
    assert sqlite3.connect(folder / "index.sqlite").execute("SELECT bytes FROM total").fetchone()[0] == sum(listed.values())


def short_of_disk(folder: Path, log: Path) -> None:
    # A file system that takes no more: what the kernel refuses here is the write itself, as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))
    reads = Reads(folder)
    for number in [1, 2, 1, 2]:
        reads(number)
    assert reads.fetched == [1, 2, 1, 2]
    assert len(reads.told) == 1
    log.write_text(reads.told[0])


def test_a_disk_that_takes_no_more_is_told_once_and_reading_goes_on(tmp_path: Path) -> None:
    process = SPAWN.Process(target=short_of_disk, args=(tmp_path / "node", tmp_path / "log"))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "is off from now on (File too large): every sample comes from storage" in (tmp_path / "log").read_text()
    assert not (tmp_path / "node" / name(1)).exists()
    assert not list((tmp_path / "node").glob("*.tmp"))


def test_an_index_that_takes_no_more_is_told_once_and_reading_goes_on(tmp_path: Path) -> None:
    """On a full disk the index cannot grow either."""
    reads = Reads(tmp_path, cap=64 * MIB)
    reads(0)
    assert reads.cache._index is not None
    reads.cache._index.execute("PRAGMA max_page_count = 1")  # SQLite takes this for "no more than now"
    for number in range(1, 100):
        reads(number)
    assert len(reads.told) == 1
    assert "is off from now on (database or disk is full)" in reads.told[0]
    reads(0)
    assert reads.fetched == [*range(100), 0]


@pytest.mark.parametrize("trouble", ["no folder", "no index"])
def test_an_unusable_folder_is_told_once_and_reading_goes_on(tmp_path: Path, trouble: str) -> None:
    folder = tmp_path / "node"
    if trouble == "no folder":
        folder.write_text("a file")
    else:
        folder.mkdir()
        (folder / "index.sqlite").write_bytes(b"not a database" * 1000)
    reads = Reads(folder)
    reads(1)
    reads(1)
    assert reads.fetched == [1, 1]
    assert len(reads.told) == 1
    assert str(folder) in reads.told[0]


def test_samples_are_the_same_through_the_cache(tmp_path: Path) -> None:
    store = ObjectStore(StorageSettings(str(tmp_path / "cache")))
    case = contract("lossless")
    samples = build_cache(store, case, 14)
    manifest = Manifest.current(store)
    for round_ in range(2):
        disk = DiskCache(DiskCacheSettings(str(tmp_path / "node"), CAP))
        with SampleReader(store, case, manifest, threads=3, disk_cache=disk) as reader:
            assert all(same(got, want) for got, want in zip(reader.stream(range(14)), samples, strict=True))
        assert (disk.fetched_bytes, disk.hit_bytes) == (manifest.lengths.sum(), 0)[:: 1 if round_ == 0 else -1]
        disk.close()
    # A sample that is broken on storage is an error with or without a cache, and is not kept.
    shard, entry = manifest.entry(3)
    data = bytearray(store.get(shard))
    data[entry.offset + 100] ^= 1
    store.put(shard, data)
    disk = DiskCache(DiskCacheSettings(str(tmp_path / "other"), CAP))
    with SampleReader(store, case, manifest, disk_cache=disk) as reader, pytest.raises(StorageError, match="row row-3"):
        list(reader.stream([3]))
    assert disk.hit_bytes == disk.fetched_bytes == 0
