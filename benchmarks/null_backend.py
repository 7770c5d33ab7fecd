"""A backend that computes nothing: a call with it costs what a call costs by itself.

The processes of the pool import this module by its name.
"""

from __future__ import annotations

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, Progress, Rows
from surge_dagster.engine.model.spec import Space

BACKEND = "benchmarks.null_backend:NullBackend"


class NullBackend:
    """A worker's backend that reports every row as done and leaves the matrix as it is."""

    name = "null"
    detail = "no vectors"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        pass

    def prepare(self, texts: list[str]) -> int:
        return len(texts)

    def forward(self, prepared: int, rows: Rows, progress: Progress) -> Costs:
        rows.truncated[rows.places] = 0
        progress()
        return Costs(tokens=prepared, padded_tokens=prepared, forward_seconds=0.0)
