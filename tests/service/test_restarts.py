"""Of two services each one may end, in order or not: OpenAI's clients with their default retries
lose no request."""

from __future__ import annotations

import hashlib
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import ge
from pathlib import Path
from typing import Any

import openai
import pytest

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from tests.service.load import SPEC
from tests.service.nginx import documented_proxy
from tests.service.service_process import service_process
from tests.service.test_chaos import embed
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

CLIENTS = 10
RATE = 200  # of all clients, in requests per second
ROUNDS = 2
# One that a busy machine keeps, too: retries are needed for services that end.
PROMISE = ("--promise-ms", "10000")


class Clients:
    """Each has a key of its own, as the proxy tells clients apart."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answered = [0] * CLIENTS
        self.failed = list[Exception]()
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
def name_of_both(addresses: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield a name with both addresses, which clients try in this order."""
    resolve: Any = socket.getaddrinfo

    def resolve_name(host: Any, *rest: Any, **options: Any) -> list[Any]:
        if host != "surge.test":
            return resolve(host, *rest, **options)
        found = list[Any]()
        for address in addresses:
            found += resolve(*address.split(":"), *rest[1:], **options)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve_name)
        yield "http://surge.test"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("before", [name_of_both, documented_proxy])
def test_service_that_ends_costs_clients_of_two_no_request(
    before: Any, number: signal.Signals, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    embed(output)
    keys = tmp_path / "keys"
    digests = (hashlib.sha256(f"key-{number}".encode()).hexdigest() for number in range(CLIENTS))
    keys.write_text("\n".join(digests))
    options = (*PROMISE, "--api-keys", str(keys))
    with (
        service_process(output, *options) as first,
        service_process(output, *options, host="127.0.0.2") as second,
        before([first.address, second.address], tmp_path) as url,
        Clients(url) as clients,
    ):
        for _ in range(ROUNDS):
            for service in (first, second):
                service.end(number)
                clients.until_answered()
                service.start()
                clients.until_answered()
    assert clients.failed == []
