"""A client that sends too much, too slowly or nothing is ended, and no other one notices."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.service.fake_spaces import FakeSpaces
from tests.service.running import Running, connected, read_all, running, wait_until

LIMIT = 2_000
GOOD = b'{"model":"current","input":"red"}'
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(
        FakeSpaces().as_served(), max_body_bytes=LIMIT, max_header_bytes=4_000, body_seconds=0.3, header_seconds=0.3
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
    """The error in an answer after which the connection was closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return json.loads(body)["error"]


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


@pytest.mark.parametrize(("begun", "is_first"), [(b"", True), (HEAD, True), (HEAD, False)])
def test_headers_that_do_not_come_are_given_up(service: Running, begun: bytes, is_first: bool) -> None:
    with connected(service.url) as client:
        if not is_first:
            client.sendall(sized(GOOD))
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")
        client.sendall(begun)
        assert read_all(client) == b""


def test_headers_over_the_limit_are_refused(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(HEAD + b"X-Filler: " + b"x" * 5_000)
        assert read_all(client).startswith(b"HTTP/1.1 400")


def test_compressed_body_is_refused_before_it_is_read(service: Running) -> None:
    with connected(service.url) as client:
        client.sendall(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1000\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 415")


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
