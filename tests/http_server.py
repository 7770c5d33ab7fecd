"""HTTP servers on 127.0.0.1 for tests whose clients need a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str  # with its query
    headers: Message[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The body as JSON; empty without a body."""
        return json.loads(self.body or b"{}")


@dataclass(frozen=True, slots=True)
class Answer:
    document: Any  # is sent as JSON
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def json_server(answer: Callable[[Request], Answer]) -> Iterator[str]:
    """Yield the URL of a server that answers each request with a document, in a thread of its
    own."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answered = answer(Request(self.command, self.path, self.headers, body))
            content = json.dumps(answered.document).encode()
            self.send(answered.status, content, {**answered.headers, **_JSON})

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do

    with serving(Handler) as url:
        yield url


_JSON = {"Content-Type": "application/json"}


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing."""

    def send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer; its content only if the client did not only ask for the headers."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.write(content)

    def write(self, content: bytes) -> None:
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the URL of a server with this handler of requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
