"""The manifest: one table over all committed samples, compacted from the commits. Its hash pins a training run's data."""

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.commits import Commit, Tally, read_commits
from storage.errors import StorageError
from storage.object_store import ObjectStore
from storage.shard import Entry

_COLUMNS = pa.schema(
    [
        pa.field("row_id", pa.string()),
        pa.field("index", pa.int64()),
        pa.field("shard", pa.dictionary(pa.int32(), pa.string())),
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int64()),
        pa.field("crc32", pa.uint32()),
        pa.field("tokens", pa.int32()),
        pa.field("supervised", pa.int32()),
    ]
)
_NAME = re.compile(r"manifest-(\d+)\.arrow")


class Manifest:
    """Committed samples sorted by corpus index; position i of the reading order is row i of `table`.

    Args:
        table: columns row_id, index, shard, offset, length, crc32, tokens, supervised.
        leases: ids of the commits that it covers; tally: the sums over them.
        as_written: the table is that of another manifest, so it is in order; to sort a million rows again takes time and memory.
    """

    def __init__(self, table: pa.Table, leases: Iterable[str], tally: Tally | None = None, as_written: bool = False) -> None:
        self.leases = tuple(sorted(leases))
        self.tally = tally or Tally()
        if as_written:
            self.table = table
            return
        # One chunk a column, so that a lookup is an offset; stable order whatever the order of the commits was.
        self.table = table.cast(_COLUMNS).sort_by("index").unify_dictionaries().combine_chunks()
        distinct = pc.count_distinct(self.table["row_id"]).as_py()
        if distinct != len(self.table):
            counts = pc.value_counts(self.table["row_id"].combine_chunks())
            twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
            raise StorageError(
                f"{len(twice)} row ids are committed more than once, the first is {twice[0].as_py()}: every row must be cached once. "
                "Remove duplicate rows from the corpus, or delete one of the commits"
            )

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over the samples, independent of the order and size of commits and of the Arrow version."""
        digest = hashlib.sha256()
        for name in ("row_id", "shard"):
            column = self.table[name].cast(pa.string())
            digest.update(pc.binary_length(column).to_numpy().astype("<i4").tobytes())
            for chunk in column.chunks:
                _, offsets, text = chunk.buffers()
                edges = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                digest.update(memoryview(text or b"")[edges[0] : edges[-1]] if len(edges) > 1 else b"")
        for name in ("index", "offset", "length", "crc32", "tokens", "supervised"):
            digest.update(self.table[name].to_numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def lengths(self) -> np.ndarray:
        """[n] int64, encoded bytes of each sample."""
        return self.table["length"].to_numpy()

    @cached_property
    def tokens(self) -> np.ndarray:
        """[n] int32, tokens of each sample."""
        return self.table["tokens"].to_numpy()

    @cached_property
    def supervised(self) -> np.ndarray:
        """[n] int32, supervised tokens of each sample."""
        return self.table["supervised"].to_numpy()

    @cached_property
    def shard_numbers(self) -> np.ndarray:
        """[n] int64: the shard of each sample, numbered by first appearance in the table."""
        codes = self._shard_codes
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        order = np.empty(len(first), np.int64)
        order[first.argsort()] = np.arange(len(first))
        return order[inverse]

    @cached_property
    def _shard_codes(self) -> np.ndarray:
        return self.table["shard"].chunk(0).indices.to_numpy() if len(self) else np.empty(0, np.int32)

    @cached_property
    def _shard_names(self) -> list[str]:
        return self.table["shard"].chunk(0).dictionary.to_pylist() if len(self) else []

    @property
    def shards(self) -> list[str]:
        """Keys of all shards that hold a sample, sorted."""
        return sorted({self._shard_names[code] for code in np.unique(self._shard_codes)})

    def entry(self, position: int) -> tuple[str, Entry]:
        """(shard key, entry) of the sample at a position; StorageError outside of the table."""
        if not 0 <= position < len(self):
            raise StorageError(f"there is no sample {position} in a manifest of {len(self)} samples")
        values = [self.table[name][position].as_py() for name in Entry.__slots__]
        return self._shard_names[self._shard_codes[position]], Entry(*values)

    @classmethod
    def from_commits(cls, commits: Iterable[Commit], base: "Manifest | None" = None) -> "Manifest":
        """Compact commits, on top of an older manifest where one is given (commits that it covers are left out)."""
        covered = set(base.leases) if base else set()
        tables = [base.table] if base else []
        tally = copy.deepcopy(base.tally) if base else Tally()
        for commit in commits:
            if commit.lease_id not in covered:
                covered.add(commit.lease_id)
                tally.add(commit)
                tables += [_shard_table(shard.name, shard.entries) for shard in commit.shards]
        table = pa.concat_tables([_COLUMNS.empty_table(), *tables])
        return cls(table, covered, tally)

    def save(self, store: ObjectStore) -> str:
        """Write manifest-<n>.arrow, n = number of commits covered; returns its key. Immutable: a different one of that name is an error."""
        key = f"manifest-{len(self.leases):08d}.arrow"
        if store.exists(key):
            if read_manifest(store, key).hash != self.hash:
                raise StorageError(f"{store.url(key)} exists with other samples: commits were replaced. Delete it to compact anew")
            return key
        sink = pa.BufferOutputStream()
        metadata = {"hash": self.hash, "leases": json.dumps(self.leases), "tally": json.dumps(vars(self.tally))}
        metadata["checksum"] = _checksum(metadata)
        with pa.ipc.new_file(sink, self.table.schema.with_metadata(metadata)) as writer:
            writer.write_table(self.table)
        store.put(key, memoryview(sink.getvalue()))
        return key

    @classmethod
    def load(cls, store: ObjectStore, hash: str | None = None) -> "Manifest":
        """The newest manifest of a cache, or the one of the given hash; StorageError where there is none."""
        for key in manifest_keys(store):
            manifest = read_manifest(store, key)
            if hash is None or manifest.hash == hash:
                return manifest
        wanted = f"no manifest of hash {hash}" if hash else "no manifest"
        raise StorageError(f"{store.settings.root} has {wanted}: the cache is unfinished or another one. Run `make cache` to finish it")

    @classmethod
    def current(cls, store: ObjectStore, base: "Manifest | None" = None) -> "Manifest":
        """Everything committed up to now: `base` or the newest manifest, and the commits since. Empty for a cache without commits."""
        keys = [] if base else manifest_keys(store)
        base = read_manifest(store, keys[0]) if keys else base
        commits = read_commits(store, known=base.leases if base else ())
        return base if base and not commits else cls.from_commits(commits, base)


def split_manifest(manifest: Manifest, heldout_rows: int) -> tuple[Manifest, Manifest]:
    """(training, held-out): the rows with the smallest content hashes are held out, whatever the order they were cached in."""
    if heldout_rows >= len(manifest):
        raise StorageError(f"train.heldout_rows={heldout_rows} leaves nothing of the cache's {len(manifest)} samples to train on")
    ids = manifest.table["row_id"].to_pylist()
    held = set(sorted(ids)[:heldout_rows])
    mask = np.array([row_id in held for row_id in ids])
    return (
        Manifest(manifest.table.filter(pa.array(~mask)), manifest.leases),
        Manifest(manifest.table.filter(pa.array(mask)), manifest.leases),
    )


def manifest_keys(store: ObjectStore) -> list[str]:
    """Manifests, newest first."""
    keys = [key for key in store.list("manifest-") if _NAME.fullmatch(key)]
    return sorted(keys, key=lambda key: int(key[9:-6]), reverse=True)


def committed(store: ObjectStore) -> tuple[list[str], Tally]:
    """Ids of all committed leases, and the sums over them: from the head of the newest manifest and the commits since, in seconds at any
    size of the cache."""
    keys = manifest_keys(store)
    leases, tally = _head(store, keys[0])[:2] if keys else ([], Tally())
    commits = read_commits(store, known=leases)
    for commit in commits:
        tally.add(commit)
    return [*leases, *(commit.lease_id for commit in commits)], tally


def _head(store: ObjectStore, key: str) -> tuple[list[str], Tally, str]:
    """(leases, tally, hash) of a manifest, from the schema message at the head of its file."""
    try:
        length = int.from_bytes(store.get_range(key, 12, 4), "little")  # after the file's magic and the message's continuation mark
        schema = pa.ipc.read_schema(pa.py_buffer(store.get_range(key, 8, 8 + length)))
        metadata = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
        if metadata.pop("checksum") != _checksum(metadata):
            raise ValueError("its checksum differs")
        tally: dict[str, Any] = json.loads(metadata["tally"])
        return json.loads(metadata["leases"]), Tally(**{**tally, "skipped": Counter(tally["skipped"])}), metadata["hash"]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise StorageError(f"{store.url(key)} is truncated or damaged ({error!r}). Delete it: the commits say the same") from error


def read_manifest(store: ObjectStore, key: str) -> Manifest:
    """The manifest of that key; StorageError where it is damaged."""
    leases, tally, expected = _head(store, key)
    try:
        manifest = Manifest(pa.ipc.open_file(pa.BufferReader(store.get(key))).read_all(), leases, tally, as_written=True)
        intact = manifest.hash == expected
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise StorageError(f"{store.url(key)} is truncated or damaged ({error}). Delete it: the commits say the same") from error
    if not intact:
        raise StorageError(f"{store.url(key)} was changed after it was written: its hash differs. Delete it: the commits say the same")
    return manifest


def _checksum(metadata: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _shard_table(name: str, entries: Iterable[Entry]) -> pa.Table:
    rows = list(entries)
    columns = {column: [getattr(entry, column) for entry in rows] for column in Entry.__slots__}
    shard = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(rows), np.int32)), pa.array([name]))
    arrays = [shard if field.name == "shard" else pa.array(columns[field.name], field.type) for field in _COLUMNS]
    return pa.table(arrays, schema=_COLUMNS)
