"""Commits and manifests: the truth of a cache, found to be changed whenever it was."""

import hashlib
import json

import pytest
from storage_cases import build_cache, contract, same

from storage.commits import Commit, Skipped, lease_id, read_commit, read_commits, write_commit
from storage.errors import StorageError
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.shard import Entry, ShardInfo, read_sample


@pytest.fixture
def store(tmp_path):
    return ObjectStore(StorageSettings(str(tmp_path / "cache")))


def commit(start: int, stop: int, rows: list[str] | None = None) -> Commit:
    rows = rows or [f"r{number}" for number in range(start, stop)]
    entries = tuple(Entry(row, start + number, 100 * number, 100, 7 * number, 10 + number, 5) for number, row in enumerate(rows))
    shard = ShardInfo(f"shards/{start}.arrow", 100 * len(rows), "00", entries)
    return Commit(lease_id(start, stop), 3, start, stop, (shard,), (Skipped("bad", stop - 1, "NaN"),))


def test_commits_come_back_sorted_by_start(store):
    written = [commit(20, 30), commit(0, 20), commit(1_000_000_000, 1_000_000_003)]
    for item in written:
        write_commit(store, item)
    assert read_commits(store) == [written[1], written[0], written[2]]
    assert read_commits(store, known=[lease_id(0, 20)]) == [written[0], written[2]]
    assert store.list("commits/")[0] == "commits/0000000000-0000000020.json"


def test_rows_are_committed_once(store):
    write_commit(store, commit(0, 5))
    write_commit(store, commit(0, 5))
    with pytest.raises(StorageError, match="committed by another producer"):
        write_commit(store, commit(0, 5, ["other"] * 5))
    assert read_commits(store) == [commit(0, 5)]
    with pytest.raises(StorageError, match="not that of rows"):
        write_commit(store, Commit("x", 1, 0, 5, ()))


@pytest.mark.parametrize("cut", [1, 8, 200])
def test_a_truncated_commit_is_named(store, cut):
    write_commit(store, commit(0, 5))
    key = store.list("commits/")[0]
    store.put(key, store.get(key)[:-cut])
    with pytest.raises(StorageError, match=f"{key} is truncated"):
        read_commits(store)


def test_an_edited_commit_is_named(store):
    write_commit(store, commit(0, 5))
    key = store.list("commits/")[0]
    data = store.get(key)
    store.put(key, data.replace(b'"r3"', b'"r9"'))
    with pytest.raises(StorageError, match=f"{key} was changed"):
        read_commit(store, key)
    document = {name: value for name, value in json.loads(data).items() if name not in ("shards", "checksum")}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    store.put(key, json.dumps({**document, "checksum": hashlib.sha256(canonical).hexdigest()}).encode())
    with pytest.raises(StorageError, match="unknown form"):
        read_commit(store, key)
    moved = f"commits/{lease_id(5, 10)}.json"
    store.put(moved, data)
    with pytest.raises(StorageError, match=f"{moved} is that of lease"):
        read_commit(store, moved)


def test_manifest_lists_every_sample_by_index(store):
    samples = build_cache(store, contract("raw"), 11, leases=3)
    manifest = Manifest.current(store)
    assert len(manifest) == 11
    assert manifest.tokens.tolist() == [len(item.input_ids) for item in samples]
    assert manifest.supervised.tolist() == [int(item.loss_mask().sum()) for item in samples]
    assert manifest.shards == store.list("shards/")
    for position, item in enumerate(samples):
        shard, entry = manifest.entry(position)
        assert entry.index == position
        assert same(read_sample(store, shard, entry, contract("raw")), item)
    with pytest.raises(StorageError, match="no sample 11"):
        manifest.entry(11)


def test_manifest_hash_depends_on_samples_only(store):
    parts = [commit(0, 5), commit(5, 9), commit(9, 12)]
    whole = Manifest.from_commits(parts)
    assert Manifest.from_commits(reversed(parts)).hash == whole.hash
    assert Manifest.from_commits(parts[1:], base=Manifest.from_commits(parts[:2])).hash == whole.hash
    assert Manifest.from_commits(parts[:2]).hash != whole.hash
    assert Manifest.from_commits([*parts[:2], commit(9, 12, ["a", "b", "c"])]).hash != whole.hash


def test_shard_numbers_follow_the_table(store):
    manifest = Manifest.from_commits([commit(5, 7), commit(0, 5)])
    assert manifest.shard_numbers.tolist() == [0] * 5 + [1] * 2


def test_manifests_are_saved_and_found_by_hash(store):
    build_cache(store, contract("raw"), 6, leases=2)
    first = Manifest.current(store)
    assert first.save(store) == first.save(store) == "manifest-00000002.arrow"
    build_cache(store, contract("raw"), 5, leases=1, first=6)
    grown = Manifest.current(store)
    assert (len(grown), len(grown.leases)) == (11, 3)
    assert grown.save(store) == "manifest-00000003.arrow"
    assert Manifest.load(store).hash == grown.hash == Manifest.current(store).hash
    again = Manifest.load(store, first.hash)
    assert again.hash == first.hash
    assert again.table.equals(first.table)
    with pytest.raises(StorageError, match="no manifest of hash 1234"):
        Manifest.load(store, "1234")


def test_a_manifest_is_never_replaced(store):
    Manifest.from_commits([commit(0, 5)]).save(store)
    with pytest.raises(StorageError, match="exists with other samples"):
        Manifest.from_commits([commit(0, 5, list("abcde"))]).save(store)


@pytest.mark.parametrize("damage", [lambda data: data[:-8], lambda data: data[:100], lambda data: data.replace(b"r3", b"rX")])
def test_a_damaged_manifest_is_named(store, damage):
    key = Manifest.from_commits([commit(0, 5)]).save(store)
    store.put(key, damage(store.get(key)))
    with pytest.raises(StorageError, match=key):
        Manifest.load(store)


def test_a_row_committed_twice_is_an_error():
    with pytest.raises(StorageError, match="more than once, the first is r3"):
        Manifest.from_commits([commit(0, 5), commit(5, 6, ["r3"])])


def test_a_cache_without_commits_is_empty(store):
    manifest = Manifest.current(store)
    assert (len(manifest), manifest.shards, manifest.shard_numbers.tolist()) == (0, [], [])
    with pytest.raises(StorageError, match="no manifest"):
        Manifest.load(store)


def test_manifest_hash_is_that_of_its_columns():
    """Golden by definition: lengths and text of both text columns, then the numbers as 64-bit little-endian integers."""
    digest = hashlib.sha256()
    rows = [
        (f"r{n}", n, f"shards/{s}.arrow", 100 * k, 100, 7 * k, 10 + k, 5)
        for s, r in ((0, 5), (5, 2))
        for k, n in enumerate(range(s, s + r))
    ]
    for column in (0, 2):
        texts = [row[column].encode() for row in rows]
        digest.update(b"".join(len(text).to_bytes(4, "little") for text in texts) + b"".join(texts))
    for column in (1, 3, 4, 5, 6, 7):
        digest.update(b"".join(row[column].to_bytes(8, "little") for row in rows))
    assert Manifest.from_commits([commit(5, 7), commit(0, 5)]).hash == digest.hexdigest()
