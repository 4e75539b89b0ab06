"""Looking after a cache: what is garbage goes and nothing else, and every kind of damage is found and named."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_server import BUCKET, S3Server
from storage_cases import build_cache, contract, with_capture

from storage.commits import COMMITS, Commit, Skipped, lease_id, read_commits, write_commit
from storage.contract import CONTRACT_KEY, Contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.shard import ShardWriter, encode_sample
from storage.upkeep import (
    check_commits,
    check_manifests,
    check_shards,
    column_bytes,
    find_garbage,
    length_histogram,
    published_bytes,
    remove_garbage,
    skipped_by_reason,
)

CASE = contract("lossless")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return ObjectStore(StorageSettings(str(tmp_path / "cache")))
    return request.getfixturevalue("s3").store(tmp_path.name)  # type: ignore[no-any-return]


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    return ObjectStore(StorageSettings(str(tmp_path / "cache")))


def stray_shards(store: ObjectStore, first: int, count: int) -> list[str]:
    """Shards that a producer wrote and never brought to the ledger."""
    from storage_cases import sample

    with ShardWriter(store, CASE, 30_000) as writer:
        for row in range(first, first + count):
            item = sample(CASE, 14, row)
            writer.add(encode_sample(item, CASE), item.row_id, row)
        return [shard.name for shard in writer.close()]


# Garbage


def test_what_no_commit_names_goes_and_nothing_else(store: ObjectStore) -> None:
    build_cache(store, CASE, 10)
    kept = store.list()
    stray = stray_shards(store, 50, 4)
    later = time.time() + 5
    garbage = find_garbage(store, later)
    assert [found.key for found in garbage.old] == sorted(stray)
    assert [found.bytes for found in garbage.old] == [store.size(name) for name in sorted(stray)]
    assert not garbage.young
    removed = remove_garbage(store, garbage, later)
    assert (removed.shards, removed.bytes, removed.lost) == (len(stray), sum(found.bytes for found in garbage.old), ())
    assert store.list() == kept


def test_what_is_young_stays(store: ObjectStore) -> None:
    """A job that runs beside it has uploaded shards that it will commit in a moment."""
    build_cache(store, CASE, 4)
    stray = stray_shards(store, 50, 4)
    before = time.time() - 3600
    garbage = find_garbage(store, before)
    assert [found.key for found in garbage.young] == sorted(stray)
    assert remove_garbage(store, garbage, before).shards == 0
    assert set(stray) <= set(store.list())


def test_a_shard_that_only_a_manifest_names_stays(local: ObjectStore) -> None:
    """A training run may be pinned to it."""
    build_cache(local, CASE, 8)
    Manifest.current(local).save(local)
    local.delete(local.list(COMMITS)[0])
    assert find_garbage(local, time.time() + 5).old == ()


def test_a_shard_that_is_written_again_or_committed_meanwhile_is_not_lost_in_silence(local: ObjectStore, tmp_path: Path) -> None:
    build_cache(local, CASE, 4)
    old, new = stray_shards(local, 50, 1), stray_shards(local, 60, 1)
    for name in [*old, *new]:
        os.utime(tmp_path / "cache" / name, (1e9, 1e9))
    before = time.time() - 3600
    garbage = find_garbage(local, before)
    assert len(garbage.old) == 2
    stray_shards(local, 60, 1)  # the same bytes, so the same name, by a producer that is at it now
    removed = remove_garbage(local, garbage, before)
    assert removed.shards == 1
    assert local.exists(new[0])


def test_unfinished_files_of_a_killed_writer_go(local: ObjectStore, tmp_path: Path) -> None:
    build_cache(local, CASE, 4)
    torn = tmp_path / "cache" / "shards" / ".abc.arrow.123-beef.tmp"
    torn.write_bytes(b"half")
    os.utime(torn, (1e9, 1e9))
    before = time.time() - 3600
    assert remove_garbage(local, find_garbage(local, before), before).shards == 1
    assert not torn.exists()


def test_abandoned_uploads_are_aborted_when_they_are_old(s3: S3Server, tmp_path: Path) -> None:
    store = s3.store(tmp_path.name)
    build_cache(store, CASE, 4)
    filesystem = store._connection.filesystem()
    prefix = f"{tmp_path.name}/shards/"

    def uploads() -> list[str]:
        return [upload["Key"] for upload in filesystem.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix).get("Uploads", [])]

    upload = filesystem.call_s3("create_multipart_upload", Bucket=BUCKET, Key=f"{prefix}torn.arrow")["UploadId"]
    filesystem.call_s3("upload_part", Bucket=BUCKET, Key=f"{prefix}torn.arrow", UploadId=upload, PartNumber=1, Body=b"part")
    assert uploads() == [f"{prefix}torn.arrow"]
    for age, left in ((3600, 1), (-5, 0)):
        before = time.time() - age
        removed = remove_garbage(store, find_garbage(store, before), before)
        assert (removed.uploads, len(uploads())) == (1 - left, left)


# What is in it


def test_published_bytes_are_deepspecs() -> None:
    assert published_bytes(5, 2560) == 12 * 2560 + 6 == 30_726
    assert published_bytes(5, 4096) == 49_158


def test_columns_add_up_to_what_is_stored(local: ObjectStore) -> None:
    samples = build_cache(local, CASE, 12)
    manifest = Manifest.current(local)
    tokens, columns = column_bytes(local, CASE, manifest, rows=100)
    assert tokens == sum(len(sample.input_ids) for sample in samples)
    assert sum(columns.values()) == manifest.lengths.sum()
    assert {"input_ids", "spans", "context_1", "context_3", "context_5", "last_rows", "last_hidden", "(framing)"} < columns.keys()
    assert 4 * tokens <= columns["input_ids"] < 4 * tokens + 12 * 64
    few, _ = column_bytes(local, CASE, manifest, rows=3)
    assert few < tokens


def test_histogram_counts_every_row_once(local: ObjectStore) -> None:
    samples = build_cache(local, CASE, 40)
    bins = length_histogram(Manifest.current(local))
    assert sum(rows for _, _, rows in bins) == 40
    for low, high, rows in bins:
        assert rows == sum(low <= len(sample.input_ids) <= high for sample in samples)
    assert [low for low, _, _ in bins] == [high + 1 for high in [0, *(high for _, high, _ in bins[:-1])]]


def test_reasons_are_counted_without_what_is_special_about_a_row(local: ObjectStore) -> None:
    reasons = ["empty", "refused: hidden state at position 3 is NaN", "refused: hidden state at position 8 is NaN"]
    skipped = tuple(Skipped(f"r{n}", n, reason) for n, reason in enumerate(reasons))
    assert skipped_by_reason([Commit(lease_id(0, 3), 1, 0, 3, (), skipped)]) == {"refused": 2, "empty": 1}


# Whether it is whole


def all_problems(store: ObjectStore, case: Contract = CASE) -> list[str]:
    commits, problems = check_commits(store)
    problems += check_manifests(store, commits)
    return problems + [line for _, lines in check_shards(store, case, commits) for line in lines]


def test_an_undamaged_cache_has_no_problems(store: ObjectStore) -> None:
    build_cache(store, CASE, 10)
    Manifest.current(store).save(store)
    build_cache(store, CASE, 6, first=10)
    Manifest.current(store).save(store)
    assert all_problems(store) == []
    assert [len(shard.entries) for shard, _ in check_shards(store, CASE, read_commits(store))]


def cut(by: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-by]


def flip(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


@pytest.fixture
def damaged(local: ObjectStore) -> tuple[ObjectStore, str, str]:
    """(store, a shard, a commit); one shard a commit."""
    build_cache(local, CASE, 8, shard_bytes=10**9)
    Manifest.current(local).save(local)
    commit = local.list(COMMITS)[0]
    return local, read_commits(local)[0].shards[0].name, commit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(1), "is truncated"),
        (cut(8), "is truncated"),
        (cut(1000), "is truncated"),
        (flip, "changed since it was written"),
        (lambda data: b"", "is truncated"),
    ],
)
def test_a_damaged_shard_is_named_with_its_commit(
    damaged: tuple[ObjectStore, str, str], damage: Callable[[bytes], bytes], words: str
) -> None:
    store, shard, _ = damaged
    store.put(shard, damage(store.get(shard)))
    (problem,) = all_problems(store)
    for word in (shard, words, "4 rows of commit 0000000000-0000000004", "Delete its commit"):
        assert word in problem


def test_a_missing_shard_and_a_damaged_commit_are_both_told(damaged: tuple[ObjectStore, str, str]) -> None:
    store, shard, commit = damaged
    other = next(name for name in store.list("shards/") if name != shard)
    store.put(commit, store.get(commit)[:-20])
    store.delete(other)
    problems = all_problems(store)
    assert len(problems) == 3
    assert commit in problems[0]
    assert "truncated or damaged" in problems[0]
    assert "manifest-00000002.arrow lists other samples" in problems[1]
    assert other in problems[2]
    assert "missing" in problems[2]


def test_rows_in_two_commits_and_rows_in_none_are_told(local: ObjectStore) -> None:
    build_cache(local, CASE, 8)
    skipped = tuple(Skipped(f"row-{row}", row, "empty") for row in range(3, 6))
    write_commit(local, Commit(lease_id(3, 6), 1, 3, 6, (), skipped))
    write_commit(local, Commit(lease_id(20, 22), 1, 20, 22, (), (Skipped("row-20", 20, "empty"),)))
    told = "\n".join(all_problems(local))
    assert "rows 3 to 3 are in two commits" in told
    assert "row row-4 is in two commits" in told
    assert "commit 0000000020-0000000022 does not hold its rows once each: 1 rows" in told


def test_a_shard_of_another_contract_and_an_edited_contract_are_told(local: ObjectStore) -> None:
    build_cache(local, CASE, 4, leases=1)
    (problem,) = {line.partition("; ")[0] for line in all_problems(local, with_capture(CASE, codec="raw"))}
    assert "another contract (codec: there 'lossless', contract 'raw')" in problem
    (problem,) = {line.partition("; ")[0] for line in all_problems(local, with_capture(CASE, layer_ids=(1, 3, 4)))}
    assert "columns: there" in problem
    assert local.exists(CONTRACT_KEY)


def test_a_damaged_manifest_is_told(damaged: tuple[ObjectStore, str, str]) -> None:
    store, _, _ = damaged
    (key,) = store.list("manifest-")
    store.put(key, store.get(key)[:-8])
    problems = all_problems(store)
    assert len(problems) == 1
    assert key in problems[0]
