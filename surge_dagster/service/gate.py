"""The gate that each request passes before its body is read: API keys and metrics."""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.embeddings import ROOTS
from surge_dagster.service.errors import Refusal, disk_full
from surge_dagster.service.spaces import ServedSpaces

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()
_PROBES = ("/healthz", "/readyz")
_QUERIES = f"{ROOTS[0]}/embeddings"
_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_LOCAL = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?", re.IGNORECASE)
_FOREIGN = (
    403,
    "foreign_request",
    "Without API keys the service answers only programs of this machine: the header Host names "
    "another one, or a page of another site has sent the request. Use http://127.0.0.1 or "
    "http://localhost, or start the service with --api-keys FILE.",
)
_UNAUTHORIZED = (
    401,
    "invalid_api_key",
    "The request has no valid API key. Send the header Authorization: Bearer KEY.",
)
_CHARSET = (415, "unsupported_charset", "The form has another charset than UTF-8. Send UTF-8.")
_ROUNDS = 3  # of the event loop: a result, the task that waits for it, its answer
_BODY_UNREAD = (401, 403, 413, 415)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ENDPOINT = ["endpoint"]
_LANE = ["space", "side"]
# Kind, name, description, and the attribute of a lane.
_OF_LANES = (
    (GaugeMetricFamily, "surge_waiting_tokens", "Tokens that wait", "waiting_tokens"),
    (GaugeMetricFamily, "surge_waiting_texts", "Texts that wait", "waiting_texts"),
    (CounterMetricFamily, "surge_texts_total", "Texts that were encoded", "texts"),
    (CounterMetricFamily, "surge_tokens_total", "Tokens that were encoded", "tokens"),
    (CounterMetricFamily, "surge_passes_total", "Passes through the model", "passes"),
)


class ApiKeys:
    """The keys of a file, which is read again when it has changed; a change that makes it wrong is
    logged and ignored.

    Each line has the SHA-256 of a key in hex, so the file gives no key away. What follows it, and
    all after `#`, is a comment. If all lines are taken out of the file later, no key is accepted.

    Raises:
        ConfigError: the file cannot be read, or has no digest or a wrong line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._version()
        self._digests = self._read()
        if not self._digests:
            raise self._wrong("It has no line")

    def accept(self, digest: str) -> bool:
        """Whether this is the SHA-256 of one of the keys; that of the empty one, which an unset
        `$KEY` gives, never is."""
        version = self._version()
        if version != self._seen:
            self._seen = version
            try:
                self._digests = self._read()
            except ConfigError as error:
                log.warning("%s The keys stay as they were.", error)
        return digest in self._digests and digest != _EMPTY_DIGEST

    def _version(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _read(self) -> set[str]:
        try:
            lines = self._path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API keys in {self._path} cannot be read: {error}.") from None
        digests = set[str]()
        for number, line in enumerate(lines, 1):
            words = line.split("#")[0].lower().split()
            if not words:
                continue
            if not _DIGEST.fullmatch(words[0]):
                raise self._wrong(f"Line {number} is not a SHA-256 in hex")
            digests.add(words[0])
        return digests

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: {problem}. Each line has the SHA-256 of an API key in hex; make one "
            'with: printf %s "$KEY" | sha256sum'
        )


class Metrics(Collector):
    """Counts requests, and reads the lanes when it is asked. Has a registry of its own."""

    def __init__(self, spaces: ServedSpaces) -> None:
        self._spaces = spaces
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "surge_requests_total",
            "Requests that were answered",
            [*_ENDPOINT, "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "surge_request_seconds",
            "Time of a request",
            _ENDPOINT,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._broken = Counter(
            "surge_promise_broken_total",
            "Answers that were sent too late",
            _LANE,
            registry=self._registry,
        )
        self._registry.register(self)

    def count(self, scope: Any, status: int, seconds: float) -> None:
        """Count an answer.

        Args:
            scope: of ASGI; its state has the request's arrival on the monotonic clock, and the lane
                that accepted it.
        """
        route = scope.get("route")
        endpoint = "other"
        if route is not None:
            roots = [root for root in ROOTS if scope["path"].startswith(f"{root}/")]
            endpoint = "".join(roots) + route.path
        self._requests.labels(endpoint, status).inc()
        self._seconds.labels(endpoint).observe(seconds)

        lane = scope["state"].get("lane")
        if lane is not None and lane.promise is not None:
            is_late = (
                time.monotonic() - scope["state"]["arrived_at"] > lane.promise.promised_seconds
            )
            self._broken.labels(lane.space.name, lane.space.task).inc(1 if is_late else 0)

    def text(self) -> bytes:
        """Return all metrics in the text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the lanes; two spaces of one model share theirs."""
        lanes = dict[Any, None]()
        for served in self._spaces.served:
            lanes |= {served.queries: None, served.documents: None}
        for kind, name, description, attribute in _OF_LANES:
            family = kind(name, description, labels=_LANE)
            for lane in lanes:
                labels = (lane.space.name, lane.space.task)
                family.add_metric(labels, getattr(lane, attribute))
            yield family


class Gate:
    """Refuses requests before their bodies are read, counts answers, and ends connections when the
    service ends.

    Args:
        keys: None: only this machine may send requests, and no page of a browser.
        is_private: whether the service listens where no browser reaches it.
    """

    def __init__(
        self,
        app: ASGIApp,
        spaces: ServedSpaces,
        keys: ApiKeys | None,
        metrics: Metrics,
        *,
        is_private: bool,
    ) -> None:
        self._app = app
        self._spaces = spaces
        self._keys = keys
        self._metrics = metrics
        self._is_private = is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun_at = time.perf_counter()
        status = 0
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state.setdefault("arrived_at", time.monotonic())
        state["owner"] = ""  # of all files and batches, if there are no keys
        state["request_id"] = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(state["request_id"]):
            state["request_id"] = uuid.uuid4().hex

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = state["request_id"]
                # The rest of a body that is refused is not read.
                if status in _BODY_UNREAD or scope["app"].state.is_ending():
                    sent["connection"] = "close"
            await send(message)

        try:
            with ExitStack() as state["until_sent"]:
                self._require_allowed(scope, headers)
                await self._app(scope, receive, send_counted)
        except Exception as error:
            if status:  # the answer has begun; Starlette ends the reading of a large body so
                raise
            refusal = _refusal_of(error, state["request_id"])
            await refusal.response()(scope, receive, send_counted)
        finally:
            self._metrics.count(scope, status or 500, time.perf_counter() - begun_at)

    def _require_allowed(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request whose body does not matter."""
        if self._keys is None:
            if not self._is_private and not _is_local(headers):
                raise Refusal(*_FOREIGN)
        elif scope["path"] not in _PROBES:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()
            scope["state"]["owner"] = digest
            if scheme.lower() != "bearer" or not self._keys.accept(digest):
                raise Refusal(*_UNAUTHORIZED)

        kind, options = parse_options_header(headers.get("content-type"))
        charset = options.get(b"charset", b"utf-8").lower()
        if kind.startswith(b"multipart/") and charset not in (b"utf-8", b"utf8"):
            raise Refusal(*_CHARSET)
        self._require_in_time(scope)

    def _require_in_time(self, scope: Scope) -> None:
        """Refuse a query that is late before its body is read, which costs less."""
        served = self._spaces.served
        if scope["path"] != _QUERIES or not served or served[0].queries.promise is None:
            return
        # A result, the task that waits for it, and its answer each wait for the event loop again.
        waited = time.monotonic() - scope["state"]["arrived_at"]
        late = _ROUNDS * waited - served[0].queries.promise.promised_seconds
        if late > 0:
            message = "More requests wait than can be read in time. Send it again later."
            raise Refusal(429, "rate_limit_exceeded", message, retry_after_seconds=late)


def _refusal_of(error: Exception, id: str) -> Refusal:
    refusal = error if isinstance(error, Refusal) else disk_full(error)
    if refusal is not None:
        return refusal
    log.error("the request %s has failed", id, exc_info=error)
    message = f"The service has failed; its log says why, for {id}. Send it again."
    return Refusal(500, "internal_error", message)


def _is_local(headers: Headers) -> bool:
    """Whether a request names this machine, and is not of a page of another site."""
    page = headers.get("origin", "http://localhost").partition("://")[2]
    names = (headers.get("host", ""), page)
    is_cross_site = headers.get("sec-fetch-site") == "cross-site"
    return not is_cross_site and all(map(_LOCAL.fullmatch, names))
