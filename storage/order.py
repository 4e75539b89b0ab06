"""The reading order (DESIGN, section 4.5): a pure function of manifest hash, seed, epoch and index, for any number of workers."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from storage.errors import StorageError
from storage.manifest import Manifest


def anchor_seed(seed: int, epoch: int, row_id: str) -> int:
    """63-bit seed of the generator that draws a sample's anchors: the same on every rank, new in every epoch."""
    return _digest("anchors", seed, epoch, row_id) >> 1


def step_seed(seed: int, step: int) -> int:
    """63-bit seed of a step: whatever is drawn in it is the same in a run that was resumed before it."""
    return _digest("step", seed, step, "") >> 1


def rank_slots(positions: NDArray[np.int64], rank: int, world: int) -> NDArray[np.int64]:
    """The share of a global batch that rank `rank` of `world` takes; shares differ by one sample at most, together they are the batch."""
    if not 0 <= rank < world:
        raise StorageError(f"rank {rank} is not one of {world} ranks")
    return positions[rank::world]


@dataclass(frozen=True)
class _Layout:
    """What the order needs of a manifest."""

    hash: str
    shards: NDArray[np.int64]  # [n] shard number of each sample


class ReadingOrder:
    """Shards shuffled, samples shuffled inside a window of shards, so that reads stay local while neighbours mix.

    Args:
        manifest: pins the data.
        seed: of the run.
        window_shards: shards whose samples mix.
    """

    def __init__(self, manifest: Manifest, seed: int, window_shards: int = 8) -> None:
        if window_shards < 1:
            raise StorageError(f"window_shards must be at least 1, not {window_shards}")
        if len(manifest) == 0:
            raise StorageError("the cache holds no samples yet: nothing can be read in any order")
        self.seed, self.window_shards = seed, window_shards
        self._layout = _Layout(manifest.hash, manifest.shard_numbers)
        self._recent = lru_cache(maxsize=2)(self._compute)

    def __len__(self) -> int:
        return len(self._layout.shards)

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """[n] int64, read-only: every sample position once, in the order of this epoch."""
        return self._recent(epoch)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole global batches in an epoch; the incomplete last one is dropped (other samples in every epoch, since the order is new)."""
        if not 1 <= batch_size <= len(self):
            raise StorageError(f"a global batch of {batch_size} samples cannot be drawn from {len(self)} samples: choose 1..{len(self)}")
        return len(self) // batch_size

    def global_batch(self, step: int, batch_size: int) -> tuple[int, NDArray[np.int64]]:
        """(epoch, [batch_size] positions) of a step, counted from the start of training over epoch borders."""
        if step < 0:
            raise StorageError(f"step must not be negative, it is {step}")
        epoch, step = divmod(step, self.steps_per_epoch(batch_size))
        return epoch, self.epoch(epoch)[step * batch_size : (step + 1) * batch_size]

    def _compute(self, epoch: int) -> NDArray[np.int64]:
        # Sorting by a hash of the number, rather than drawing from a generator: the order can then never change with numpy's version.
        shards = self._layout.shards
        shard_keys = _hashed(np.arange(shards.max() + 1, dtype=np.uint64), _digest("shards", self.seed, epoch, self._layout.hash))
        rank = np.empty(len(shard_keys), np.int64)
        rank[shard_keys.argsort(kind="stable")] = np.arange(len(shard_keys))
        window = rank[shards] // self.window_shards
        sample_keys = _hashed(np.arange(len(shards), dtype=np.uint64), _digest("samples", self.seed, epoch, self._layout.hash))
        order = np.lexsort((sample_keys, window)).astype(np.int64)
        order.flags.writeable = False
        return order


def _digest(purpose: str, seed: int, epoch: int, name: str) -> int:
    """64 bits that depend on everything given."""
    return int.from_bytes(hashlib.blake2b(f"{purpose}\n{seed}\n{epoch}\n{name}".encode(), digest_size=8).digest(), "little")


def _hashed(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """splitmix64 of `numbers + key` (Steele et al. 2014), elementwise modulo 2**64."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
