"""A small real HTTP server that speaks as much of OpenAI's completions API as regeneration asks of vLLM's server, and fails as told.

Its answers are a function of the prompt, so that whoever asks, in whatever order and however often, gets the same.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["TokenServer", dict[str, Any]], Any]


def answer_to(prompt: Sequence[int], stop: int, limit: int) -> tuple[list[int], str]:
    """(token ids, finish reason): up to 40 tokens that depend on the prompt alone."""
    seed = sum((place + 1) * token for place, token in enumerate(prompt))
    ids = [(seed * (place + 3)) % 97 + 100 for place in range(seed % 40)] + [stop]
    return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")


class TokenServer(ThreadingHTTPServer):
    """Serves one model.

    Attributes:
        fault: called with each completion's body; None goes on, (status, body[, headers]) is answered, "hang up" cuts the connection.
        asked: how often each prompt was asked.
        most: the most requests there were at a time.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, stop: int, port: int = 0, fault: Fault | None = None, **model: Any) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.stop, self.fault = stop, fault
        self.model = {"id": "tiny", "object": "model", "max_model_len": 256, **model}
        self.key: str | None = None
        self.delay = 0.0
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TokenServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._admitted():
            self._reply(*((200, {"data": [self.server.model]}) if self.path == "/v1/models" else (404, {"error": {"message": "no"}})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._admitted():
            return
        server, prompt = self.server, body["prompt"]
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
            server.asked[tuple(prompt)] += 1
            server.bodies.append(body)
        try:
            time.sleep(server.delay)
            told = server.fault(server, body) if server.fault else None
            if told == "hang up":
                self.close_connection = True
                self.connection.close()
                return
            if told is None:
                ids, reason = answer_to(prompt, server.stop, body["max_tokens"])
                choice = {"index": 0, "text": "...", "finish_reason": reason}
                if body.get("return_token_ids"):
                    choice |= {"token_ids": ids, "prompt_token_ids": prompt}
                told = 200, {"choices": [choice]}
            status, reply, *headers = told
            self._reply(status, reply, **(headers[0] if headers else {}))
        finally:
            with server.lock:
                server.now -= 1

    def _admitted(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._reply(401, {"error": {"message": "who are you?"}})
            return False
        return True

    def _reply(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(server: TokenServer) -> Iterator[TokenServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
