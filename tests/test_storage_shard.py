"""Shards: what comes back is what went in, or an error that names shard, row and cause."""

import numpy as np
import pyarrow as pa
import pytest
from storage_cases import contract, same, sample, to_float, with_capture

from storage.codec import CODECS
from storage.errors import CorruptShard, StorageError, StorageUnavailable
from storage.object_store import ObjectStore, StorageSettings
from storage.sample import mask_to_spans, spans_to_mask, supervised_rows
from storage.shard import ShardInfo, ShardWriter, encode_sample, read_sample, schema, verify_shard


@pytest.fixture
def store(tmp_path):
    return ObjectStore(StorageSettings(str(tmp_path / "cache")))


@pytest.fixture(params=["folder", "s3"])
def any_store(request, tmp_path):
    """A folder, or a real S3 server."""
    if request.param == "folder":
        return ObjectStore(StorageSettings(str(tmp_path / "cache")))
    return request.getfixturevalue("s3").store(tmp_path.name)


def write(store, case, samples, target_bytes=10**9):
    with ShardWriter(store, case, target_bytes) as writer:
        for index, item in enumerate(samples):
            writer.add(encode_sample(item, case), item.row_id, index)
        return writer.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", ["supervised", "all"])
@pytest.mark.parametrize("hidden", [16, 96])
def test_samples_come_back(store, codec, rows, hidden):
    case = contract(codec, hidden, layers=(-1, 2, 6), rows=rows)
    samples = [sample(case, tokens, tokens) for tokens in (1, 2, 3, 40)]
    infos = write(store, case, samples)
    assert len(infos) == 1
    for item, entry in zip(samples, infos[0].entries, strict=True):
        got = read_sample(store, infos[0].name, entry, case)
        assert got.context.flags.writeable
        assert (entry.tokens, entry.supervised) == (len(item.input_ids), int(item.loss_mask().sum()))
        if codec == "fp8":
            exact, stored = to_float(item.context), to_float(got.context)
            assert np.abs(stored - exact).max() <= np.abs(exact).max() / 16
            got.context = item.context
        assert same(got, item)
    verify_shard(store, infos[0])


def test_a_shard_is_an_ordinary_arrow_file(store):
    case = contract("lossless")
    infos = write(store, case, [sample(case, 9, seed) for seed in range(3)])
    with pa.ipc.open_file(pa.BufferReader(store.get(infos[0].name))) as file:
        assert file.num_record_batches == 3
        assert file.schema.metadata[b"dtype"] == b"bfloat16"
        assert file.schema.metadata[b"codec"] == b"lossless"
        assert file.schema == schema(case)
        assert file.get_batch(1)["row_id"].to_pylist() == ["row-1"]


def test_shards_close_at_their_size_and_are_named_by_content(store):
    case = contract("raw")
    samples = [sample(case, 20, seed) for seed in range(6)]
    infos = write(store, case, samples, target_bytes=25_000)
    assert len(infos) == 3
    assert [entry.row_id for info in infos for entry in info.entries] == [item.row_id for item in samples]
    assert [info.name for info in infos] == [info.name for info in write(store, case, samples, target_bytes=25_000)]
    assert sorted(info.name for info in infos) == store.list("shards/")
    assert all(store.size(info.name) == info.bytes for info in infos)


def test_shard_info_survives_json(store):
    case = contract("lossless")
    info = write(store, case, [sample(case, 9, seed) for seed in range(3)])[0]
    assert ShardInfo.from_json(info.to_json()) == info


def test_an_exception_publishes_nothing(store):
    case = contract("raw")
    batches = iter([encode_sample(sample(case, 9, 0), case)])

    def produce() -> None:
        with ShardWriter(store, case, 10**9) as writer:
            while True:
                writer.add(next(batches), "row-0", 0)

    with pytest.raises(StopIteration):
        produce()
    assert store.list() == []


def test_a_failed_upload_publishes_nothing(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    case = contract("raw")
    with pytest.raises(StorageUnavailable, match="cannot write"):
        write(ObjectStore(StorageSettings(str(blocked))), case, [sample(case, 9, 0)])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cut", [1, 8, 1000])
def test_a_truncated_shard_names_shard_row_and_cause(any_store, codec, cut):
    case = contract(codec)
    samples = [sample(case, 30, seed) for seed in range(2)]
    info = write(any_store, case, samples)[0]
    last = info.entries[-1]
    data = any_store.get(info.name)
    for kept in (len(data) - cut, last.offset + last.length - cut, last.offset):  # in the footer, inside the batch, at its border
        any_store.put(info.name, data[:kept])
        with pytest.raises(CorruptShard, match="truncated"):
            verify_shard(any_store, info)
        assert read_sample(any_store, info.name, info.entries[0], case).row_id == "row-0"
        if kept < last.offset + last.length:
            with pytest.raises(CorruptShard, match=f"{info.name}, row row-1.*truncated: {max(0, kept - last.offset)} of {last.length}"):
                read_sample(any_store, info.name, last, case)


@pytest.mark.parametrize("codec", CODECS)
def test_any_flipped_bit_is_found(any_store, codec):
    case = contract(codec, hidden=16)
    info = write(any_store, case, [sample(case, 8, 0)])[0]
    entry = info.entries[0]
    data = bytearray(any_store.get(info.name))
    for position in np.random.default_rng(0).integers(0, 8 * entry.length, 60):
        damaged = bytearray(data)
        damaged[entry.offset + position // 8] ^= 1 << (position % 8)
        any_store.put(info.name, damaged)
        with pytest.raises(CorruptShard, match=r"row-0.*checksum differs"):
            read_sample(any_store, info.name, entry, case)
    with pytest.raises(CorruptShard, match="SHA-256 differs"):
        verify_shard(any_store, info)


def test_a_missing_shard_is_named(store):
    case = contract("raw")
    info = write(store, case, [sample(case, 8, 0)])[0]
    store.delete(info.name)
    with pytest.raises(CorruptShard, match=rf"{info.name}, row row-0.*missing"):
        read_sample(store, info.name, info.entries[0], case)
    with pytest.raises(CorruptShard, match="missing"):
        verify_shard(store, info)


def test_reading_under_another_codec_or_shape_is_an_error(store):
    case = contract("lossless")
    info = write(store, case, [sample(case, 8, 0)])[0]
    for other in (with_capture(case, codec="raw"), contract("lossless", hidden=64)):
        with pytest.raises(CorruptShard, match="row-0"):
            read_sample(store, info.name, info.entries[0], other)


def test_what_does_not_fit_the_contract_is_refused():
    case = contract("raw")
    item = sample(case, 8, 0)
    with pytest.raises(StorageError, match="max_length 4"):
        encode_sample(item, with_capture(case, max_length=4))
    with pytest.raises(StorageError, match="not the all rows"):
        encode_sample(item, with_capture(case, last_hidden_rows="all"))
    with pytest.raises(StorageError, match="3 layers of 96 channels, the contract 2 of 96"):
        encode_sample(item, with_capture(case, layer_ids=(1, 2)))
    item.input_ids[3] = 1024
    with pytest.raises(StorageError, match="1024 rows"):
        encode_sample(item, case)


def test_nan_names_the_sample():
    case = contract("fp8")
    item = sample(case, 8, 0)
    item.last_hidden[1, 2] = 0x7FC0
    with pytest.raises(StorageError, match=r"sample row-0: .*position 1, channel 2"):
        encode_sample(item, case)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("spans", np.array([[4, 3]], np.int32), "spans must be ascending"),
        ("spans", np.array([[1, 4], [3, 6]], np.int32), "spans must be ascending"),
        ("spans", np.array([[1, 9]], np.int32), "spans must be ascending"),
        ("last_rows", np.array([3, 2], np.int32), "last_hidden must be"),
        ("input_ids", np.zeros(0, np.int32), "non-empty"),
        ("input_ids", np.zeros(8, np.int64), "int32"),
    ],
)
def test_inconsistent_samples_are_refused(name, value, message):
    item = sample(contract("raw"), 8, 0)
    setattr(item, name, value)
    with pytest.raises(StorageError, match=message):
        item.validate()


def test_supervised_rows_are_the_teachers_of_supervised_tokens():
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = rng.random(rng.integers(1, 20)) < 0.5
        spans = mask_to_spans(mask)
        assert np.array_equal(spans_to_mask(spans, len(mask)), mask)
        assert supervised_rows(spans, len(mask), "supervised").tolist() == [p for p in range(len(mask) - 1) if mask[p + 1]]
        assert supervised_rows(spans, len(mask), "all").tolist() == list(range(len(mask)))
