"""Metrics in the format of Prometheus; needs the extra `serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surge_dagster.service.lane import Lane
from surge_dagster.service.spaces import ServedSpaces

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counts requests, and reads the lanes when it is asked. Has a registry of its own."""

    def __init__(self, spaces: ServedSpaces) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "surge_requests_total", "Requests that were answered", ("endpoint", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "surge_request_seconds",
            "Seconds from the headers of a request to its answer",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_LaneCollector(spaces))

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests.labels(endpoint, status).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        """All metrics in the text format 0.0.4."""
        return generate_latest(self._registry)


_GAUGES: tuple[tuple[str, str, Callable[[Lane], float | None]], ...] = (
    ("surge_waiting_tokens", "Tokens that wait to be encoded", lambda lane: lane.waiting_tokens),
    ("surge_waiting_requests", "Requests that wait to be encoded", lambda lane: lane.waiting_requests),
    (
        "surge_queue_seconds",
        "Seconds within which a request that arrives now would be answered",
        lambda lane: lane.promise.bound(lane.waiting_tokens) if lane.promise else None,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Lane], float | None]], ...] = (
    ("surge_texts_total", "Texts that were encoded", lambda lane: lane.computed_texts),
    ("surge_tokens_total", "Tokens that were encoded", lambda lane: lane.computed_tokens),
    ("surge_passes_total", "Passes through the model", lambda lane: lane.passes),
    ("surge_promise_broken_total", "Requests answered after the promise", lambda lane: lane.broken_promises),
)


class _LaneCollector(Collector):
    def __init__(self, spaces: ServedSpaces) -> None:
        self._spaces = spaces

    def collect(self) -> Iterable[Metric]:
        served = self._spaces.served()
        lanes = {id(lane): lane for each in served for lane in (each.queries, each.documents)}.values()
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, meaning, value_of in metrics:
                family = kind(name, meaning, labels=("space", "side"))
                for lane in lanes:
                    if (value := value_of(lane)) is not None:
                        family.add_metric((lane.space.name, lane.space.task), value)
                yield family
