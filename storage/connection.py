"""The fsspec filesystem behind an object store, and what its errors mean."""

import base64
import errno
import hashlib
import os
import threading
from typing import Any

import fsspec
from fsspec.exceptions import FSTimeoutError

CONNECT_SECONDS, READ_SECONDS = 10, 60

_TRANSIENT_ERRNO = {errno.EREMOTEIO, errno.EBUSY, errno.EIO, errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE}
# Codes of S3's error answers. Damaged on the way: what arrived is not what was sent.
_DAMAGED = {"BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_REFUSED = {"AccessDenied", "Forbidden", "SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "403"}


class Connection:
    """The fsspec filesystem behind a store and its children, made on first use, and anew in a forked process."""

    def __init__(self, protocol: str, root: str, endpoint_url: str | None, region: str | None) -> None:
        self._protocol, self._root, self._endpoint_url, self._region = protocol, root, endpoint_url, region
        self._lock = threading.Lock()
        self._process: int | None = None
        self._made: Any = None

    def filesystem(self) -> Any:
        with self._lock:
            if self._process != os.getpid():
                self._made, self._process = self._connect(), os.getpid()
            return self._made

    def renew(self) -> None:
        """Connect anew on next use, with the credentials that are found then."""
        with self._lock:
            self._process = None

    def _connect(self) -> Any:
        if self._protocol != "s3":
            filesystem, _ = fsspec.url_to_fs(self._root)
            return filesystem
        client: dict[str, Any] = {"endpoint_url": self._endpoint_url} if self._endpoint_url else {}
        if self._region:
            client["region_name"] = self._region
        filesystem = fsspec.filesystem(
            "s3",
            client_kwargs=client,
            config_kwargs={
                # Newer botocore verifies checksums that several S3 servers do not give on ranged reads.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                # One place repeats requests: ObjectStore._retry.
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "max_pool_connections": 64,
            },
            use_listings_cache=False,  # a cached listing never learns of a new key
            skip_instance_cache=True,  # a shared instance would keep another store's credentials, and does not survive a fork
        )
        filesystem.retries = 1
        return filesystem


def md5_header(data: bytes | memoryview) -> str:
    """As S3's Content-MD5 header wants it: the server refuses bytes that differ from it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _code(error: BaseException) -> str:
    """Code of an S3 error answer; empty for any other error. s3fs keeps botocore's error as the cause of its own."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def is_expired(error: BaseException) -> bool:
    """Whether the credentials were good once: they may have been renewed where they come from."""
    return _code(error) in _EXPIRED


def is_mute(error: BaseException) -> bool:
    """Whether this is a refused HEAD: its answer has no body, so that nobody knows why."""
    return _code(error) in ("400", "403")


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: 5xx, throttling, time-outs, cut connections, bytes damaged on their way, expired credentials."""
    if _code(error) in _DAMAGED or is_expired(error):
        return True
    if isinstance(error, PermissionError | FileNotFoundError):
        return False
    if isinstance(error, TimeoutError | ConnectionError | FSTimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    # botocore and aiohttp are optional parts of fsspec, so their errors are known here by module and family name.
    names = {base.__name__ for base in type(error).__mro__}
    return bool(
        names
        & {
            "HTTPClientError",
            "ConnectionError",
            "ClientPayloadError",
            "ClientConnectionError",
            "IncompleteReadError",
            "ResponseParserError",
        }
    )


def advice(error: BaseException, attempts: int) -> str:
    """What a person can do about an error that remained after `attempts` attempts."""
    if is_expired(error):
        return "the S3 credentials have expired; renew them and run the same command again, what is stored stays"
    if _code(error) == "RequestTimeTooSkewed":
        return "this machine's clock differs from the store's by more than it allows; set the clock (NTP)"
    if _code(error) in _REFUSED or isinstance(error, PermissionError):
        return "these credentials are refused or lack the permission; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if "credential" in type(error).__name__.lower():
        return "no S3 credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)"
    if is_transient(error):
        return f"the store did not answer properly in {attempts} attempts; check that the endpoint is right and reachable"
    return "check the root, its bucket and the endpoint"
