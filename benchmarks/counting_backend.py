"""The CPU's default backend, which also writes down each portion that it has computed.

A line of `$COUNTED_PORTIONS` is the number of a portion's texts. It is written before the portion
is answered, so a benchmark sees what was computed even if the pool never gets the answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import Backend, BackendSettings, Progress, Rows
from surge_dagster.engine.encoder.worker.loading import make_backend
from surge_dagster.engine.model.spec import Space


def load(space: Space, settings: BackendSettings) -> Backend:
    try:
        backend: Any = make_backend("openvino", space, settings)
    except ImportError:
        backend = make_backend("torch", space, settings)
    forward = backend.forward
    path = Path(os.environ["COUNTED_PORTIONS"])

    def forward_and_count(prepared: Any, rows: Rows, progress: Progress) -> Costs:
        costs = forward(prepared, rows, progress)
        with path.open("a") as file:
            file.write(f"{len(rows.places)}\n")
        return costs

    backend.forward = forward_and_count
    return backend
