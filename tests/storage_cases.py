"""Small realistic samples and caches for the storage tests."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from storage.commits import Commit, lease_id, write_commit
from storage.contract import Capture, Contract, TargetIdentity, ensure_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.sample import Sample, supervised_rows
from storage.shard import ShardWriter, encode_sample

HIDDEN = 96  # one whole group of 64 channels and a shorter one


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bf16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def hidden_states(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Gaussian with channels of different scale and a few outlier channels, as residual streams are; bf16 bits."""
    channels = shape[-1]
    scale = np.exp(0.5 * rng.standard_normal(channels))
    scale[rng.integers(0, channels, max(1, channels // 200))] *= 60
    return to_bf16(rng.standard_normal(shape) * scale)


def identity(hidden: int = HIDDEN) -> TargetIdentity:
    return TargetIdentity(
        id="tiny",
        config_hash="c0",
        weights_fingerprint="f0",
        revision=None,
        tokenizer_hash="t0",
        chat_template_hash="p0",
        vocab_size=1000,
        embedding_rows=1024,
        hidden_size=hidden,
        num_layers=8,
        embedding_scale=1.0,
        logit_softcap=None,
        logit_multiplier=1.0,
    )


def contract(codec: str = "lossless", hidden: int = HIDDEN, layers: tuple[int, ...] = (1, 3, 5), rows: str = "supervised") -> Contract:
    return Contract(identity(hidden), Capture(layer_ids=layers, max_length=4096, codec=codec, last_hidden_rows=rows))


def sample(case: Contract, tokens: int, seed: int, row_id: str | None = None) -> Sample:
    """The last half of the tokens is supervised."""
    rng = np.random.default_rng(seed)
    spans = np.array([[tokens // 2, tokens]], np.int32)
    rows = supervised_rows(spans, tokens, case.capture.last_hidden_rows)
    hidden = case.target.hidden_size
    return Sample(
        row_id=row_id or f"row-{seed}",
        input_ids=rng.integers(0, case.target.vocab_size, tokens).astype(np.int32),
        spans=spans,
        context=hidden_states(rng, len(case.capture.layer_ids), tokens, hidden),
        last_hidden=hidden_states(rng, len(rows), hidden),
        last_rows=rows,
    )


def same(a: Sample, b: Sample) -> bool:
    names = ("input_ids", "spans", "context", "last_hidden", "last_rows")
    return a.row_id == b.row_id and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def build_cache(store: ObjectStore, case: Contract, count: int, leases: int = 2, shard_bytes: int = 40_000, first: int = 0) -> list[Sample]:
    """Write `count` samples as rows first..first+count, in `leases` commits; returns them by index."""
    ensure_contract(store, case)
    samples = [sample(case, 12 + seed % 7, seed) for seed in range(first, first + count)]
    edges = np.linspace(0, count, leases + 1).astype(int)
    for start, stop in pairwise(edges):
        with ShardWriter(store, case, shard_bytes) as writer:
            for number in range(start, stop):
                writer.add(encode_sample(samples[number], case), samples[number].row_id, first + number)
            shards = writer.close()
        begin, end = first + int(start), first + int(stop)
        write_commit(store, Commit(lease_id(begin, end), 1, begin, end, tuple(shards)))
    return samples


def with_capture(case: Contract, **changes: object) -> Contract:
    return replace(case, capture=replace(case.capture, **changes))


def committed(store: ObjectStore) -> Manifest:
    return Manifest.current(store)
