"""The reader: in order, within its bytes, from a folder and from S3, and never silent about a bad sample."""

import itertools
import time

import numpy as np
import pytest
from storage_cases import build_cache, contract, same

from storage import reader as reader_module
from storage.errors import CorruptShard, StorageError
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.order import ReadingOrder
from storage.reader import SampleReader

CASE = contract("lossless")


@pytest.fixture(params=["folder", "s3", "memory"])
def cache(request, tmp_path):
    """(store, samples by index, manifest); memory stands for any other URL that fsspec understands"""
    if request.param == "folder":
        store = ObjectStore(StorageSettings(str(tmp_path / "cache")))
    elif request.param == "memory":
        store = ObjectStore(StorageSettings(f"memory://{tmp_path.name}/cache"))
    else:
        store = request.getfixturevalue("s3").store(tmp_path.name)
    samples = build_cache(store, CASE, 14, leases=2)
    return store, samples, Manifest.current(store)


@pytest.fixture
def local(tmp_path):
    store = ObjectStore(StorageSettings(str(tmp_path / "cache")))
    samples = build_cache(store, CASE, 14, leases=2)
    return store, samples, Manifest.current(store)


def test_samples_come_in_the_reading_order(cache):
    store, samples, manifest = cache
    order = ReadingOrder(manifest, 0, window_shards=2)
    positions = np.concatenate([order.epoch(0), order.epoch(1)])
    with SampleReader(store, CASE, manifest, threads=4) as reader:
        got = list(reader.stream(positions))
    assert all(same(sample, samples[position]) for sample, position in zip(got, positions, strict=True))
    assert reader.read_bytes == 2 * manifest.lengths.sum()
    assert reader.wait_seconds > 0


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetch_stays_within_its_bytes(local, threads, monkeypatch):
    """Bytes requested and not yet handed over, counted by the test itself."""
    store, samples, manifest = local
    held, largest = 0, 0
    read = reader_module.read_sample

    def counted(store_, shard, entry, contract_, disk_cache):
        nonlocal held, largest
        held += entry.length + samples[entry.index].context.nbytes
        largest = max(largest, held)
        return read(store_, shard, entry, contract_, disk_cache)

    monkeypatch.setattr(reader_module, "read_sample", counted)
    bound = 60_000
    with SampleReader(store, CASE, manifest, threads, prefetch_bytes=bound) as reader:
        for sample in reader.stream([*range(14)] * 3):
            entry = manifest.entry(int(sample.row_id[4:]))[1]
            held -= entry.length + sample.context.nbytes
            time.sleep(0.001)
    assert bound / 2 < reader.peak_bytes <= bound
    assert largest <= bound + max(sample.nbytes for sample in samples)


def test_a_sample_larger_than_the_bound_is_read_alone(local):
    store, samples, manifest = local
    with SampleReader(store, CASE, manifest, prefetch_bytes=1) as reader:
        assert [sample.row_id for sample in reader.stream(range(5))] == [sample.row_id for sample in samples[:5]]
        assert reader.peak_bytes < 4 * max(sample.nbytes for sample in samples)


def test_positions_may_be_endless(local):
    store, _, manifest = local
    with SampleReader(store, CASE, manifest) as reader:
        stream = reader.stream(itertools.cycle(range(14)))
        assert len(list(itertools.islice(stream, 100))) == 100
        stream.close()


def test_a_bad_sample_is_an_error_at_its_place(local):
    store, samples, manifest = local
    shard, entry = manifest.entry(9)
    data = bytearray(store.get(shard))
    data[entry.offset + entry.length // 2] ^= 1
    store.put(shard, data)
    with SampleReader(store, CASE, manifest) as reader:
        stream = reader.stream(range(14))
        assert [next(stream).row_id for _ in range(9)] == [sample.row_id for sample in samples[:9]]
        with pytest.raises(CorruptShard, match=f"{shard}, row row-9"):
            next(stream)


def test_unusable_settings_are_refused(local):
    store, _, manifest = local
    with pytest.raises(StorageError, match="at least one thread"):
        SampleReader(store, CASE, manifest, threads=0)
    with SampleReader(store, CASE, manifest) as reader, pytest.raises(StorageError, match="no sample 99"):
        list(reader.stream([99]))
