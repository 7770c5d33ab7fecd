"""Clients that send too much are refused, and what they leave behind keeps nobody waiting."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.service.fake_spaces import FakeSpaces
from tests.service.running import Running, connected, read_all, read_answer, running, wait_until

LIMIT = 2_000
GOOD = b'{"model":"current","input":"red"}'
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(
        FakeSpaces().as_served(),
        max_body_bytes=LIMIT,
        max_header_bytes=4_000,
        idle_seconds=1,
    ) as service:
        yield service
        assert_answers(service.url)


def sized(body: bytes, declared: int | None = None) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (
        len(body) if declared is None else declared,
        body,
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def assert_answers(url: str) -> None:
    with connected(url) as client:
        client.sendall(sized(GOOD))
        assert client.recv(12) == b"HTTP/1.1 200"


def error_of(answer: bytes) -> dict[str, str]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_over_the_limit_is_refused_in_words(service: Running, is_chunked: bool) -> None:
    body = b" " * (2 * LIMIT) + GOOD
    with connected(service.url) as client:
        client.sendall(CHUNKED + chunk(body) + chunk(b"") if is_chunked else sized(body))
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 413") and "2,000 bytes" in error_of(answer)["message"]


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
    assert_answers(service.url)


def large(name: str, **more: str) -> bytes:
    return sized(json.dumps({"model": "current", "input": [name, "x" * 8_000], **more}).encode())


def test_documents_of_clients_that_have_gone_are_dropped_before_accepted() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.gate = threading.Event()
    with running(spaces.as_served()) as service, ExitStack() as clients:
        for name in ("first", "second"):  # as many as are accepted at a time
            clients.enter_context(connected(service.url)).sendall(large(name))
        assert {lane.reached.get(timeout=60) for _ in range(2)} == {"first", "second"}
        with ExitStack() as gone:
            for _ in range(10):
                gone.enter_context(connected(service.url)).sendall(large("gone"))
            wait_until(lambda: len(service.server.server_state.tasks) == 12)
        wait_until(lambda: len(service.server.server_state.tasks) == 2)
        last = clients.enter_context(connected(service.url))
        last.sendall(large("last"))
        lane.gate.set()
        assert last.recv(12) == b"HTTP/1.1 200"
    assert sorted(texts[0] for texts in lane.accepted) == ["first", "last", "second"]


def test_documents_whose_client_goes_while_they_are_accepted_are_never_encoded() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.gate, lane.holds = threading.Event(), True
    with running(spaces.as_served()) as service:
        with connected(service.url) as client:
            client.sendall(large("gone"))
            lane.reached.get(timeout=60)
        wait_until(lambda: not service.server.server_state.tasks)
        lane.gate.set()
        wait_until(lambda: bool(lane.accepted))
    assert lane.held.empty()


def test_large_queries_do_not_wait_for_documents_that_are_accepted() -> None:
    spaces = FakeSpaces()
    spaces.only.documents.gate = threading.Event()
    documents = (
        large("document").replace(b"/v1/", b"/documents/v1/"),
        large("document", input_type="document"),
    )
    queries = large("query"), large("query", input_type="query").replace(b"/v1/", b"/documents/v1/")
    with running(spaces.as_served()) as service, ExitStack() as clients:
        waiting = [clients.enter_context(connected(service.url)) for _ in range(4)]
        for client, sent in zip(waiting, documents * 2, strict=True):
            client.sendall(sent)
        assert spaces.only.documents.reached.get(timeout=60) == "document"
        for sent in queries:
            client = clients.enter_context(connected(service.url))
            client.sendall(sent)
            assert client.recv(12) == b"HTTP/1.1 200"
        spaces.only.documents.gate.set()
        assert [client.recv(12) for client in waiting] == [b"HTTP/1.1 200"] * 4


def test_few_tiny_chunks_and_trailers_are_read(service: Running) -> None:
    with connected(service.url) as client:
        for _ in range(2):
            chunks = b"".join(chunk(GOOD[place : place + 1]) for place in range(len(GOOD)))
            client.sendall(CHUNKED + chunks + b"0\r\nContent-Type: text/plain\r\n\r\n")
            assert read_answer(client).status == 200


@pytest.mark.parametrize("size", [1, 64, 10_000], ids="{} bytes each".format)
def test_request_that_offers_another_protocol_is_answered_as_any_other(
    service: Running, size: int
) -> None:
    """As the client of the JDK does without TLS."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    offered = HEAD + offer + b"Content-Length: %d\r\n\r\n%b" % (len(GOOD), GOOD)
    chunked = HEAD + offer + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(GOOD) + chunk(b"")
    last = sized(GOOD).replace(b"Host: x", b"Host: x\r\nConnection: close")
    requests = offered + chunked + offered + last
    with connected(service.url) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(0, len(requests), size):
            client.sendall(requests[place : place + size])
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(client)) == [b"200"] * 4


def test_compressed_body_is_refused_before_it_is_read(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1000\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 415")


def test_headers_over_the_limit_are_refused(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(HEAD + b"X-Filler: " + b"x" * 50_000)
        assert read_all(client).startswith(b"HTTP/1.1 400")


def test_connections_over_the_limit_are_refused() -> None:
    limits = {"max_connections": 2}
    with (
        running(FakeSpaces().as_served(), **limits) as service,
        connected(service.url),
        connected(service.url) as client,
    ):
        client.sendall(sized(GOOD))
        assert read_answer(client).status == 503
