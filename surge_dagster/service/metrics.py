"""Metrics in the format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surge_dagster.service.spaces import ServedSpaces

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
