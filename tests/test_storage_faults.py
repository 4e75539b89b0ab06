"""The object store against a real S3 server behind a spoiling proxy: what is transient is borne, what is not is one clear line."""

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from s3_proxy import KINDS, Fault, Proxy, proxy
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from storage_cases import build_cache, contract, same

from storage import connection, object_store
from storage.errors import StorageUnavailable
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.reader import SampleReader

STEPS = {"begin": r"\?uploads", "part": "partNumber=2", "complete": r"\?uploadId=[^&]*$"}
BIG = np.random.default_rng(0).bytes(12 * 2**20)  # three parts


@pytest.fixture
def through(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server; no time is lost between attempts."""
    monkeypatch.setattr(object_store, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(object_store, "MULTIPART_BYTES", 5 * 2**20)
    monkeypatch.setattr(connection, "READ_SECONDS", 0.7)
    with proxy(s3) as running:
        yield running


@pytest.fixture
def store(through: Proxy, request: pytest.FixtureRequest) -> ObjectStore:
    return through.server.store(f"faults/{abs(hash(request.node.name))}")


def uploads(store: ObjectStore) -> list[str]:
    found = store._connection.filesystem().call_s3("list_multipart_uploads", Bucket="cache", Prefix=store._prefix.partition("/")[2])
    return [upload["Key"] for upload in found.get("Uploads", [])]


@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_bears_what_passes(through: Proxy, store: ObjectStore, kind: str) -> None:
    store.put("there", b"0123456789")
    operations: list[tuple[str, str, Callable[[], object], object]] = [
        ("PUT", "small", lambda: store.put("small", b"abc"), None),
        ("PUT", "there", lambda: store.put("there", b"0123456789"), None),
        ("GET", "there", lambda: store.get("there"), b"0123456789"),
        ("GET", "there", lambda: store.get_range("there", 2, 6), b"234567"),
        ("HEAD", "there", lambda: store.size("there"), 10),
        ("HEAD", "there", lambda: store.exists("there"), True),
        ("GET", "list-type", lambda: store.list(), ["small", "there"]),
        ("DELETE", "small", lambda: store.delete("small"), None),
    ]
    for method, path, operation, expected in operations:
        # A time-out costs its time, a new connection some of its own.
        through.faults = [Fault(kind, method, path, times=1 if kind in ("timeout", "expired") else 2)]
        assert operation() == expected, (method, path)
    assert store.get("there") == b"0123456789"
    assert through.hits[kind] >= len(operations)


@pytest.mark.parametrize(
    ("kind", "step"),
    [(kind, step) for kind in ("500", "lost", "garbled") for step in STEPS if kind != "garbled" or step == "part"],
)
def test_a_multi_part_upload_bears_what_passes(through: Proxy, store: ObjectStore, kind: str, step: str) -> None:
    through.faults = [Fault(kind, "PUT|POST", STEPS[step], times=1)]
    store.put("big", BIG)
    assert store.get("big") == BIG
    assert store.list() == ["big"]
    assert through.hits[kind] == 1


def test_only_the_part_that_failed_is_sent_again(through: Proxy, store: ObjectStore) -> None:
    through.faults = [Fault("503", "PUT", "partNumber=2", times=3), Fault("slow", "PUT", "partNumber", times=99)]
    store.put("big", BIG)
    assert (through.hits["503"], through.hits["slow"]) == (3, 3)


def test_an_upload_that_fails_for_good_is_aborted_and_shows_nothing(through: Proxy, store: ObjectStore) -> None:
    through.faults = [Fault("denied", "PUT", "partNumber=3", times=1)]
    with pytest.raises(StorageUnavailable, match="refused or lack the permission"):
        store.put("shards/big", BIG)
    assert (store.list(), uploads(store)) == ([], [])


def test_uploads_that_a_dead_process_left_are_aborted(store: ObjectStore) -> None:
    for key in ("shards/one", "shards/two", "kept/three"):
        upload = store._s3("create_multipart_upload", key)["UploadId"]
        store._s3("upload_part", key, UploadId=upload, PartNumber=1, Body=BIG[: 5 * 2**20])
    assert store.abort_uploads("shards/") == 2
    assert [key.rpartition("/")[2] for key in uploads(store)] == ["three"]
    assert store.child("kept").abort_uploads() == 1
    assert store.abort_uploads() == 0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("expired", "the S3 credentials have expired; renew them and run the same command again"),
        ("skewed", "this machine's clock differs from the store's"),
        ("denied", "these credentials are refused or lack the permission"),
        ("500", "did not answer properly in 5 attempts"),
        ("503", "did not answer properly in 5 attempts"),
        ("refused", "did not answer properly in 5 attempts; check that the endpoint is right and reachable"),
        ("short", "did not answer properly in 5 attempts"),
    ],
)
def test_what_does_not_pass_is_one_clear_line(through: Proxy, store: ObjectStore, kind: str, words: str) -> None:
    store.put("there", b"0123456789")
    operations = [lambda: store.get_range("there", 2, 6)] if kind == "short" else [lambda: store.size("there")]
    if kind not in ("short", "expired"):
        operations += [lambda: store.put("x", b"1"), lambda: store.get_range("there", 2, 6), store.list, lambda: store.get("there")]
    for operation in operations:
        through.faults = [Fault(kind, times=99)]
        with pytest.raises(StorageUnavailable, match=words) as caught:
            operation()
        assert "\n" not in str(caught.value)
        assert store.settings.root in str(caught.value)


def test_renewed_credentials_are_found_while_a_job_runs(
    through: Proxy, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The credentials file is renewed by another program; the environment cannot be."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path_factory.mktemp("aws") / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str, secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write("old", "old")
    through.faults = [Fault("expired", times=2)]
    pauses: list[float] = []

    def renew(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            write(ACCESS_KEY, SECRET_KEY)

    monkeypatch.setattr(object_store.time, "sleep", renew)
    store.put("x", b"1")
    assert store.get("x") == b"1"
    assert len(pauses) == 2


def test_a_cache_is_written_and_read_whole_through_a_bad_network(through: Proxy, store: ObjectStore) -> None:
    """Every fourth request is spoiled, in one of all ways."""
    patient = ObjectStore(object_store.replace(store.settings, attempts=12))
    through.rate = 1 / 4
    case = contract("lossless")
    written = build_cache(patient, case, 24, leases=4)
    with SampleReader(patient, case, Manifest.current(patient)) as reader:
        read = list(reader.stream(range(24)))
    assert all(same(a, b) for a, b in zip(read, written, strict=True))
    assert len(through.hits) >= 4


def test_many_threads_share_a_store_whose_credentials_expire(through: Proxy, store: ObjectStore) -> None:
    through.faults = [Fault("expired", times=6)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            store.put(f"t/{number}", os.urandom(100))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.list("t/")) == 8
