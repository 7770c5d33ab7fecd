"""What the server binds, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import selectors
import signal
import socket
import stat
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.connections import CLIENTS_PER_TURN, ReadsInTurns
from surge_dagster.service.server import ServiceServer, bound_socket, run_service
from surge_dagster.service.settings import ServiceSettings
from tests.service.fake_spaces import FakeSpaces
from tests.service.running import connected, only_connection, read_all, running

BODY = b'{"model":"current","input":"red"}'
REQUEST = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("0" * 64)
    return path


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_served_only_with_keys(host: str, keys: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"--api-keys FILE, or listen on 127\.0\.0\.1 or a Unix socket")
    with refused, bound_socket(ServiceSettings(host=host, port=0)):
        pass
    with bound_socket(ServiceSettings(host=host, port=0, api_keys=keys)) as listener:
        assert listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9"])
def test_loopback_needs_no_keys(host: str) -> None:
    with bound_socket(ServiceSettings(host=host, port=0)) as listener:
        assert listener.getsockname()[0].startswith(("127.", "::1"))


def test_address_in_use_or_unknown_is_refused_before_a_model_is_loaded() -> None:
    spaces, said = FakeSpaces(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*Address already in use"):
            run_service(spaces.as_served(), ServiceSettings(port=port), said.append)
    with pytest.raises(ConfigError, match="no-such-host"):
        run_service(spaces.as_served(), ServiceSettings(host="no-such-host.invalid"), said.append)
    assert (spaces.calls, said) == ([], [])


def test_unix_socket_is_of_this_user_and_replaces_one_that_nobody_listens_on(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    with bound_socket(ServiceSettings(uds=path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="Address already in use"), bound_socket(ServiceSettings(uds=path)):
            pass
    with bound_socket(ServiceSettings(uds=path, api_keys=keys)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert not path.exists()
    path.write_text("a file of somebody")
    with pytest.raises(ConfigError, match="Address already in use"), bound_socket(ServiceSettings(uds=path)):
        pass
    assert path.read_text() == "a file of somebody"


def test_service_says_what_it_serves_and_answers_on_a_unix_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = SimpleQueue[ServiceServer]()
    spaces, said, path = FakeSpaces(), SimpleQueue[str](), tmp_path / "socket"
    chosen = ServiceSettings(uds=path)
    monkeypatch.setattr("surge_dagster.service.server.ServiceServer.startup", noted_startup(servers))
    frozen = list[list[str]]()
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(list(spaces.calls)))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    thread = threading.Thread(target=run_service, args=(spaces.as_served(), chosen, said.put))
    thread.start()
    assert said.get(timeout=60) == f"{spaces.only.space.name} (current): 16 dimensions, queries within 25 ms"
    assert said.get(timeout=60) == f"listening on the Unix socket {path} (queries: /v1, documents: /documents/v1)"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(REQUEST)
        assert client.recv(12) == b"HTTP/1.1 200"
    servers.get(timeout=60).handle_exit(signal.SIGTERM, None)
    thread.join()
    assert said.get(timeout=60) == "stopped"
    assert spaces.calls == ["start", "close"] and frozen == [["start"]]
    assert os.environ.pop("TOKENIZERS_PARALLELISM") == "false"


def test_service_may_open_as_many_descriptors_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        with pytest.raises(ConfigError):
            run_service(FakeSpaces().as_served(), ServiceSettings(host="no-such-host.invalid"), print)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def noted_startup(servers: SimpleQueue[ServiceServer]) -> object:
    startup = ServiceServer.startup

    async def noted(self: ServiceServer, sockets: list[socket.socket] | None = None) -> None:
        servers.put(self)
        await startup(self, sockets)

    return noted


def test_what_was_accepted_is_answered_after_sigterm_and_nothing_else(tmp_path: Path) -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.holds = True
    with running(spaces.as_served()) as service:
        with connected(service.url) as idle, connected(service.url) as client:
            client.sendall(REQUEST)
            future = lane.held.get(timeout=60)
            service.server.handle_exit(signal.SIGTERM, None)
            assert read_all(idle) == b"", "closed, as is the listening socket before it"
            with pytest.raises(ConnectionError), connected(service.url):
                pass
            future.set_result(lane.encoded(["red"]))
            head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert re.match(rb"HTTP/1.1 200 OK\r\n", head) and b"connection: close" in head
        assert len(json.loads(body)["data"]) == 1


def test_what_waits_when_the_drain_ends_is_told_to_come_back() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.holds = True
    with running(spaces.as_served(), drain_seconds=3.2) as service, connected(service.url) as client:
        client.sendall(REQUEST)
        future = lane.held.get(timeout=60)
        service.server.handle_exit(signal.SIGTERM, None)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after-ms: " in head
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert future.cancelled()


def test_what_is_ready_waits_for_few_clients_and_each_client_has_its_turn() -> None:
    """Also beside clients who send without end."""
    clients, reads, reads_before_the_answer = 5 * CLIENTS_PER_TURN, Counter[int](), list[int]()
    with ExitStack() as held:
        loop = asyncio.SelectorEventLoop(ReadsInTurns())
        held.callback(loop.close)

        def read(number: int) -> None:
            reads[number] += 1
            if reads.total() == 1:
                step(4)
            if len(reads) == clients:
                loop.stop()

        def step(more: int) -> None:
            if more:
                loop.call_soon(step, more - 1)
            else:
                reads_before_the_answer.append(reads.total())

        for number in range(clients):
            one, other = socket.socketpair()
            held.enter_context(one)
            held.enter_context(other)
            other.send(b"never read, so it stays ready")
            loop.add_reader(one, read, number)
        loop.run_forever()
    assert reads_before_the_answer[0] <= 5 * CLIENTS_PER_TURN - 1
    assert max(reads.values()) - min(reads.values()) <= 1


def test_turns_of_clients_say_whether_they_can_be_read_and_written() -> None:
    loop = asyncio.SelectorEventLoop(selector := ReadsInTurns())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert selector.select(0) == []
        selector.register(ours, selectors.EVENT_READ | selectors.EVENT_WRITE, "both")
        [(key, events)] = selector.select()
        assert (key.data, events) == ("both", selectors.EVENT_WRITE)
        theirs.close()
        assert selector.select()[0][1] == selectors.EVENT_READ | selectors.EVENT_WRITE
        selector.unregister(ours)
    loop.close()
    assert loop.is_closed()


def test_service_reads_from_few_clients_in_a_turn_and_sends_small_answers_without_delay() -> None:
    assert CLIENTS_PER_TURN <= 8
    with running(FakeSpaces().as_served()) as service, connected(service.url) as client:
        client.sendall(REQUEST)
        assert client.recv(12) == b"HTTP/1.1 200"
        connection = only_connection(service)
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert isinstance(connection.loop._selector, ReadsInTurns)
