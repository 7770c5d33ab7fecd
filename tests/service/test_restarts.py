"""Of two services each one may end, in order or not, and clients with their default retries lose no request."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from tests.service.lanes import until
from tests.service.load import SPEC
from tests.service.service_process import ServiceProcess, free_port, service_process
from tests.service.test_chaos import embedded
from tests.small_catalogs import numbered_rows

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
CLIENTS, RATE = 10, 200  # requests per second of all clients
ROUNDS = 2
# A promise that a busy machine keeps, too: the clients' retries are for services that end.
PROMISE = ("--promise-ms", "10000")


class Clients:
    """OpenAI's clients, each with a key of its own, as the proxy tells clients apart."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answered = [0] * CLIENTS
        self.failed = list[BaseException]()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        self.until_answered()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def until_answered(self) -> None:
        """Until so many requests of each client are answered as it sends in a second."""
        before = list(self.answered)
        until(
            lambda: (
                self.failed or all(now >= old + RATE // CLIENTS for now, old in zip(self.answered, before, strict=True))
            )
        )

    def _ask(self, number: int) -> None:
        due = time.monotonic()
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=f"key-{number}") as client:
            while not self._ended.wait(due - time.monotonic()):
                due = max(due + CLIENTS / RATE, time.monotonic())
                text = f"query {number} {self.answered[number]}"
                try:
                    [found] = client.embeddings.create(model="current", input=text).data
                    assert found.embedding == hash_vectors([f"{SPEC.query_prompt}{text}"], 16)[0].tolist()
                    self.answered[number] += 1
                except Exception as error:
                    self.failed.append(error)


@contextmanager
def two_services(tmp_path: Path, *hosts: str) -> Iterator[list[ServiceProcess]]:
    embedded(tmp_path / "out", {"first": numbered_rows("first", 10)})
    with contextlib.ExitStack() as running:
        yield [running.enter_context(service_process(tmp_path / "out", *PROMISE, host=host)) for host in hosts]


def test_request_at_sigterm_is_answered_by_the_service_or_by_another_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has the addresses of both, which clients try in this order."""
    resolve = socket.getaddrinfo
    with two_services(tmp_path, "127.0.0.1", "127.0.0.2") as services:

        def addresses(host: Any, port: Any, *rest: Any, **options: Any) -> list[Any]:
            if host != "surge.test":
                return resolve(host, port, *rest, **options)
            return [found for each in services for found in resolve(*each.address.split(":"), *rest, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        with Clients("http://surge.test") as clients:
            for _ in range(ROUNDS):
                for service in services:
                    assert service.end() == 0
                    clients.until_answered()
                    service.start()
                    clients.until_answered()
    print(sum(clients.answered))
    assert clients.failed == []


@contextmanager
def nginx(folder: Path, services: list[ServiceProcess]) -> Iterator[str]:
    """The documented proxy of these services, without TLS; its URL."""
    if (program := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")) is None:
        pytest.skip("not installed: the Debian package nginx-light (apt-get install nginx-light)")
    documented = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(documented) == 1
    address = f"127.0.0.1:{free_port()}"
    changes = [(f"10.0.0.{number}:8080", service.address) for number, service in enumerate(services, 1)]
    [site] = documented
    for old, new in (*changes, ("listen 443 ssl;", f"listen {address};")):
        assert site.count(old) == 1
        site = site.replace(old, new)
    site = re.sub(r" *ssl_certificate.*\n", "", site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nuser root;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log {folder}/access.log;\n{folders}{site}}}\n"
    )
    with subprocess.Popen([program, "-c", str(config), "-e", str(folder / "error.log")]) as process:
        try:
            until(lambda: process.poll() is not None or is_open(address))
            yield f"http://{address}"
        finally:
            process.send_signal(signal.SIGQUIT)


def is_open(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_service_that_ends_behind_the_documented_proxy_costs_no_request(tmp_path: Path, number: signal.Signals) -> None:
    with (
        two_services(tmp_path, "127.0.0.1", "127.0.0.1") as services,
        nginx(tmp_path, services) as url,
        Clients(url) as clients,
    ):
        for _ in range(ROUNDS):
            for service in services:
                if number == signal.SIGTERM:
                    assert service.end() == 0
                else:
                    service.kill(with_workers=True)
                clients.until_answered()
                service.start()
                clients.until_answered()
    print(sum(clients.answered), (tmp_path / "error.log").read_text()[-2000:])
    assert clients.failed == []
