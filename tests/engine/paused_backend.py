"""The hash backend with a pause in the middle of its work, at which a test kills the process.

While the file `$SURGE_TEST_PAUSE` exists, a worker that has begun to encode creates
`$SURGE_TEST_PAUSE.reached` and goes no further as long as the process that started it lives.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, Progress, Rows
from surge_dagster.engine.encoder.worker.backends.hash_backend import HashBackend
from surge_dagster.engine.model.spec import Space

PAUSE_VARIABLE = "SURGE_TEST_PAUSE"


def reached(pause: Path) -> Path:
    """What exists when a worker has stopped."""
    return pause.with_name(f"{pause.name}.reached")


class PausedBackend(HashBackend):
    def __init__(self, space: Space, settings: BackendSettings) -> None:
        super().__init__(space, settings)
        self._pause = Path(os.environ[PAUSE_VARIABLE])
        self._parent = os.getppid()

    def forward(self, prepared: Any, rows: Rows, progress: Progress) -> Costs:
        while self._pause.exists() and os.getppid() == self._parent:
            reached(self._pause).touch()
            progress()
            threading.Event().wait(0.01)
        return super().forward(prepared, rows, progress)
