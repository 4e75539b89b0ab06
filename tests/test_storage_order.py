"""The reading order: a pure function, the same for any number of workers, every sample once an epoch."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.commits import Commit, lease_id
from storage.errors import StorageError
from storage.manifest import Manifest
from storage.order import ReadingOrder, anchor_seed, rank_slots
from storage.shard import Entry, ShardInfo

WORD = 2**64


def manifest(sizes: list[int]) -> Manifest:
    """One shard for each size."""
    shards, index = [], 0
    for number, size in enumerate(sizes):
        entries = tuple(Entry(f"r{index + k}", index + k, 8 * k, 8, 0, 4, 2) for k in range(size))
        shards.append(ShardInfo(f"shards/{number}.arrow", 8 * size, "", entries))
        index += size
    return Manifest.from_commits([Commit(lease_id(0, index), 1, 0, index, tuple(shards))])


def naive_epoch(sizes: list[int], hash: str, seed: int, epoch: int, window: int) -> list[int]:
    """Order shards by their key, cut into windows, order the samples of each window by theirs. Plain integers."""

    def key(purpose: str, number: int) -> int:
        digest = hashlib.blake2b(f"{purpose}\n{seed}\n{epoch}\n{hash}".encode(), digest_size=8).digest()
        z = (number * 0x9E3779B97F4A7C15 + int.from_bytes(digest, "little")) % WORD
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
        return z ^ (z >> 31)

    owner = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    shards = sorted(range(len(sizes)), key=lambda shard: key("shards", shard))
    order = []
    for start in range(0, len(shards), window):
        inside = [position for position, shard in enumerate(owner) if shard in shards[start : start + window]]
        order += sorted(inside, key=lambda position: key("samples", position))
    return order


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 14))
def test_order_equals_the_naive_one_and_holds_every_sample_once(sizes, seed, epoch, window):
    data = manifest(sizes)
    got = ReadingOrder(data, seed, window).epoch(epoch).tolist()
    assert got == naive_epoch(sizes, data.hash, seed, epoch, window)
    assert sorted(got) == list(range(sum(sizes)))


def test_order_never_changes_between_versions():
    """Golden: a resumed run must see what it would have seen."""
    assert ReadingOrder(manifest([3, 2, 4, 1]), 7, 2).epoch(1).tolist() == [5, 6, 7, 8, 4, 3, 1, 9, 2, 0]
    assert anchor_seed(7, 1, "row") == 4072214787146997124


def test_order_depends_on_data_seed_and_epoch():
    data = manifest([20, 20, 20])
    base = ReadingOrder(data, 0).epoch(0).tolist()
    assert ReadingOrder(data, 0).epoch(0).tolist() == base
    assert ReadingOrder(data, 1).epoch(0).tolist() != base
    assert ReadingOrder(data, 0).epoch(1).tolist() != base
    assert ReadingOrder(manifest([20, 21, 19]), 0).epoch(0).tolist() != base


def test_reads_stay_inside_a_window_of_shards():
    data = manifest([10] * 9)
    order = data.shard_numbers[ReadingOrder(data, 3, window_shards=3).epoch(0)]
    windows = [set(order[start : start + 30].tolist()) for start in (0, 30, 60)]
    assert [len(window) for window in windows] == [3, 3, 3]
    assert set.union(*windows) == set(range(9))
    assert len(set(order[:10].tolist())) > 1  # neighbours come from several shards


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_any_number_of_workers_reads_the_same_global_batches(world):
    data = manifest([7, 5, 11])
    order = ReadingOrder(data, 0)
    for step in range(9):
        _, batch = order.global_batch(step, 8)
        shares = [rank_slots(batch, rank, world) for rank in range(world)]
        assert sorted(np.concatenate(shares).tolist()) == sorted(batch.tolist())
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_run_over_epoch_borders_from_any_cursor():
    order = ReadingOrder(manifest([7, 5, 11]), 0)
    assert order.steps_per_epoch(5) == 4  # 23 samples: the last 3 are dropped
    for step in (0, 3, 4, 9, 4000):
        epoch, batch = ReadingOrder(manifest([7, 5, 11]), 0).global_batch(step, 5)
        assert epoch == step // 4
        assert batch.tolist() == order.epoch(epoch)[step % 4 * 5 :][:5].tolist()


def test_impossible_requests_are_refused():
    order = ReadingOrder(manifest([3]), 0)
    with pytest.raises(StorageError, match="from 3 samples"):
        order.global_batch(0, 4)
    with pytest.raises(StorageError, match="negative"):
        order.global_batch(-1, 1)
    with pytest.raises(StorageError, match="rank 2"):
        rank_slots(order.epoch(0), 2, 2)
    with pytest.raises(StorageError, match="no samples"):
        ReadingOrder(manifest([]), 0)
    with pytest.raises(StorageError, match="window_shards"):
        ReadingOrder(manifest([3]), 0, 0)


def test_anchor_seeds_are_63_bit_and_distinct():
    seeds = [anchor_seed(seed, epoch, row) for seed in range(3) for epoch in range(3) for row in ("a", "b")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**63 for value in seeds)
    assert anchor_seed(1, 2, "row") == anchor_seed(1, 2, "row")
