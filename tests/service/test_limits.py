"""A client that sends too much, too slowly or nothing is ended, and no other one notices."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from surge_dagster.service import app as app_module
from tests.service.fake_spaces import FakeSpaces
from tests.service.running import Running, connected, only_connection, read_all, read_answer, running, wait_until

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
        body_seconds=0.3,
        header_seconds=0.3,
        idle_seconds=1,
    ) as service:
        yield service
        assert_answers(service.url)


def sized(body: bytes, declared: int | None = None) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body) if declared is None else declared, body)


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


@pytest.mark.parametrize("begun", [sized(GOOD[:-1], len(GOOD)), CHUNKED + chunk(GOOD)])
def test_body_that_does_not_come_is_given_up(service: Running, begun: bytes) -> None:
    with connected(service.url) as client:
        client.sendall(begun)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408") and error_of(answer)["code"] == "request_timeout"
    assert b"connection: close" in answer


def test_client_whose_body_was_too_large_goes_on_over_its_connection(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(sized(b" " * (20 * LIMIT)) + sized(GOOD))
        client.settimeout(60)
        statuses, received = list[bytes](), b""
        while len(statuses) < 2:
            received += client.recv(65_536)
            statuses = re.findall(rb"HTTP/1.1 (\d+)", received)
    assert statuses == [b"413", b"200"]


def test_upload_has_one_time_for_all_of_its_parts(tmp_path: Path) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=a\r\n"
    begun = (
        head + b'Content-Length: 1000\r\n\r\n--a\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    limits = {"body_seconds": 0.3, "max_body_bytes": LIMIT, "max_file_bytes": LIMIT}
    with running(FakeSpaces().as_served(), batches=tmp_path, **limits) as service, connected(service.url) as client:
        client.sendall(begun)
        while not select.select([client], [], [], 0.05)[0]:
            client.sendall(b"x")
        answer = read_all(client)
        assert_answers(service.url)
    assert answer.startswith(b"HTTP/1.1 408") and error_of(answer)["code"] == "request_timeout"


def large(name: str, **more: str) -> bytes:
    return sized(json.dumps({"model": "current", "input": [name, "x" * 8_000], **more}).encode())


def test_documents_of_clients_that_have_gone_are_dropped_before_they_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def noted(*arguments: Any) -> bytes:
        body = await read_body(*arguments)
        bodies.put(body)
        return body

    read_body, bodies = app_module.read_body, SimpleQueue[bytes]()
    monkeypatch.setattr(app_module, "read_body", noted)
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
            for _ in range(12):
                bodies.get(timeout=60)
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
    documents = large("document").replace(b"/v1/", b"/documents/v1/"), large("document", input_type="document")
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


def test_bodies_that_wait_are_bounded_and_keep_no_short_text_out() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.gate = threading.Event()
    with running(spaces.as_served(), max_waiting_bytes=10_000) as service, ExitStack() as clients:
        first = clients.enter_context(connected(service.url))
        two = [clients.enter_context(connected(service.url)) for _ in range(2)]
        for client in two:  # of whose bodies 4 kB each do not count
            client.sendall(large("waits"))
            lane.reached.get(timeout=60)
        first.sendall(large("one more"))
        answer = read_answer(first)
        assert (answer.status, answer.headers["retry-after-ms"]) == (429, "5000")
        assert_answers(service.url)
        lane.gate.set()
        assert [client.recv(12) for client in two] == [b"HTTP/1.1 200"] * 2
        first.sendall(large("again"))
        assert first.recv(12) == b"HTTP/1.1 200", "the bytes of those that were answered, or refused, wait no longer"


@pytest.mark.parametrize(("begun", "is_first"), [(b"", True), (HEAD, True), (HEAD, False)])
def test_headers_that_do_not_come_are_given_up(service: Running, begun: bytes, is_first: bool) -> None:
    with connected(service.url) as client:
        if not is_first:
            client.sendall(sized(GOOD))
            assert read_answer(client).status == 200
        client.sendall(begun)
        assert read_all(client) == b""


@pytest.mark.parametrize("before", [b"", sized(GOOD)])
@pytest.mark.parametrize("after", [b"", b"\r\nContent-Length: %d\r\n\r\n%b" % (len(GOOD), GOOD)])
def test_headers_over_the_limit_are_refused(service: Running, before: bytes, after: bytes) -> None:
    with connected(service.url) as client:
        client.sendall(before)
        if before:
            assert read_answer(client).status == 200
        client.sendall(HEAD + b"X-Filler: " + b"x" * 5_000 + after)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 400") and b"4,000 bytes" in answer


def test_headers_over_the_limit_are_refused_behind_another_request_too(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(sized(GOOD) + HEAD + b"X-Filler: " + b"x" * 5_000 + b"\r\n\r\n")
        assert read_all(client).endswith(b"or 64 of this connection wait before it.")


@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"0\r\n", b"a: b\r\n"), (b"0\r\na: ", b"bbbbbb"), (b"1;", b"cccccc"), (b"", b"1\r\n \r\n")],
    ids=["trailers", "a trailer", "a chunk's extension", "tiny chunks"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_endless_bytes_beside_a_body_are_ended_long_before_their_time(method: str, begin: bytes, more: bytes) -> None:
    head = CHUNKED if method == "POST" else b"GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        running(FakeSpaces().as_served(), header_seconds=60, body_seconds=60) as service,
        connected(service.url) as client,
    ):
        with pytest.raises(ConnectionError):
            client.sendall(head + begin)
            for _ in range(300):  # 18 MB, more than sockets hold
                client.sendall(more * 10_000)
        assert_answers(service.url)


def test_body_in_many_small_chunks_is_read() -> None:
    with running(FakeSpaces().as_served()) as service, connected(service.url) as client:
        client.sendall(CHUNKED + chunk(b" " * 64) * 6_000 + chunk(GOOD) + chunk(b""))
        assert client.recv(12) == b"HTTP/1.1 200"


def test_few_tiny_chunks_and_trailers_are_read(service: Running) -> None:
    with connected(service.url) as client:
        for _ in range(2):
            chunks = b"".join(chunk(GOOD[place : place + 1]) for place in range(len(GOOD)))
            client.sendall(CHUNKED + chunks + b"0\r\nContent-Type: text/plain\r\n\r\n")
            assert read_answer(client).status == 200


@pytest.mark.parametrize("size", [1, 64, 10_000], ids="{} bytes each".format)
def test_request_that_offers_another_protocol_is_answered_as_any_other(service: Running, size: int) -> None:
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


def test_connection_between_two_requests_is_kept_and_ended_when_the_next_one_does_not_come() -> None:
    with (
        running(FakeSpaces().as_served(), header_seconds=0.2) as service,
        connected(service.url) as client,
        connected(service.url) as begun,
    ):
        for each in (client, begun):
            each.sendall(sized(GOOD))
            assert read_answer(each).status == 200
        for _ in range(3):
            with connected(service.url) as silent:
                assert read_all(silent) == b"", "ended after the time for the headers of a request"
        begun.sendall(b"P")
        assert read_all(begun) == b""
        client.sendall(sized(GOOD))
        assert read_answer(client).status == 200


@pytest.mark.parametrize("path", [b"/nowhere", b"/v1/embeddings"])
def test_connection_whose_body_came_after_its_answer_is_ended(service: Running, path: bytes) -> None:
    with connected(service.url) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n" % path)
        assert read_answer(client).status in (404, 415)
        client.sendall(b"0123456789")
        assert read_all(client) == b""


def test_idle_connection_is_ended_after_its_time(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(sized(GOOD))
        assert read_answer(client).status == 200
        connection = only_connection(service)
        wait_until(lambda: connection.timeout_keep_alive_task is not None)
        assert connection.timeout_keep_alive == 1
        assert read_all(client) == b""


def test_time_for_the_headers_begins_with_their_first_byte() -> None:
    with running(FakeSpaces().as_served()) as service, connected(service.url) as client:
        client.sendall(sized(GOOD))
        assert read_answer(client).status == 200
        connection = only_connection(service)
        wait_until(lambda: connection.timeout_keep_alive_task is not None)
        before = connection._next_look.when()
        client.sendall(HEAD[:10])
        wait_until(lambda: connection.timeout_keep_alive_task is None)
        assert connection._next_look.when() > before


def test_client_that_leaves_a_small_answer_unread_is_ended() -> None:
    body = json.dumps({"model": "current", "input": ["a"] * 40}).encode()
    with running(FakeSpaces().as_served(), header_seconds=2) as service, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)  # before it connects, which tells the server
        host, _, port = service.url.removeprefix("http://").partition(":")
        client.connect((host, int(port)))
        client.sendall(sized(body)[:100])
        connections = service.server.server_state.connections
        connection = only_connection(service)
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2_048)
        client.sendall(sized(body)[100:])
        wait_until(lambda: connection.transport.get_write_buffer_size() > 0)
        assert not connection.flow.write_paused
        wait_until(lambda: not connections)


def test_requests_that_wait_behind_others_of_their_connection_are_bounded(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000)
        assert 0 < read_all(client).count(b"HTTP/1.1 ") < 100


def test_client_that_reads_no_answer_is_ended() -> None:
    body = json.dumps({"model": "current", "input": ["a"] * 300}).encode()
    with running(FakeSpaces().as_served(), header_seconds=0.1) as service, connected(service.url) as client:
        connections = service.server.server_state.connections
        wait_until(lambda: bool(connections))
        client.setblocking(False)
        requests = memoryview(sized(body) * 400)  # whose answers are 50 MB, more than sockets hold

        def send_until_it_is_ended() -> bool:
            nonlocal requests
            try:
                requests = requests[client.send(requests) :]
            except BlockingIOError:
                pass
            except ConnectionError:
                return True
            return not connections

        wait_until(send_until_it_is_ended)
        client.settimeout(60)
        assert read_all(client).count(b"HTTP/1.1 200") < 400
