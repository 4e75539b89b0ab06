"""Shards: immutable Arrow IPC files, one record batch per sample, named by their content.

A sample is read by one ranged GET of exactly its record-batch message, checked by length and CRC-32 before anything is decoded.
"""

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storage.codec import decode_plane, encode_plane, plane_codec
from storage.contract import Contract
from storage.disk_cache import DiskCache
from storage.errors import CorruptShard, StorageError
from storage.object_store import ObjectStore
from storage.sample import Sample, supervised_rows

DEFAULT_SHARD_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one sample lies in its shard.

    Args:
        row_id: content hash of the answered row; index: its place in the corpus.
        offset, length: bytes of its record-batch message in the file; crc32: of those bytes.
        tokens: T; supervised: how many of them are.
    """

    row_id: str
    index: int
    offset: int
    length: int
    crc32: int
    tokens: int
    supervised: int


@dataclass(frozen=True)
class ShardInfo:
    """A published shard: key, size, SHA-256 of the file (hex), and its samples in file order."""

    name: str
    bytes: int
    checksum: str
    entries: tuple[Entry, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-able; entries column-wise, since a commit holds many."""
        columns = {name: [getattr(entry, name) for entry in self.entries] for name in Entry.__slots__}
        return {"name": self.name, "bytes": self.bytes, "checksum": self.checksum, "entries": columns}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ShardInfo":
        """Inverse of to_json; KeyError, TypeError or ValueError where the form is another."""
        columns = [value["entries"][name] for name in Entry.__slots__]
        entries = tuple(Entry(*row) for row in zip(*columns, strict=True))
        return cls(str(value["name"]), int(value["bytes"]), str(value["checksum"]), entries)


def schema(contract: Contract) -> pa.Schema:
    """Columns of a sample's record batch. Hidden states are large_binary: Arrow has no bf16, and offsets may pass 2 GiB."""
    capture = contract.capture
    columns = [
        pa.field("row_id", pa.string()),
        pa.field("input_ids", pa.large_list(pa.int32())),
        pa.field("spans", pa.large_list(pa.int32())),
        *(pa.field(context_column(layer), pa.large_binary()) for layer in capture.layer_ids),
        pa.field("last_rows", pa.large_list(pa.int32())),
        pa.field("last_hidden", pa.large_binary()),
    ]
    metadata = {
        "dtype": capture.dtype,
        "codec": capture.codec,
        "hidden_size": str(contract.target.hidden_size),
        "schema_version": str(contract.schema_version),
    }
    return pa.schema(columns, metadata=metadata)


def context_column(layer_id: int) -> str:
    """Column name of one captured layer's plane."""
    return f"context_{layer_id}" if layer_id >= 0 else "context_embedding"


def encode_sample(sample: Sample, contract: Contract) -> pa.RecordBatch:
    """One sample as a record batch of one row.

    Raises:
        StorageError: the sample is inconsistent, does not fit the contract, or holds NaN or infinite states.
    """
    sample.validate()
    _check_fits(sample, contract)
    codec = contract.capture.codec
    columns: list[Any] = [[sample.row_id], _list_of(sample.input_ids), _list_of(sample.spans.reshape(-1))]
    try:
        columns += [_binary(encode_plane(plane, plane_codec(codec, "context"))) for plane in sample.context]
        last = encode_plane(sample.last_hidden, plane_codec(codec, "last_hidden"))
    except StorageError as error:
        raise StorageError(f"sample {sample.row_id}: {error}") from error
    return pa.record_batch([*columns, _list_of(sample.last_rows), _binary(last)], schema=schema(contract))


def decode_batch(batch: pa.RecordBatch, contract: Contract) -> Sample:
    """Inverse of encode_sample; CorruptShard where the columns do not belong together."""
    capture, hidden = contract.capture, contract.target.hidden_size
    ids, spans, rows = (_array(batch.column(name)) for name in ("input_ids", "spans", "last_rows"))
    context = np.empty((len(capture.layer_ids), len(ids), hidden), np.uint16)
    last = np.empty((len(rows), hidden), np.uint16)
    for layer, plane in zip(capture.layer_ids, context, strict=True):
        decode_plane(_bytes(batch.column(context_column(layer))), plane_codec(capture.codec, "context"), plane)
    decode_plane(_bytes(batch.column("last_hidden")), plane_codec(capture.codec, "last_hidden"), last)
    return Sample(batch.column("row_id")[0].as_py(), ids, spans.reshape(-1, 2), context, last, rows)


class ShardWriter:
    """Collects encoded samples and publishes a shard whenever `target_bytes` are reached.

    A shard is built in memory and put whole, so an exception publishes nothing of it. As a context manager it closes on success and
    drops the open shard on an exception.
    """

    def __init__(self, store: ObjectStore, contract: Contract, target_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        if target_bytes < 1:
            raise StorageError(f"target_bytes of a shard must be positive, not {target_bytes}")
        self._store, self._schema, self._target_bytes = store, schema(contract), target_bytes
        self._published: list[ShardInfo] = []
        self._open: _OpenShard | None = None
        self._closed = False

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        self._open, self._closed = None, True

    @property
    def open_bytes(self) -> int:
        """Encoded bytes held in memory, not yet published."""
        return self._open.size if self._open else 0

    def add(self, batch: pa.RecordBatch, row_id: str, index: int) -> list[ShardInfo]:
        """Append one encoded sample; returns all shards published so far (one more whenever this call filled one)."""
        if self._closed:
            raise StorageError("this ShardWriter is closed")
        if self._open is None:
            self._open = _OpenShard(self._schema)
        self._open.add(batch, row_id, index)
        if self._open.size >= self._target_bytes:
            self.flush()
        return list(self._published)

    def flush(self) -> None:
        """Publish what is open, full or not."""
        if self._open is None:
            return
        data, entries = self._open.finish()
        checksum = hashlib.sha256(data).hexdigest()
        name = f"shards/{checksum[:40]}.arrow"
        self._store.put(name, data)
        self._open = None
        self._published.append(ShardInfo(name, len(data), checksum, tuple(entries)))

    def close(self) -> list[ShardInfo]:
        """Publish what is open; returns all shards of this writer in the order of writing."""
        self.flush()
        self._closed = True
        return list(self._published)


class _OpenShard:
    def __init__(self, form: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pa.ipc.new_file(self._sink, form)
        self._rows: list[tuple[str, int, int, int, int, int]] = []  # row_id, index, offset, length, tokens, supervised
        self.size = 0

    def add(self, batch: pa.RecordBatch, row_id: str, index: int) -> None:
        length = pa.ipc.get_record_batch_size(batch)
        self._writer.write_batch(batch)
        # Counted back from the end: the writer puts the schema before the first batch only when that one is written.
        self.size = self._sink.tell()
        spans = _array(batch.column("spans")).reshape(-1, 2)
        supervised = int((spans[:, 1] - spans[:, 0]).sum())
        self._rows.append((row_id, index, self.size - length, length, len(_array(batch.column("input_ids"))), supervised))

    def finish(self) -> tuple[memoryview, list[Entry]]:
        self._writer.close()
        data = memoryview(self._sink.getvalue())
        entries = [
            Entry(row_id, index, offset, length, zlib.crc32(data[offset : offset + length]), tokens, supervised)
            for row_id, index, offset, length, tokens, supervised in self._rows
        ]
        return data, entries


def read_sample(store: ObjectStore, shard: str, entry: Entry, contract: Contract, disk_cache: DiskCache | None = None) -> Sample:
    """One sample, from the node's disk cache if it lies there, else by one ranged GET.

    Raises:
        CorruptShard: missing, short, changed or inconsistent bytes; names shard, row and cause.
        StorageUnavailable: the store cannot be reached.
    """
    if disk_cache is None:
        data = _fetch_message(store, shard, entry)
    else:
        name = hashlib.blake2b(f"{shard}\n{entry.offset}\n{entry.length}\n{entry.crc32}".encode(), digest_size=20).hexdigest()
        data = disk_cache.read(name, lambda found: _message_problem(found, entry) == "", lambda: _fetch_message(store, shard, entry))
    return decode_message(data, store, shard, entry, contract)


def _fetch_message(store: ObjectStore, shard: str, entry: Entry) -> bytes:
    try:
        data = store.get_range(shard, entry.offset, entry.length)
    except FileNotFoundError:
        raise _corrupt(store, shard, entry, "the shard is missing") from None
    if problem := _message_problem(data, entry):
        raise _corrupt(store, shard, entry, problem)
    return data


def _message_problem(data: bytes | memoryview, entry: Entry) -> str:
    """What is wrong with the bytes of a record-batch message; empty where they are those that were written."""
    if len(data) != entry.length:
        return f"truncated: {len(data)} of {entry.length} bytes at offset {entry.offset}"
    return "" if zlib.crc32(data) == entry.crc32 else "checksum differs: the bytes changed since they were written"


def decode_message(data: bytes | memoryview, store: ObjectStore, shard: str, entry: Entry, contract: Contract) -> Sample:
    """The sample in the bytes of one record-batch message, which have the length and checksum of their entry."""
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), schema(contract))
        sample = decode_batch(batch, contract)
    except (pa.ArrowException, OSError, IndexError, ValueError, CorruptShard) as error:
        raise _corrupt(store, shard, entry, f"{error}") from error
    if sample.row_id != entry.row_id or len(sample.input_ids) != entry.tokens:
        raise _corrupt(store, shard, entry, f"holds row {sample.row_id} of {len(sample.input_ids)} tokens instead")
    try:
        sample.validate()
    except StorageError as error:
        raise _corrupt(store, shard, entry, str(error)) from error
    return sample


def verify_shard(store: ObjectStore, info: ShardInfo) -> memoryview:
    """Check a whole shard: size, SHA-256, that it opens as an Arrow file, and every sample's extent and CRC-32; CorruptShard otherwise.

    Returns:
        Its bytes.
    """
    try:
        data = store.get(info.name)
    except FileNotFoundError:
        raise CorruptShard(f"{store.url(info.name)} is missing; run `cache --verify` to list what must be cached again") from None
    if len(data) != info.bytes:
        raise CorruptShard(f"{store.url(info.name)} is truncated: {len(data)} of {info.bytes} bytes")
    if hashlib.sha256(data).hexdigest() != info.checksum:
        raise CorruptShard(f"{store.url(info.name)} changed since it was written: its SHA-256 differs from the commit's")
    try:
        batches = pa.ipc.open_file(pa.BufferReader(data)).num_record_batches
    except pa.ArrowException as error:
        raise CorruptShard(f"{store.url(info.name)} is not a readable Arrow file: {error}") from error
    if batches != len(info.entries):
        raise CorruptShard(f"{store.url(info.name)} holds {batches} samples where its commit lists {len(info.entries)}")
    view = memoryview(data)
    for entry in info.entries:
        if zlib.crc32(view[entry.offset : entry.offset + entry.length]) != entry.crc32:
            raise _corrupt(store, info.name, entry, "checksum differs from the commit's")
    return view


def _corrupt(store: ObjectStore, shard: str, entry: Entry, cause: str) -> CorruptShard:
    return CorruptShard(f"{store.url(shard)}, row {entry.row_id} (index {entry.index}): {cause}")


def _check_fits(sample: Sample, contract: Contract) -> None:
    capture, target = contract.capture, contract.target
    layers, length, hidden = sample.context.shape
    problems = []
    if (layers, hidden) != (len(capture.layer_ids), target.hidden_size):
        problems.append(f"context has {layers} layers of {hidden} channels, the contract {len(capture.layer_ids)} of {target.hidden_size}")
    if length > capture.max_length:
        problems.append(f"{length} tokens exceed max_length {capture.max_length}")
    if sample.input_ids.min() < 0 or sample.input_ids.max() >= target.embedding_rows:
        problems.append(
            f"token ids reach from {sample.input_ids.min()} to {sample.input_ids.max()}, the embedding has {target.embedding_rows} rows"
        )
    if not np.array_equal(sample.last_rows, supervised_rows(sample.spans, length, capture.last_hidden_rows)):
        problems.append(f"last_rows are not the {capture.last_hidden_rows} rows of its spans")
    if problems:
        raise StorageError(f"sample {sample.row_id} does not fit the contract: " + "; ".join(problems))


def _list_of(values: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values, np.int32))
    return pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), flat)


def _binary(data: bytes) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(data)])


def _array(column: pa.Array) -> np.ndarray:
    return column[0].values.to_numpy(zero_copy_only=False).astype(np.int32)


def _bytes(column: pa.Array) -> memoryview:
    return memoryview(column[0].as_buffer())
