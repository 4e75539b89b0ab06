"""The object store: the same behaviour on a folder, on a real S3 server and on another fsspec URL."""

import pickle
import socket
import threading

import pytest
from s3_server import BUCKET

from storage import object_store
from storage.errors import StorageError, StorageUnavailable
from storage.object_store import ObjectStore, StorageSettings


@pytest.fixture(params=["folder", "s3", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return ObjectStore(StorageSettings(str(tmp_path / "root")))
    if request.param == "memory":
        return ObjectStore(StorageSettings(f"memory://{tmp_path.name}/root"))
    return request.getfixturevalue("s3").store(tmp_path.name)


def test_what_is_put_can_be_read_listed_and_deleted(store):
    store.put("a/one.bin", b"0123456789")
    store.put("a/two.bin", bytearray(b"2"))
    store.put("ab/three.bin", memoryview(b"333"))
    assert store.get("a/one.bin") == b"0123456789"
    assert store.get_range("a/one.bin", 3, 4) == b"3456"
    assert store.get_range("a/one.bin", 8, 40) == b"89"
    assert store.get_range("a/one.bin", 50, 4) == b""
    assert store.get_range("a/one.bin", 5, 0) == b""
    assert store.list() == ["a/one.bin", "a/two.bin", "ab/three.bin"]
    assert store.list("a/") == ["a/one.bin", "a/two.bin"]
    assert store.list("a/t") == ["a/two.bin"]
    assert store.list("none/") == []
    assert store.exists("a/one.bin")
    assert not store.exists("a")
    assert store.size("ab/three.bin") == 3
    store.put("a/one.bin", b"new")
    assert store.get("a/one.bin") == b"new"
    store.delete("a/one.bin")
    store.delete("a/one.bin")
    assert store.list("a/") == ["a/two.bin"]


def test_a_new_key_shows_at_once(store):
    """No listing cache: another process's keys must appear."""
    writer = pickle.loads(pickle.dumps(store)) if store.settings.root.startswith("s3") else store
    for number in range(3):
        assert len(store.list("commits/")) == number
        writer.put(f"commits/{number}.json", b"{}")
        assert store.exists(f"commits/{number}.json")


def test_missing_keys_are_file_not_found(store):
    store.put("there", b"1")
    for action in (lambda: store.get("gone"), lambda: store.get_range("gone", 0, 3), lambda: store.size("gone")):
        with pytest.raises(FileNotFoundError, match="gone"):
            action()


def test_children_and_copies_see_the_same_objects(store):
    child = store.child("deep/er")
    child.put("x", b"1")
    assert store.get("deep/er/x") == b"1"
    assert child.list() == ["x"]
    assert pickle.loads(pickle.dumps(child)).get("x") == b"1"
    assert child.url("x") == f"{store.settings.root}/deep/er/x"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\\b", "a\0"])
def test_keys_that_could_leave_the_root_are_refused(store, key):
    for action in (store.get, store.delete, store.size, store.child, lambda k: store.put(k, b"")):
        with pytest.raises(StorageError, match="not a valid object key"):
            action(key)


def test_probe_leaves_nothing(store):
    store.check_writable()
    assert store.list() == []


def test_many_threads(store):
    def work(number: int) -> None:
        store.put(f"t/{number}", str(number).encode() * 100)
        assert store.get_range(f"t/{number}", 0, 1) == str(number)[:1].encode()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.list("t/")) == 8


def test_multi_part_upload_and_ranged_reads(s3, monkeypatch, tmp_path):
    monkeypatch.setattr(object_store, "MULTIPART_BYTES", 5 * 2**20)
    store = s3.store(tmp_path.name)
    data = bytes(range(256)) * (12 * 2**12)  # 12 MiB: three parts
    store.put("big", data)
    assert store.get("big") == data
    assert store.get_range("big", 7 * 2**20 - 3, 2**20) == data[7 * 2**20 - 3 : 8 * 2**20 - 3]


def test_local_put_is_atomic(tmp_path, monkeypatch):
    store = ObjectStore(StorageSettings(str(tmp_path)))
    store.put("a", b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(object_store.os, "fsync", fail)
    with pytest.raises(StorageUnavailable, match="No space left on device"):
        store.put("a", b"newer")
    assert store.get("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match=r"cannot write .*file/.*check folder") as caught:
        ObjectStore(StorageSettings(str(tmp_path / "file"))).check_writable()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_one_clear_line(s3, monkeypatch, variable):
    s3.store("credentials").put("there", b"1")
    monkeypatch.setenv(variable, "wrong")
    store = s3.store("credentials")
    for action in (
        store.check_writable,
        store.list,
        lambda: store.get("there"),
        lambda: store.size("there"),
        lambda: store.exists("there"),
    ):
        with pytest.raises(StorageUnavailable, match="credentials") as caught:
            action()
        assert "\n" not in str(caught.value)
        assert s3.endpoint_url in str(caught.value)


def test_no_credentials_are_one_clear_line(s3, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageUnavailable, match="no S3 credentials were found"):
        s3.store("credentials").check_writable()


def test_missing_bucket_is_one_clear_line(s3):
    with pytest.raises(StorageUnavailable, match="bucket does not exist"):
        ObjectStore(StorageSettings("s3://no-such-bucket/x", s3.endpoint_url)).check_writable()


def test_unreachable_endpoint_is_one_clear_line(s3, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_DELAY_SECONDS", 0.001)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StorageUnavailable, match="5 attempts; check that the endpoint"):
            ObjectStore(StorageSettings(f"s3://{BUCKET}/x", url)).check_writable()


def test_transient_trouble_is_repeated(s3, monkeypatch, tmp_path):
    """A connection that breaks twice costs two attempts, not the read."""
    monkeypatch.setattr(object_store, "FIRST_DELAY_SECONDS", 0.001)
    store = s3.store(tmp_path.name)
    store.put("x", b"0123456789")
    filesystem = store._connection.filesystem()
    whole, failures = filesystem.cat_file, [ConnectionResetError("cut"), TimeoutError("slow"), b"01"]

    def flaky(*args: object, **options: object) -> bytes:
        failure = failures.pop(0) if failures else None
        if isinstance(failure, Exception):
            raise failure
        return failure if failure is not None else whole(*args, **options)

    monkeypatch.setattr(filesystem, "cat_file", flaky)
    assert store.get_range("x", 0, 5) == b"01234"
    failures += [ConnectionResetError("cut")] * 5
    with pytest.raises(StorageUnavailable, match="5 attempts"):
        store.get_range("x", 0, 5)


@pytest.mark.parametrize("root", ["", "s3://", "s3:///key"])
def test_useless_roots_are_refused(root):
    with pytest.raises(StorageError, match=r"root|bucket"):
        ObjectStore(StorageSettings(root))
