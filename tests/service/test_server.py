"""What the server binds, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import uvicorn

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.server import bound_socket, run_service
from surge_dagster.service.settings import ServiceSettings
from tests.service.fake_spaces import FakeSpaces
from tests.service.running import connected, read_all, running

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
    refused = pytest.raises(
        ConfigError, match=r"--api-keys FILE, or listen on 127\.0\.0\.1 or a Unix socket"
    )
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


def test_unix_socket_is_of_this_user_and_replaces_one_that_nobody_listens_on(
    tmp_path: Path, keys: Path
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    with bound_socket(ServiceSettings(uds=path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with (
            pytest.raises(ConfigError, match="Address already in use"),
            bound_socket(ServiceSettings(uds=path)),
        ):
            pass
    with bound_socket(ServiceSettings(uds=path, api_keys=keys)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert not path.exists()
    path.write_text("a file of somebody")
    with (
        pytest.raises(ConfigError, match="Address already in use"),
        bound_socket(ServiceSettings(uds=path)),
    ):
        pass
    assert path.read_text() == "a file of somebody"


def test_service_says_what_it_serves_and_answers_on_a_unix_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = SimpleQueue[uvicorn.Server]()
    spaces, said, path = FakeSpaces(), SimpleQueue[str](), tmp_path / "socket"
    chosen = ServiceSettings(uds=path)
    monkeypatch.setattr("uvicorn.Server.startup", noted_startup(servers))
    frozen = list[list[str]]()
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(list(spaces.calls)))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    thread = threading.Thread(target=run_service, args=(spaces.as_served(), chosen, said.put))
    thread.start()
    assert (
        said.get(timeout=60)
        == f"{spaces.only.space.name} (current): 16 dimensions, queries within 25 ms"
    )
    assert (
        said.get(timeout=60)
        == f"listening on the Unix socket {path} (queries: /v1, documents: /documents/v1)"
    )
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(REQUEST)
        assert client.recv(12) == b"HTTP/1.1 200"
    servers.get(timeout=60).should_exit = True
    thread.join()
    assert said.get(timeout=60) == "stopped"
    assert spaces.calls == ["start", "close"] and frozen == [["start"]]
    assert os.environ.pop("TOKENIZERS_PARALLELISM") == "false"


def noted_startup(servers: SimpleQueue[uvicorn.Server]) -> object:
    startup = uvicorn.Server.startup

    async def noted(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
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
            service.server.should_exit = True
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
    with running(spaces.as_served(), drain_seconds=1) as service, connected(service.url) as client:
        client.sendall(REQUEST)
        future = lane.held.get(timeout=60)
        service.server.should_exit = True
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after-ms: " in head
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert future.cancelled()
