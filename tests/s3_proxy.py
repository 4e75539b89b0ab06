"""An HTTP proxy in front of the S3 server that spoils chosen requests as networks, servers and credential services do."""

import http.client
import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import psutil
from s3_server import S3Server

KINDS = ("500", "503", "timeout", "slow", "short", "cut", "lost", "refused", "garbled", "expired")
HANG_SECONDS = 1.5  # longer than the tests' read time-out


@dataclass
class Fault:
    """What happens to a request.

    kind:
        500, 503        the server's error answer
        timeout         no answer until the client has given up
        slow            the answer comes in small pieces
        short           a ranged read answers with fewer bytes, and says so
        cut             the connection breaks in the middle of the answer
        lost            the request is carried out, its answer never comes
        refused         the connection breaks before the request is read
        garbled         one bit of the request's body flips on its way
        expired, skewed, denied   403 with S3's codes for these
        killed          the process that asks is killed, and nothing is carried out
        killed after    the request is carried out, then the process that asked is killed
    method, path: regular expressions; path includes the query.
    times: how many requests it hits.
    also: called at that moment.
    """

    kind: str
    method: str = ".*"
    path: str = ".*"
    times: int = 1
    also: Callable[[], object] = lambda: None


@dataclass
class Proxy:
    """A running proxy. `faults` hit in order; then each request is spoiled with probability `rate` by one of `kinds`."""

    server: S3Server
    upstream: S3Server
    faults: list[Fault] = field(default_factory=list)
    rate: float = 0.0
    kinds: tuple[str, ...] = KINDS
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    hits: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)
    """Bytes that GET requests were answered with, by path."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, path: str) -> Fault:
        """The fault of this request; one of no kind if there is none."""
        with self.lock:
            for fault in self.faults:
                if fault.times and re.fullmatch(fault.method, method) and re.search(fault.path, path):
                    fault.times -= 1
                    self.hits[fault.kind] += 1
                    return fault
            if self.draw.random() < self.rate:
                kind = self.draw.choice(self.kinds)
                self.hits[kind] += 1
                return Fault(kind)
            return Fault("")


@contextmanager
def proxy(upstream: S3Server) -> Iterator[Proxy]:
    """A proxy on a free loopback port for the time of the block."""
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    listener.daemon_threads = True
    found = Proxy(S3Server(f"http://127.0.0.1:{listener.server_port}", upstream.folder), upstream)
    listener.proxy = found  # type: ignore[attr-defined]
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        listener.shutdown()
        listener.server_close()


_CODES = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (403, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "denied": (403, "AccessDenied"),
}


def kill_client(port: int) -> None:
    """Kill the process whose connection begins at that local port."""
    (process,) = {c.pid for c in psutil.net_connections("tcp4") if c.laddr.port == port and c.pid not in (None, os.getpid())}
    os.kill(process, signal.SIGKILL)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        found: Proxy = self.server.proxy  # type: ignore[attr-defined]
        fault = found.choose(self.command, self.path)
        kind = fault.kind
        fault.also()
        if kind == "killed":
            kill_client(self.client_address[1])
        if kind in ("refused", "killed"):
            self._hang_up()
            return
        if "100-continue" in self.headers.get("Expect", ""):
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if kind in _CODES:
            status, code = _CODES[kind]
            answer = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} by the proxy</Message></Error>".encode()
            self._answer(status, {"Content-Type": "application/xml"}, b"" if self.command == "HEAD" else answer)
            return
        if kind == "timeout":
            time.sleep(HANG_SECONDS)
            self._hang_up()
            return
        if kind == "garbled" and body:
            spoiled = bytearray(body)
            spoiled[len(spoiled) // 2] ^= 4
            body = bytes(spoiled)
        status, headers, answer = self._forward(found.upstream, body)
        if self.command == "GET":
            with found.lock:
                found.fetched[urlsplit(self.path).path] += len(answer)
        if kind == "killed after":
            kill_client(self.client_address[1])
        if kind in ("lost", "killed after"):
            self._hang_up()
        elif kind == "short" and "Range" in self.headers:
            self._answer(status, headers, answer[: len(answer) // 2])
        elif kind == "cut" and self.command == "GET":
            self._start(status, headers, len(answer))
            self.wfile.write(answer[: len(answer) // 2])
            self._hang_up()
        elif kind == "slow":
            self._start(status, headers, len(answer))
            for start in range(0, len(answer), max(1, len(answer) // 5)):
                self.wfile.write(answer[start : start + max(1, len(answer) // 5)])
                self.wfile.flush()
                time.sleep(0.05)
        else:
            self._answer(status, headers, answer)

    def _forward(self, upstream: S3Server, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(urlsplit(upstream.endpoint_url).netloc, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # Host as the client signed it
                if name.lower() not in ("connection", "transfer-encoding"):
                    connection.putheader(name, value)
            connection.endheaders()
            # A server that refuses before it reads the body says so in place of "100 Continue", and closes.
            if "100-continue" not in self.headers.get("Expect", "") or b" 100 " in connection.sock.recv(16, socket.MSG_PEEK):
                connection.send(body)
            response = connection.getresponse()
            answer = response.read()
            headers = dict(response.getheaders())
            if self.command == "HEAD":
                headers["X-Length"] = response.headers.get("Content-Length", "0")
            return response.status, headers, answer
        finally:
            connection.close()

    def _start(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "x-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", headers.get("X-Length", str(length)))
        self.end_headers()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._start(status, headers, len(body))
        self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(2)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client went away, or we did
            super().handle()
