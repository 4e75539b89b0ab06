"""One small interface over a local folder, S3 (by s3fs) or any other fsspec URL.

Object stores have no rename and no append, so the interface has neither: an object appears whole by `put`, or not at all.
"""

import errno
import math
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from storage.connection import Connection, advice, is_expired, is_mute, is_transient, md5_header
from storage.errors import StorageError, StorageUnavailable

R = TypeVar("R")
Keys = list[str]  # a name of its own, since ObjectStore.list hides the built-in inside the class

ATTEMPTS = 5
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.2, 30.0
MULTIPART_BYTES = 32 * 2**20
"""Part size of multi-part uploads; objects below twice this size go by one PUT."""
_PARTS_AT_ONCE = 4


@dataclass(frozen=True)
class StorageSettings:
    """Where a cache or a checkpoint lies. Credentials come from the AWS environment and are never stored here.

    Args:
        root: a local folder (plain or file://), s3://bucket/prefix, or another URL that fsspec understands.
        endpoint_url: of an S3-compatible server; None for AWS itself (or AWS_ENDPOINT_URL).
        region: S3 region; None for the environment's.
        attempts: how often a request is tried, the delays doubling from 0.2 to 30 s: 5 give up after 3 s, 14 after four minutes.
    """

    root: str
    endpoint_url: str | None = None
    region: str | None = None
    attempts: int = ATTEMPTS


def check_key(key: str) -> str:
    """Return `key` if it is a relative path with neither empty nor dot parts; StorageError otherwise."""
    parts = key.split("/")
    if not key or "\\" in key or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise StorageError(
            f"{key!r} is not a valid object key: write a relative path such as 'shards/a.arrow', without '..' or empty parts"
        )
    return key


@dataclass(frozen=True)
class Stored:
    """An object's key and bytes, and when it was written, in seconds since the epoch by the store's clock."""

    key: str
    bytes: int
    written: float


class ObjectStore:
    """Whole-object writes, ranged reads and listings under one root. Thread-safe and picklable (a copy connects anew).

    Transient trouble (5xx, time-outs, cut connections, short reads, expired credentials) is retried with exponential back-off. A
    missing key is a FileNotFoundError; refused credentials, an unreachable endpoint or an unusable folder is StorageUnavailable.
    """

    def __init__(self, settings: StorageSettings) -> None:
        if not settings.root:
            raise StorageError("the storage root is empty: give a folder or a URL such as s3://bucket/prefix")
        self.settings = settings
        protocol, separator, rest = settings.root.partition("://")
        self._local: Path | None = None
        if not separator or protocol == "file":
            self._local = Path(rest if separator else settings.root).expanduser().absolute()
        self._protocol = protocol if separator else "file"
        self._prefix = rest.rstrip("/")
        if self._protocol == "s3" and not self._prefix.partition("/")[0]:
            raise StorageError(f"{settings.root!r} names no bucket: write s3://bucket/prefix")
        self._connection = Connection(self._protocol, settings.root, settings.endpoint_url, settings.region)

    def __reduce__(self) -> tuple[type["ObjectStore"], tuple[StorageSettings]]:
        return ObjectStore, (self.settings,)

    def __repr__(self) -> str:
        return f"ObjectStore({self.settings.root!r})"

    def child(self, prefix: str) -> "ObjectStore":
        """The store rooted at `prefix` below this one."""
        root = self.settings.root.rstrip("/") or "/"
        store = ObjectStore(replace(self.settings, root=f"{root.rstrip('/')}/{check_key(prefix)}"))
        store._connection = self._connection
        return store

    def url(self, key: str) -> str:
        """Where `key` lies, for people and messages."""
        return f"{self.settings.root.rstrip('/')}/{key}"

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Publish one object whole, replacing an older one; an exception publishes nothing.

        Local: temporary file, fsync, os.replace. S3: one PUT, or a multi-part upload whose parts are repeated one by one and which is
        aborted on failure; the server checks every part's MD5 and the size is read back.
        """
        check_key(key)
        if self._local is not None:
            self._put_local(self._local / key, data)
            return
        body = memoryview(data)

        def upload() -> None:
            if self._protocol != "s3":
                self._connection.filesystem().pipe_file(self._path(key), bytes(body))
            elif body.nbytes < 2 * MULTIPART_BYTES:
                self._s3("put_object", key, Body=bytes(body), ContentMD5=md5_header(body))
            else:
                self._upload_parts(key, body)
            written = int(self._connection.filesystem().info(self._path(key))["size"])
            if written != body.nbytes:
                raise ConnectionError(f"{written} of {body.nbytes} bytes arrived")

        try:
            self._retry("write", key, upload)
        except FileNotFoundError as error:
            raise StorageUnavailable(f"cannot write {self.url(key)}: its bucket does not exist; create it or correct the root") from error

    def get(self, key: str) -> bytes:
        """The whole object; FileNotFoundError where there is none."""
        check_key(key)
        if self._local is not None:
            return self._read_local(key, 0, -1)
        options = {"max_concurrency": 1} if self._protocol == "s3" else {}  # s3fs's concurrent form leaves zeros where a part is short
        return self._retry("read", key, lambda: self._connection.filesystem().cat_file(self._path(key), **options))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) of an object; fewer only where the object itself ends before.

        Raises:
            FileNotFoundError: no such object.
            StorageUnavailable: the store failed, or kept answering short, after all attempts.
        """
        check_key(key)
        if offset < 0 or length < 0:
            raise StorageError(f"cannot read {length} bytes at offset {offset} of {self.url(key)}: both must not be negative")
        if length == 0:
            return b""
        if self._local is not None:
            return self._read_local(key, offset, length)

        def read() -> bytes:
            try:
                data: bytes = self._connection.filesystem().cat_file(self._path(key), start=offset, end=offset + length)
            except OSError as error:
                if error.errno == errno.EINVAL and self.size(key) <= offset:  # 416: the range starts behind the end
                    return b""
                raise
            if len(data) < length and len(data) < self.size(key) - offset:
                raise ConnectionError(f"short read: {len(data)} of {length} bytes at offset {offset}")
            return data

        return self._retry("read", key, read)

    def exists(self, key: str) -> bool:
        """Whether there is an object of this name (folders do not count)."""
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        """Bytes of an object; FileNotFoundError where there is none."""
        check_key(key)
        if self._local is not None:
            path = self._local / key
            if not path.is_file():
                raise FileNotFoundError(f"there is no {self.url(key)}")
            return path.stat().st_size
        info = self._retry("look at", key, lambda: self._connection.filesystem().info(self._path(key)))
        if info["type"] != "file":
            raise FileNotFoundError(f"there is no {self.url(key)}")
        return int(info["size"])

    def list(self, prefix: str = "") -> Keys:
        """All keys that begin with `prefix` (a plain string prefix: give 'commits/' for a folder), sorted. Never cached."""
        folder, _, name = prefix.rpartition("/")
        if folder:
            check_key(folder)
        if self._local is not None:
            base = self._local / folder if folder else self._local
            found = [str((Path(top) / file).relative_to(self._local)) for top, _, files in os.walk(base) for file in files]
        else:
            path = self._path(folder) if folder else self._prefix
            options = {"prefix": name} if self._protocol == "s3" and name else {}
            skip = len(self._prefix) + 1
            found = [entry[skip:] for entry in self._retry("list", prefix, lambda: self._listing(path, options))]
        return sorted(key for key in found if key and key.startswith(prefix) and not key.rpartition("/")[2].startswith("."))

    def delete(self, key: str) -> None:
        """Remove an object; one that is already gone is fine."""
        check_key(key)
        if self._local is not None:
            (self._local / key).unlink(missing_ok=True)
            return
        try:
            self._retry("delete", key, lambda: self._connection.filesystem().rm_file(self._path(key)))
        except FileNotFoundError:
            return

    def details(self, prefix: str) -> tuple[Stored, ...]:
        """Objects in the folder `prefix`, or the one of that name, with sizes and times, unfinished local files (`.NAME.tmp`) included;
        sorted by key. Never cached."""
        folder = check_key(prefix.rstrip("/"))
        if self._local is not None:
            base, found = self._local / folder, []
            for path in [base] if base.is_file() else [Path(top) / file for top, _, files in os.walk(base) for file in files]:
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    found.append(Stored(str(path.relative_to(self._local)), stat.st_size, stat.st_mtime))
            return tuple(sorted(found, key=lambda stored: stored.key))

        def listing() -> dict[str, Any]:
            try:
                return dict(self._connection.filesystem().find(self._path(folder), detail=True))
            except FileNotFoundError:
                return {}

        start = len(self._prefix.lstrip("/")) + 1
        entries = self._retry("list", prefix, listing).items()
        found = [Stored(path.lstrip("/")[start:], int(entry["size"]), _written(entry)) for path, entry in entries]
        return tuple(sorted(found, key=lambda stored: stored.key))

    def abort_uploads(self, prefix: str = "", before: float = math.inf) -> int:
        """Abort multi-part uploads below `prefix` that began before that time and were never finished (their parts are stored, and paid
        for); returns how many. None but S3 has such. One that is still at work is aborted as well, and its writer starts it again."""
        if self._protocol != "s3":
            return 0
        bucket, _, folder = self._prefix.partition("/")
        start = f"{folder}/{prefix}" if folder else prefix
        aborted, marker = 0, dict[str, str]()
        while True:

            def listing(marker: dict[str, str] = marker) -> Any:
                return self._connection.filesystem().call_s3("list_multipart_uploads", Bucket=bucket, Prefix=start, **marker)

            try:
                page = self._retry("list the uploads of", prefix, listing)
            except FileNotFoundError:  # what some servers say where there are none
                return aborted
            for upload in page.get("Uploads", []):
                if upload["Initiated"].timestamp() < before:
                    with suppress(FileNotFoundError):
                        names = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                        self._connection.filesystem().call_s3("abort_multipart_upload", **names)
                    aborted += 1
            if not page.get("IsTruncated"):
                return aborted
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def free_bytes(self) -> int | None:
        """Room on the disk of a local folder; None where the store is not local."""
        if self._local is None:
            return None
        return shutil.disk_usage(next(path for path in (self._local, *self._local.parents) if path.exists())).free

    def check_writable(self) -> None:
        """Write and delete a small probe, so that a long job finds out before it starts; StorageUnavailable if it cannot."""
        key = f".probe-{secrets.token_hex(6)}"
        self.put(key, b"probe")
        self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _s3(self, method: str, key: str, **arguments: Any) -> Any:
        bucket, _, name = self._path(key).partition("/")
        return self._connection.filesystem().call_s3(method, Bucket=bucket, Key=name, **arguments)

    def _upload_parts(self, key: str, body: memoryview) -> None:
        upload = self._s3("create_multipart_upload", key)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            part = bytes(body[(number - 1) * MULTIPART_BYTES : number * MULTIPART_BYTES])
            options = {"UploadId": upload, "PartNumber": number, "Body": part, "ContentMD5": md5_header(part)}
            return {"PartNumber": number, "ETag": self._retry("write", key, lambda: self._s3("upload_part", key, **options))["ETag"]}

        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="upload") as pool:
                parts = list(pool.map(send, range(1, -(-len(body) // MULTIPART_BYTES) + 1)))
            self._s3("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException as error:
            with suppress(Exception):  # what it leaves behind, the next job's `abort_uploads` finds
                self._s3("abort_multipart_upload", key, UploadId=upload)
            if isinstance(error, FileNotFoundError):  # the bucket was there when the upload began
                raise ConnectionError("the store dropped the multi-part upload") from error
            raise

    def _listing(self, path: str, options: dict[str, Any]) -> Keys:
        try:
            return [
                entry.lstrip("/") if self._protocol == "memory" else entry for entry in self._connection.filesystem().find(path, **options)
            ]
        except FileNotFoundError:
            return []

    def _retry(self, verb: str, key: str, action: Callable[[], R]) -> R:
        """Run `action`, repeating it on transient trouble; turn what remains into the errors that this class promises."""
        for attempt in range(self.settings.attempts):
            try:
                return action()
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no {self.url(key)}") from None
            except StorageError:
                raise
            except Exception as raised:
                error = self._explained(key, raised)
                if attempt + 1 == self.settings.attempts or not is_transient(error):
                    self._give_up(verb, key, error)
                if is_expired(error):
                    self._connection.renew()  # someone may have renewed the credentials where they come from
            time.sleep(min(FIRST_DELAY_SECONDS * 2**attempt, LONGEST_DELAY_SECONDS) * (1 + random.random() / 4))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _explained(self, key: str, error: Exception) -> Exception:
        """The error itself; for a refused HEAD, what the store says to a GET of one byte instead."""
        if not is_mute(error):
            return error
        try:
            self._connection.filesystem().cat_file(self._path(key), start=0, end=1)
        except FileNotFoundError:
            pass
        except Exception as told:
            return told
        return ConnectionError("refused, but let in a moment later")

    def _give_up(self, verb: str, key: str, error: Exception) -> NoReturn:
        where = f"cannot {verb} {self.url(key)}" + (f" at {self.settings.endpoint_url}" if self.settings.endpoint_url else "")
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        raise StorageUnavailable(f"{where}: {advice(error, self.settings.attempts)} ({detail})") from error

    def _put_local(self, path: Path, data: bytes | bytearray | memoryview) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise StorageUnavailable(f"cannot write {path}: {error.strerror or error}; check folder, permissions and disk space") from error

    def _read_local(self, key: str, offset: int, length: int) -> bytes:
        path = Path(str(self._local)) / key
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise FileNotFoundError(f"there is no {self.url(key)}") from None
        except OSError as error:
            raise StorageUnavailable(f"cannot read {path}: {error.strerror or error}; check the disk and the permissions") from error


def _written(entry: dict[str, Any]) -> float:
    """When an object was written; now, where this file system does not tell: what may be new is never taken for old."""
    when = entry.get("LastModified") or entry.get("updated") or entry.get("mtime") or entry.get("created")
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, int | float) else time.time()
