"""What the server binds, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import uvicorn

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.server import (
    ServiceSettings,
    bound_socket,
    http_server,
    run_service,
    service_app,
)
from tests.service.fake_spaces import FakeSpaces
from tests.service.running import GOOD, connected, read_all, running, sized


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("0" * 64)
    return path


@contextmanager
def bound(**settings: Any) -> Iterator[socket.socket]:
    """Yield the bound socket of a service, on a free port."""
    chosen = ServiceSettings(port=0, **settings)
    app = service_app(FakeSpaces().as_served(), chosen)
    with bound_socket(chosen, http_server(app, chosen)) as listener:
        yield listener


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_served_only_with_keys(host: str, keys: Path) -> None:
    with pytest.raises(ConfigError, match="--api-keys FILE, or listen on 127"), bound(host=host):
        pass
    with bound(host=host, api_keys=keys) as listener:
        assert listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    with bound(host=host) as listener:
        assert listener.getsockname()[0].startswith(("127.", "::1"))


def test_address_in_use_or_unknown_is_refused_before_a_model_is_loaded() -> None:
    spaces = FakeSpaces()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for settings in (
            ServiceSettings(port=port),
            ServiceSettings(host="no-such-host.invalid"),
        ):
            with pytest.raises(ConfigError, match="cannot be bound"):
                run_service(spaces.as_served(), settings, print)
    assert spaces.calls == []


@pytest.mark.parametrize(("has_keys", "mode"), [(False, 0o600), (True, 0o666)])
def test_unix_socket_replaces_an_old_one_and_is_private_without_keys(
    tmp_path: Path, keys: Path, has_keys: bool, mode: int
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    with bound(uds=path, api_keys=keys if has_keys else None):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not path.exists()


def test_file_in_the_place_of_a_unix_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("a file of somebody")
    with pytest.raises(ConfigError, match="cannot be bound"), bound(uds=path):
        pass
    assert path.read_text() == "a file of somebody"


def test_service_says_what_it_serves_and_answers_on_a_unix_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = SimpleQueue[uvicorn.Server]()
    spaces = FakeSpaces()
    said = SimpleQueue[str]()
    path = tmp_path / "socket"
    chosen = ServiceSettings(uds=path)
    monkeypatch.setattr("uvicorn.Server.startup", noted_startup(servers))
    frozen = list[list[str]]()
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(list(spaces.calls)))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    thread = threading.Thread(target=run_service, args=(spaces.as_served(), chosen, said.put))
    thread.start()
    assert (
        said.get(timeout=60)
        == f"{spaces.only.space.name} (current): 16 dimensions, queries within 60,000 ms"
    )
    assert (
        said.get(timeout=60)
        == f"listening on the Unix socket {path} (queries: /v1, documents: /documents/v1)"
    )
    server = servers.get(timeout=60)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(sized(GOOD))
        assert client.recv(12) == b"HTTP/1.1 200"
    server.should_exit = True
    thread.join()
    assert said.get(timeout=60) == "stopped"
    assert spaces.calls == ["start", "close"]
    assert frozen == [["start"]]
    assert os.environ.pop("TOKENIZERS_PARALLELISM") == "false"


def noted_startup(servers: SimpleQueue[uvicorn.Server]) -> object:
    startup = uvicorn.Server.startup

    async def noted(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        await startup(self, sockets)
        servers.put(self)

    return noted


def test_what_was_accepted_is_answered_after_sigterm_and_nothing_else() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.holds = True
    with running(spaces.as_served()) as service:
        with connected(service.url) as idle, connected(service.url) as client:
            client.sendall(sized(GOOD))
            future = lane.held.get(timeout=60)
            service.server.should_exit = True
            assert read_all(idle) == b"", "closed, as is the listening socket before it"
            with pytest.raises(ConnectionError), connected(service.url):
                pass
            future.set_result(lane.encoded(["red"]))
            head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert re.match(rb"HTTP/1.1 200 OK\r\n", head)
        assert b"connection: close" in head
        assert len(json.loads(body)["data"]) == 1


def test_what_waits_when_the_drain_ends_is_told_to_come_back() -> None:
    spaces = FakeSpaces()
    lane = spaces.only.queries
    lane.holds = True
    with running(spaces.as_served(), drain_seconds=1) as service, connected(service.url) as client:
        client.sendall(sized(GOOD))
        future = lane.held.get(timeout=60)
        service.server.should_exit = True
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after-ms: " in head
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert future.cancelled()
