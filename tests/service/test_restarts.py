"""Of two services each one may end, in order or not: OpenAI's clients with their default retries
lose no request."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import ge
from pathlib import Path
from typing import Any

import openai
import pytest

from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from tests.service.lanes import until
from tests.service.load import SPEC
from tests.service.service_process import ServiceProcess, free_port, service_process
from tests.service.test_chaos import embed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

NGINX = Path(__file__).parents[2] / "deploy" / "nginx" / "nginx.conf"
CLIENTS, RATE, ROUNDS = 10, 200, 2  # the rate is of all clients, in requests per second
# One that a busy machine keeps, too: retries are needed for services that end.
PROMISE = ("--promise-ms", "10000")


class Clients:
    """Each has a key of its own, as the proxy tells clients apart."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answered, self.failed = [0] * CLIENTS, list[Exception]()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)
        ]

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
        """Until each client has got as many answers as it asks for in a second."""
        enough = [answered + RATE // CLIENTS for answered in self.answered]
        until(lambda: self.failed or all(map(ge, self.answered, enough)))

    def _ask(self, number: int) -> None:
        due = time.monotonic()
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=f"key-{number}") as client:
            while not self._ended.wait(due - time.monotonic()):
                due = max(due + CLIENTS / RATE, time.monotonic())
                text = f"query {number} {self.answered[number]}"
                try:
                    [found] = client.embeddings.create(model="current", input=text).data
                    assert (
                        found.embedding
                        == hash_vectors([f"{SPEC.query_prompt}{text}"], 16)[0].tolist()
                    )
                    self.answered[number] += 1
                except Exception as error:
                    self.failed.append(error)


@contextmanager
def name_of_both(services: list[ServiceProcess], folder: Path) -> Iterator[str]:
    """A name with both addresses, which clients try in this order."""
    resolve: Any = socket.getaddrinfo

    def resolve_name(host: Any, *rest: Any, **options: Any) -> list[Any]:
        if host != "surge.test":
            return resolve(host, *rest, **options)
        return [
            found
            for each in services
            for found in resolve(*each.address.split(":"), *rest[1:], **options)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve_name)
        yield "http://surge.test"


@contextmanager
def documented_proxy(services: list[ServiceProcess], folder: Path) -> Iterator[str]:
    """nginx before both services as deploy/nginx has it, but for TLS."""
    if (
        program := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    ) is None:
        pytest.skip("not installed: the Debian package nginx-light (apt-get install nginx-light)")
    site = NGINX.read_text()
    address = f"127.0.0.1:{free_port()}"
    changes = {
        f"10.0.0.{number}:8080": service.address for number, service in enumerate(services, 1)
    }
    for old, new in (changes | {"listen 443 ssl;": f"listen {address};"}).items():
        assert site.count(old) == 1
        site = site.replace(old, new)
    site = re.sub(r" *ssl_certificate.*\n", "", site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    process_settings = f"daemon off;\nuser root;\npid {folder}/pid;\nevents {{}}\n"
    config, log = folder / "nginx.conf", folder / "error.log"
    config.write_text(f"{process_settings}http {{\naccess_log off;\n{temporary}{site}}}\n")
    with (
        subprocess.Popen([program, "-c", str(config), "-e", str(log)]) as process,
        socket.socket() as client,
    ):
        try:
            host, _, port = address.partition(":")
            until(lambda: process.poll() is not None or client.connect_ex((host, int(port))) == 0)
            yield f"http://{address}"
        finally:
            process.terminate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("before", [name_of_both, documented_proxy])
def test_service_that_ends_costs_clients_of_two_no_request(
    before: Any, number: signal.Signals, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    embed(output)
    with (
        service_process(output, *PROMISE) as first,
        service_process(output, *PROMISE, host="127.0.0.2") as second,
        before([first, second], tmp_path) as url,
        Clients(url) as clients,
    ):
        for _ in range(ROUNDS):
            for service in (first, second):
                service.end(number)
                clients.until_answered()
                service.start()
                clients.until_answered()
    assert clients.failed == []
