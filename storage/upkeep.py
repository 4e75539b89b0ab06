"""What a cache holds, whether it is whole, and what in it belongs to nobody: behind `cache --stat`, `--verify` and `--gc`."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from storage.commits import COMMITS, Commit, read_commit, read_commits
from storage.contract import Contract
from storage.errors import CorruptShard, StorageError, StorageUnavailable
from storage.manifest import Manifest, manifest_keys, read_manifest
from storage.object_store import ObjectStore, Stored
from storage.shard import ShardInfo, decode_message, schema, verify_shard

SHARDS = "shards/"
_REDO = "Delete its commit and the manifests, and run `cache` again"


def published_bytes(layers: int, hidden: int) -> int:
    """Bytes a token of DeepSpec's layout: bf16 context of every layer and the last hidden state (2 (L + 1) H), int32 ids, int16 mask."""
    return 2 * (layers + 1) * hidden + 6


# Garbage


@dataclass(frozen=True)
class Garbage:
    """Objects below shards/ that no commit and no manifest names: `old` enough to go, and `young` ones that may be on their way."""

    old: tuple[Stored, ...]
    young: tuple[Stored, ...]


def find_garbage(store: ObjectStore, before: float) -> Garbage:
    """Old is what was written before that time, by the store's clock."""
    # Listed before the commits are read: a shard that is committed in between is then known as committed.
    listed = store.details(SHARDS)
    needed = {shard.name for commit in read_commits(store) for shard in commit.shards}
    for key in manifest_keys(store):
        needed.update(read_manifest(store, key).shards)
    unclaimed = [stored for stored in listed if stored.key not in needed]
    old = tuple(stored for stored in unclaimed if stored.written < before)
    return Garbage(old, tuple(stored for stored in unclaimed if stored.written >= before))


@dataclass(frozen=True)
class Removed:
    """What a collection took away, and shards that were committed at the very moment they were removed: their leases must be redone."""

    shards: int
    bytes: int
    uploads: int
    lost: tuple[str, ...]


def remove_garbage(store: ObjectStore, garbage: Garbage, before: float) -> Removed:
    """Delete the old garbage and abort uploads that began before that time. Safe beside a running `cache` job whose leases are younger."""
    known = [commit.lease_id for commit in read_commits(store)]
    gone: dict[str, int] = {}
    for stored in garbage.old:
        # A producer that brings the same bytes again writes the same name: looked at once more, right before it goes.
        if any(now.key == stored.key and now.written < before for now in store.details(stored.key)):
            store.delete(stored.key)
            gone[stored.key] = stored.bytes
    named = {shard.name for commit in read_commits(store, known=known) for shard in commit.shards}
    return Removed(len(gone), sum(gone.values()), store.abort_uploads(SHARDS, before), tuple(sorted(named & gone.keys())))


# What is in it


def skipped_by_reason(commits: Sequence[Commit]) -> Counter[str]:
    """How many rows were left out for which reason, without what is special about one row."""
    return Counter(row.reason.partition(":")[0] for commit in commits for row in commit.skipped)


def column_bytes(store: ObjectStore, contract: Contract, manifest: Manifest, rows: int, seed: int = 0) -> tuple[int, dict[str, int]]:
    """(tokens, bytes by column) of `rows` samples drawn at random: what each column costs, without reading the whole cache."""
    chosen = sorted(random.Random(seed).sample(range(len(manifest)), min(rows, len(manifest))))
    sizes: Counter[str] = Counter()
    for shard, entry in map(manifest.entry, chosen):
        data = store.get_range(shard, entry.offset, entry.length)
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), schema(contract))
        except (pa.ArrowException, OSError) as error:
            raise CorruptShard(f"{store.url(shard)}, row {entry.row_id}: {error}. Run `cache --verify`") from error
        sizes.update({name: batch.column(name).nbytes for name in batch.schema.names})
        sizes["(framing)"] += entry.length - batch.nbytes
    return sum(int(manifest.tokens[position]) for position in chosen), dict(sizes)


def length_histogram(manifest: Manifest, bins: int = 8) -> list[tuple[int, int, int]]:
    """(from, up to and including, rows): tokens of the samples, in bins of equal width with round edges."""
    if not len(manifest):
        return []
    longest = int(manifest.tokens.max())
    width = max(-(-longest // bins), 1)
    width = next(step for scale in (10**power for power in range(10)) for step in (scale, 2 * scale, 5 * scale) if step >= width)
    counts = Counter((int(tokens) - 1) // width for tokens in manifest.tokens)
    return [(k * width + 1, (k + 1) * width, counts[k]) for k in range(max(counts) + 1)]


# Whether it is whole


def check_commits(store: ObjectStore) -> tuple[list[Commit], list[str]]:
    """(readable commits, problems): every commit by its own checksum, and that every row is in exactly one, once."""

    def read(key: str) -> Commit | str:
        try:
            return read_commit(store, key)
        except StorageUnavailable:
            raise
        except StorageError as error:
            return str(error)

    keys = [key for key in store.list(COMMITS) if key.endswith(".json")]
    with ThreadPoolExecutor(16, thread_name_prefix="verify") as pool:
        found = list(pool.map(read, keys))
    commits = sorted((commit for commit in found if isinstance(commit, Commit)), key=lambda commit: (commit.start, commit.stop))
    problems = [problem for problem in found if isinstance(problem, str)]
    for one, two in pairwise(commits):
        if two.start < one.stop:
            problems.append(f"rows {two.start} to {min(one.stop, two.stop) - 1} are in two commits, {one.lease_id} and {two.lease_id}")
    owner: dict[str, str] = {}
    for commit in commits:
        rows = [(row.index, row.row_id) for shard in commit.shards for row in shard.entries]
        rows += [(row.index, row.row_id) for row in commit.skipped]
        if sorted(index for index, _ in rows) != list(range(commit.start, commit.stop)):
            problems.append(f"commit {commit.lease_id} does not hold its rows once each: {len(rows)} rows. {_REDO}")
        for _, row_id in rows:
            if owner.setdefault(row_id, commit.lease_id) != commit.lease_id:
                problems.append(f"row {row_id} is in two commits, {owner[row_id]} and {commit.lease_id}")
    return commits, problems


def check_manifests(store: ObjectStore, commits: Sequence[Commit]) -> list[str]:
    """That every manifest is intact, and says of its leases what their commits say."""
    problems = []
    for key in manifest_keys(store):
        try:
            manifest = read_manifest(store, key)
            own = Manifest.from_commits([commit for commit in commits if commit.lease_id in set(manifest.leases)])
        except StorageUnavailable:
            raise
        except StorageError as error:
            problems.append(str(error))
            continue
        if own.hash != manifest.hash:
            problems.append(
                f"{store.url(key)} lists other samples than the commits of its leases: commits are gone or were replaced. Delete it"
            )
    return problems


def check_shards(
    store: ObjectStore, contract: Contract, commits: Sequence[Commit], threads: int = 4
) -> Iterator[tuple[ShardInfo, list[str]]]:
    """Read every shard whole and decode every sample in it; yields each shard with what is wrong with it."""
    shards = {shard.name: (commit, shard) for commit in commits for shard in commit.shards}
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        found = pool.map(lambda pair: (pair[1], _shard_problems(store, contract, *pair)), shards.values())
        yield from found


def _shard_problems(store: ObjectStore, contract: Contract, commit: Commit, info: ShardInfo) -> list[str]:
    lost = f"{len(info.entries)} rows of commit {commit.lease_id} are affected. {_REDO}"
    try:
        data = verify_shard(store, info)
    except CorruptShard as error:
        return [f"{error}; {lost}"]
    form = pa.ipc.open_file(pa.BufferReader(data)).schema
    expected = schema(contract)
    if not form.equals(expected, check_metadata=True):
        return [f"{store.url(info.name)} was written for another contract ({_schema_difference(form, expected)}); {lost}"]
    problems = []
    for entry in info.entries:
        try:
            decode_message(data[entry.offset : entry.offset + entry.length], store, info.name, entry, contract)
        except CorruptShard as error:
            problems.append(f"{error}. {_REDO}")
    return problems


def _schema_difference(form: pa.Schema, expected: pa.Schema) -> str:
    """The first of the columns and metadata in which two schemas differ, with both values."""
    theirs, ours = {**(form.metadata or {})}, {**(expected.metadata or {})}
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            return f"{name.decode()}: there {theirs.get(name, b'').decode()!r}, contract {ours.get(name, b'').decode()!r}"
    return f"columns: there {form.names}, contract {expected.names}"
