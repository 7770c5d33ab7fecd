"""Clients that send too much are refused, and what they leave behind keeps nobody waiting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pydantic_core import to_json
from starlette.testclient import TestClient

from surge_dagster.service import embeddings
from surge_dagster.service.embeddings import MAX_TEXTS
from tests.service.fake_spaces import FakeSpaces
from tests.service.running import (
    GOOD,
    HEAD,
    Running,
    client_of,
    connected,
    read_all,
    read_answer,
    running,
    sized,
)
from tests.waiting import until

LIMIT = 2_000
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    limits = {"max_body_bytes": LIMIT, "max_header_bytes": 4_000, "idle_seconds": 1}
    with running(FakeSpaces().as_served(), **limits) as service:
        yield service


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_over_the_limit_is_refused(
    service: Running, is_chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = b" " * (2 * LIMIT) + GOOD
    with connected(service.url) as client:
        client.sendall(CHUNKED + chunk(body) + chunk(b"") if is_chunked else sized(body))
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"Content Too Large" in answer
    assert not caplog.records


def test_chunked_body_within_the_limit_is_read(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(CHUNKED + chunk(GOOD[:5]) + chunk(GOOD[5:]) + chunk(b""))
        assert client.recv(12) == b"HTTP/1.1 200"


def test_endless_body_is_ended(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(CHUNKED)
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(chunk(b" " * 65_536))


def test_headers_over_the_limit_are_refused(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(HEAD + b"X-Filler: " + b"x" * 50_000)
        assert read_all(client).startswith(b"HTTP/1.1 400")


def test_connections_over_the_limit_are_refused() -> None:
    with (
        running(FakeSpaces().as_served(), max_connections=2) as service,
        connected(service.url),
        connected(service.url) as client,
    ):
        client.sendall(sized(GOOD))
        assert read_answer(client).status == 503


def large(name: str, **more: str) -> bytes:
    return sized(json.dumps({"model": "current", "input": [name, "x" * 8_000], **more}).encode())


def test_requests_of_clients_that_have_gone_are_dropped_before_accepted() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.gate = threading.Event()
    with running(spaces.as_served()) as service, ExitStack() as clients:
        tasks = service.server.server_state.tasks
        for name in ("first", "second"):  # as many as are accepted at a time
            clients.enter_context(connected(service.url)).sendall(large(name))
        assert {lane.reached.get(timeout=60) for _ in range(2)} == {"first", "second"}
        with ExitStack() as gone:
            for _ in range(10):
                gone.enter_context(connected(service.url)).sendall(large("gone"))
            until(lambda: len(tasks) == 12)
        until(lambda: len(tasks) == 2)
        last = clients.enter_context(connected(service.url))
        last.sendall(large("last"))

        lane.gate.set()

        assert last.recv(12) == b"HTTP/1.1 200"
    assert sorted(texts[0] for texts in lane.accepted) == ["first", "last", "second"]


def test_request_whose_client_goes_while_it_is_accepted_is_never_encoded() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.gate = threading.Event()
    lane.holds = True
    with running(spaces.as_served()) as service:
        with connected(service.url) as client:
            client.sendall(large("gone"))
            lane.reached.get(timeout=60)
        until(lambda: not service.server.server_state.tasks)

        lane.gate.set()

        until(lambda: lane.accepted)
    assert lane.held.empty()


def test_answer_that_is_not_read_is_held_as_vectors_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = list[bytes]()

    def counted(embedding: list[float]) -> bytes:
        written.append(to_json(embedding))
        return written[-1]

    monkeypatch.setattr(embeddings, "to_json", counted)
    spaces = FakeSpaces(dimension=256)
    large = json.dumps({"model": "current", "input": ["a"] * MAX_TEXTS}).encode()  # 10 MB of JSON
    with running(spaces.as_served(), max_answer_bytes=1) as service:
        with connected(service.url) as slow:
            slow.sendall(sized(large))
            until(lambda: written)
            assert status_of(service) == 429
            assert len(written) < MAX_TEXTS

        until(lambda: status_of(service) == 200)


def status_of(service: Running) -> int:
    """Return the status of the answer to a small request."""
    with connected(service.url) as client:
        client.sendall(sized(GOOD))
        return read_answer(client).status


def test_clock_of_a_request_starts_when_the_kernel_has_it() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.gate = threading.Event()
    with running(spaces.as_served()) as service, ExitStack() as clients:
        first, second = (clients.enter_context(connected(service.url)) for _ in range(2))
        two_texts = json.dumps({"model": "current", "input": ["a", "b"]}).encode()
        first.sendall(sized(two_texts))
        lane.reached.get(timeout=60)  # the event loop waits at the gate

        second.sendall(sized(GOOD))
        threading.Event().wait(0.1)
        opened_at = time.monotonic()
        lane.gate.set()

        for client in (first, second):
            assert client.recv(12) == b"HTTP/1.1 200"
        assert lane.accepted == [["a", "b"], ["red"]]
        assert lane.arrived_at < opened_at


@pytest.mark.parametrize(
    ("path", "waited", "status"),
    [
        ("/v1/embeddings", 30.0, 429),  # of the promised minute, three times
        ("/v1/embeddings", 0.0, 400),
        ("/documents/v1/embeddings", 30.0, 400),
    ],
)
def test_query_that_is_late_already_is_refused_unread(
    path: str, waited: float, status: int
) -> None:
    client = client_of(FakeSpaces())
    arrived_at = time.monotonic() - waited
    app = client.app

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"arrived_at": arrived_at}}, receive, send)

    client = TestClient(late, "http://localhost")
    assert client.post(path, content=b"no JSON").status_code == status


def test_large_queries_do_not_wait_for_documents_that_are_accepted() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.documents
    lane.gate = threading.Event()
    with running(spaces.as_served()) as service, ExitStack() as clients:
        waiting = [clients.enter_context(connected(service.url)) for _ in range(3)]
        for client in waiting:
            client.sendall(large("document", input_type="document"))
        assert lane.reached.get(timeout=60) == "document"

        query = clients.enter_context(connected(service.url))
        query.sendall(large("query"))

        assert query.recv(12) == b"HTTP/1.1 200"
        lane.gate.set()
        for client in waiting:
            assert client.recv(12) == b"HTTP/1.1 200"
