"""The gate that each request passes before its body is read: API keys and metrics."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.errors import Refusal
from surge_dagster.service.spaces import ServedSpaces

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PROBES = ("/healthz", "/readyz")
ACCEPTED = "accepted"
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

    def accept(self, key: bytes) -> bool:
        """Whether this is one of the keys; the empty one, whose digest an unset `$KEY` gives, never
        is."""
        version = self._version()
        if version != self._seen:
            self._seen = version
            try:
                self._digests = self._read()
            except ConfigError as error:
                log.warning("%s The keys stay as they were.", error)
        digest = hashlib.sha256(key).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key != b"" and any(matches)

    def _version(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _read(self) -> list[str]:
        try:
            lines = self._path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API keys in {self._path} cannot be read: {error}.") from None
        digests = list[str]()
        for number, line in enumerate(lines, 1):
            words = line.split("#")[0].lower().split()
            if not words:
                continue
            if not _DIGEST.fullmatch(words[0]):
                raise self._wrong(f"Line {number} is not a SHA-256 in hex")
            digests.append(words[0])
        return digests

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: {problem}. Each line has the SHA-256 of an API key in hex; make one "
            'with: printf %s "$KEY" | sha256sum'
        )


class Metrics:
    """Counts requests, and reads the lanes when it is asked. Has a registry of its own."""

    def __init__(self, spaces: ServedSpaces) -> None:
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
        self._registry.register(_LaneCollector(spaces))

    def count(self, scope: Any, status: int, seconds: float) -> None:
        """Count an answer.

        Args:
            scope: of ASGI; its state has the lane that accepted the request, and when, on the
                monotonic clock.
        """
        endpoint = getattr(scope.get("route"), "path", "other")
        self._requests.labels(endpoint, status).inc()
        self._seconds.labels(endpoint).observe(seconds)

        lane, received_at = scope.get("state", {}).get(ACCEPTED, (None, 0.0))
        if lane is not None and lane.promise is not None:
            is_late = time.monotonic() - received_at > lane.promise.promised_seconds
            self._broken.labels(lane.space.name, lane.space.task).inc(1 if is_late else 0)

    def text(self) -> bytes:
        """Return all metrics in the text format 0.0.4."""
        return generate_latest(self._registry)


class _LaneCollector(Collector):
    def __init__(self, spaces: ServedSpaces) -> None:
        self._spaces = spaces

    def collect(self) -> Iterable[Metric]:
        # Two spaces of one model share their lanes.
        lanes = dict[Any, None]()
        for served in self._spaces.served():
            lanes |= {served.queries: None, served.documents: None}
        for kind, name, description, attribute in _OF_LANES:
            family = kind(name, description, labels=_LANE)
            for lane in lanes:
                labels = (lane.space.name, lane.space.task)
                family.add_metric(labels, getattr(lane, attribute))
            yield family


class Gate:
    """Refuses requests without a key, counts answers, and ends connections when the service ends.

    Args:
        keys: None: every request passes.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        scope.setdefault("state", {})["owner"] = ""  # of all files and batches, without keys
        begun_at = time.perf_counter()
        status = 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # The rest of a body that is too large is not read.
                if status == 413 or scope["app"].state.is_ending():
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            app = self._app if self._has_key(scope) else _unauthorized
            await app(scope, receive, send_counted)
        finally:
            self._metrics.count(scope, status, time.perf_counter() - begun_at)

    def _has_key(self, scope: Scope) -> bool:
        if self._keys is None or scope["path"] in _PROBES:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        scope["state"]["owner"] = hashlib.sha256(key.strip()).hexdigest()
        return scheme.lower() == b"bearer" and self._keys.accept(key.strip())


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = "The request has no valid API key. Send the header Authorization: Bearer KEY."
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    response = Refusal(401, "invalid_api_key", message).response(headers)
    await response(scope, receive, send)
