"""Metrics in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surge_dagster.service.lane import Lane
from surge_dagster.service.spaces import ServedSpaces

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LABELS = ("space", "side")


class Metrics:
    """Counts requests, and reads the lanes when it is asked. Has a registry of its own."""

    def __init__(self, spaces: ServedSpaces) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "surge_requests_total",
            "Requests that were answered",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "surge_request_seconds",
            "Time of a request",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._broken = Counter(
            "surge_promise_broken_total",
            "Answers that were sent too late",
            _LABELS,
            registry=self._registry,
        )
        self._registry.register(_LaneCollector(spaces))

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests.labels(endpoint, status).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def count_accepted(self, lane: Lane, seconds: float) -> None:
        """Of a request that a lane accepted: from its arrival until its answer, whatever it is, was
        sent."""
        if lane.promise is not None:
            is_broken = seconds > lane.promise.promised_seconds
            self._broken.labels(lane.space.name, lane.space.task).inc(is_broken)

    def text(self) -> bytes:
        """All metrics in the text format 0.0.4."""
        return generate_latest(self._registry)


def _queue_seconds(lane: Lane) -> float | None:
    return lane.expected_seconds() if lane.promise else None


_OF_LANES = (
    (GaugeMetricFamily, "surge_waiting_tokens", "Tokens that wait", attrgetter("waiting_tokens")),
    (
        GaugeMetricFamily,
        "surge_waiting_requests",
        "Requests that wait",
        attrgetter("waiting_requests"),
    ),
    (
        GaugeMetricFamily,
        "surge_queue_seconds",
        "Expected time until what waits is answered",
        _queue_seconds,
    ),
    (CounterMetricFamily, "surge_texts_total", "Texts that were encoded", attrgetter("texts")),
    (CounterMetricFamily, "surge_tokens_total", "Tokens that were encoded", attrgetter("tokens")),
    (CounterMetricFamily, "surge_passes_total", "Passes through the model", attrgetter("passes")),
)


class _LaneCollector(Collector):
    def __init__(self, spaces: ServedSpaces) -> None:
        self._spaces = spaces

    def collect(self) -> Iterable[Metric]:
        # Spaces share lanes, and so do queries and documents that are encoded alike.
        lanes = (lane for each in self._spaces.served() for lane in (each.queries, each.documents))
        now: dict[Any, Any] = {(lane.space.name, lane.space.task): lane for lane in lanes}
        counted: dict[Any, Any] = dict(self._spaces.counts)
        for kind, name, meaning, value_of in _OF_LANES:
            family = kind(name, meaning, labels=_LABELS)
            for labels, source in (now if kind is GaugeMetricFamily else counted).items():
                if (value := value_of(source)) is not None:
                    family.add_metric(labels, value)
            yield family
