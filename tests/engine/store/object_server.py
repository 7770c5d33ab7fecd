"""A real object store on 127.0.0.1, moto's, behind a proxy that breaks requests on purpose.

The real clients talk to the proxy over sockets. The proxy passes a request on, answers with an
error, cuts the connection before or after the store has done its work, passes a part of an answer
on, or lets the client wait until its timeout. It also adds what moto leaves out: GCS's generations,
and the refusal of a body that is too short and of an upload that is completed twice.

Usage, for a process of its own with an empty bucket:
  python -m tests.engine.store.object_server ADDRESS PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import urllib3
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from google.auth.credentials import Credentials
from yarl import URL

from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store

BUCKET = "vectors"
Action = Literal["status", "reset_before", "reset_after", "truncate_up", "truncate_down", "stall"]
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "upgrade",
    "proxy-connection",
    "content-length",
}
_AUTHORIZED = {"Authorization": "Bearer test"}  # moto accepts any token
_MAX_IN_A_ROW = 2  # obstore tries three times
SECRETS = (
    "AKIA-secret-of-the-test",
    "secret-key-of-the-test",
    "secret-session-of-the-test",
    "secret-token-of-the-test",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """How the proxy breaks a request; it answers with `status` and `code` if the action is
    "status".

    A request without a body cannot be truncated on its way up: its connection is cut.
    """

    action: Action
    status: int = 503
    code: str = "SlowDown"


Plan = Callable[[str, str], Fault | None]


def on(method: str, path: str, *faults: Fault | None) -> Plan:
    """These faults, or none, for the first requests of a method whose path and query match; then
    none."""
    waiting = list(faults)

    def plan(called: str, target: str) -> Fault | None:
        return waiting.pop(0) if waiting and called == method and re.search(path, target) else None

    return plan


def always(fault: Fault, method: str | None = None, path: str = "") -> Plan:
    """The same fault for every request, or every one of a method and path."""
    return lambda called, target: (
        fault if method in (None, called) and re.search(path, target) else None
    )


class RandomFaults:
    """Breaks a share of the requests of every kind; only the request and the seed decide how.

    What obstore does not repeat is left out: listings that are cut off, truncated parts, and lost
    answers to a POST that begins an upload or deletes.

    Args:
        rate: share of the requests.
        stalls: the largest number of stalls, because each lasts as long as the client's timeout.
    """

    def __init__(self, rate: float, seed: int, stalls: int = 3) -> None:
        self._rate = rate
        self._seed = seed
        self._stalls = stalls
        self._seen: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()

    def __call__(self, method: str, target: str) -> Fault | None:
        request = f"{method} {re.sub('uploadId=[^&]*', '', target)}"
        self._seen[request] += 1
        chance = random.Random(f"{self._seed} {request} {self._seen[request]}")
        if chance.random() >= self._rate or self._in_a_row[request] >= _MAX_IN_A_ROW:
            self._in_a_row[request] = 0
            return None
        self._in_a_row[request] += 1
        faults = [Fault("status"), Fault("status", 429), Fault("status", 500)]
        is_repeated = method != "POST" or "uploadId" in target
        if is_repeated:
            faults += [Fault("reset_before"), Fault("reset_after")]
        if method == "PUT" and "partNumber" not in target:
            faults.append(Fault("truncate_up"))
        if method == "GET" and "list-type" not in target:
            faults.append(Fault("truncate_down"))
        if is_repeated and self._stalls:
            faults.append(Fault("stall"))
        chosen = chance.choice(faults)
        if chosen.action == "stall":
            self._stalls -= 1
        return chosen


class StaticToken(Credentials):
    """Google credentials with a token that needs no renewal."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token

    def refresh(self, request: object) -> None:
        pass


def storage_options(url: str) -> StorageOptions:
    """Return the credentials of a server for every kind of store."""
    return StorageOptions(
        endpoint=url,
        access_key_id=SECRETS[0],
        secret_access_key=SECRETS[1],
        session_token=SECRETS[2],
        credentials=lambda: StaticToken(SECRETS[3]),
    )


def open_bucket(
    server: ObjectServer, scheme: str = "s3", path: str = "out", **limits: Any
) -> ObjectStore:
    """A store with short timeouts and small parts, which hardly waits between attempts.

    Args:
        limits: changes of the client's limits.
    """
    given: dict[str, Any] = {
        "timeout_seconds": 5.0,
        "part_bytes": 16 * 1024,
        "first_backoff_seconds": 0.001,
    }
    return open_object_store(
        f"{scheme}://{BUCKET}/{path}",
        storage_options(server.url),
        limits=ClientLimits(**(given | limits)),
    )


class ObjectServer:
    """Moto and the proxy in front of it, each in a thread.

    Attributes:
        plan: decides how each request is broken; None lets all pass.
        injected: number of faults, by action.
        log: method, target and action of every request.
        before: called with the method and target of each request before it is handled.
        under_way: requests that are being handled, also those whose clients have disconnected.
    """

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        self._address = address
        self._port = port
        self.plan: Plan | None = None
        self.injected: Counter[str] = Counter()
        self.log: list[tuple[str, str, str]] = []
        self.before: Callable[[str, str], None] | None = None
        self.under_way = 0
        # Importing moto takes seconds, and few of the processes that collect tests need a server.
        import moto.s3.models
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        # Small parts make small tests.
        moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1  # pyright: ignore[reportPrivateImportUsage]
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="object-server", daemon=True)
        self._ready = threading.Event()
        self._locks: dict[str, asyncio.Lock] = {}
        self._generations: dict[str, str] = {}  # by etag
        self._etags: dict[str, str] = {}  # by generation
        self._completed: set[str] = set()  # targets of completed uploads
        self._numbers = itertools.count(1_700_000_000_000_001)
        self._direct = urllib3.PoolManager(headers=_AUTHORIZED)

    def __enter__(self) -> ObjectServer:
        # a line per request hides the output of a failed test
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self.moto_url = f"http://{host}:{port}"
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._moto.stop()

    def reset(self) -> None:
        """Empty the bucket and stop breaking requests, after requests of disconnected clients have
        ended."""
        self.plan = None
        self.before = None
        self.settle()
        self.injected.clear()
        self.log.clear()
        self._direct.request("POST", f"{self.moto_url}/moto-api/reset")
        self._direct.request("PUT", f"{self.moto_url}/{BUCKET}")

    def settle(self) -> None:
        """Wait until no request is being handled: the store may get one long after its client has
        disconnected."""
        deadline = time.monotonic() + 60
        while self.under_way:
            assert time.monotonic() < deadline, f"{self.under_way} requests are still under way"
            time.sleep(0.01)

    @property
    def options(self) -> StorageOptions:
        return storage_options(self.url)

    def objects(self) -> dict[str, str]:
        """Etag by key, listed past the proxy."""
        answer = self._direct.request(
            "GET", f"{self.moto_url}/{BUCKET}?max-keys=100000"
        ).data.decode()
        return dict(re.findall(r"<Key>([^<]*)</Key>.*?<ETag>([^<]*)</ETag>", answer))

    def content(self, key: str) -> bytes:
        """An object's bytes, read past the proxy.

        Raises:
            FileNotFoundError: there is none.
        """
        answer = self._direct.request("GET", f"{self.moto_url}/{BUCKET}/{key.replace('%', '%25')}")
        if answer.status == 404:
            raise FileNotFoundError(key)
        assert answer.status == 200, (key, answer.status)
        return answer.data

    def put(self, key: str, content: bytes) -> None:
        """Store an object, past the proxy."""
        answer = self._direct.request("PUT", f"{self.moto_url}/{BUCKET}/{quote(key)}", body=content)
        assert answer.status == 200, (key, answer.status)

    def delete(self, key: str) -> None:
        """Remove an object, past the proxy."""
        self._direct.request("DELETE", f"{self.moto_url}/{BUCKET}/{quote(key)}")

    def unfinished(self) -> list[str]:
        """Keys of multipart uploads that are neither completed nor aborted."""
        return re.findall(
            r"<Key>([^<]*)</Key>",
            self._direct.request("GET", f"{self.moto_url}/{BUCKET}?uploads").data.decode(),
        )

    def requests(self, method: str, part: str = "") -> list[str]:
        """Targets of all requests of a method that have this part."""
        targets: list[str] = []
        for called, target, _ in self.log:
            if called == method and part in target:
                targets.append(target)
        return targets

    def methods(self) -> list[str]:
        """Methods of all requests."""
        return [method for method, _, _ in self.log]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, self._address, self._port)
        await site.start()
        self.url = f"http://{self._address}:{runner.addresses[0][1]}"
        async with ClientSession(
            connector=TCPConnector(limit=32),
            auto_decompress=False,
            timeout=ClientTimeout(total=120),
        ) as self._session:
            self._ready.set()
            await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        try:
            return await self._respond(request)
        finally:
            self.under_way -= 1

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        target = str(request.rel_url)
        if self.before is not None:
            await asyncio.to_thread(self.before, request.method, target)
        fault = self.plan(request.method, target) if self.plan else None
        self.log.append((request.method, target, fault.action if fault else "pass"))
        if fault is None:
            return _answer(*await self._pass_on(request, await request.read()))
        self.injected[fault.action] += 1
        if fault.action == "status":
            await request.read()
            body = f"<Error><Code>{fault.code}</Code><Message>x</Message></Error>".encode()
            return web.Response(status=fault.status, body=body)
        if fault.action == "truncate_up":
            body = await request.read()
            if body:  # a store refuses a body that is shorter than its Content-Length
                return web.Response(status=400, body=b"<Error><Code>IncompleteBody</Code></Error>")
        elif fault.action == "stall":
            body = await request.read()
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.02)
            await self._pass_on(request, body)  # the store gets it after the client has given up
        elif fault.action in ("reset_after", "truncate_down"):
            status, headers, body = await self._pass_on(request, await request.read())
            if fault.action == "truncate_down":
                out = web.StreamResponse(
                    status=status, headers={**headers, "Content-Length": str(len(body))}
                )
                await out.prepare(request)
                await out.write(body[: len(body) // 2])
        _cut(request)
        return web.Response(status=500)

    async def _pass_on(
        self, request: web.Request, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        headers = _passed_on(request.headers)
        generation = headers.get("x-goog-if-generation-match")
        if generation == "0":
            headers["If-None-Match"] = "*"
        elif generation is not None:
            headers["If-Match"] = self._etags.get(generation, '"none"')
        lock = self._locks.setdefault(request.path, asyncio.Lock())
        async with lock if request.method in ("PUT", "POST") else contextlib.nullcontext():
            target = str(request.rel_url)
            if target in self._completed:
                return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
            status, found, content = await self._ask(
                request.method, request.raw_path, headers, body
            )
            if request.method == "POST" and "uploadId" in target and status == 200:
                self._completed.add(target)
        return self._translated(request, status, found, content)

    async def _ask(
        self, method: str, raw_path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        path = re.sub("^http://[^/]*", "", raw_path)  # a client sends a whole URL to its HTTP proxy
        url = URL(self.moto_url + path, encoded=True)
        async with self._session.request(
            method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            found = dict(answer.headers)
            if "Etag" in found:
                found["ETag"] = found.pop("Etag")
            return answer.status, found, await answer.read()

    def _translated(
        self, request: web.Request, status: int, found: dict[str, str], content: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        length = found.get("Content-Length")
        headers = _passed_on(found)
        if request.method == "HEAD" and length:
            headers["Content-Length"] = length
        if etag := headers.get("ETag"):
            generation = self._generations.setdefault(etag, str(next(self._numbers)))
            self._etags[generation] = etag
            headers["x-goog-generation"] = generation
        return status, headers, content


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    kept = dict(headers)
    for name in headers:
        if name.lower() in _HOP_BY_HOP:
            del kept[name]
    return kept


def _answer(status: int, headers: dict[str, str], content: bytes) -> web.Response:
    return web.Response(status=status, headers=headers, body=content or None)


def _cut(request: web.Request) -> None:
    """End a connection with a reset, as a machine that crashes does."""
    transport: Any = request.transport
    if transport is not None:
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        transport.abort()


if __name__ == "__main__":
    with ObjectServer(sys.argv[1], int(sys.argv[2])) as served:
        served.reset()
        print(served.url, flush=True)
        threading.Event().wait()
