"""A registered backend that holds back portions of `FIRST_TEXTS` and `SECOND_TEXTS` texts before it
computes them.

The worker touches files in `$HELD_FOLDER`: `tokenized-N` after a portion of N texts was tokenized,
and `held-N` when it begins to compute a held portion, which then waits for the file `go-on-N`.
`$HELD_BACKEND` names the backend.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import (
    Backend,
    BackendSettings,
    LaunchedPortion,
    Progress,
    QueuingBackend,
    Rows,
)
from surge_dagster.engine.encoder.worker.loading import make_backend
from surge_dagster.engine.model.spec import Space

FIRST_TEXTS = 5
SECOND_TEXTS = 3
_POLL_SECONDS = 0.01


def load(space: Space, settings: BackendSettings) -> Backend:
    kind = os.environ["HELD_BACKEND"]
    made = make_backend(kind, space, settings)
    compute_name = "launch" if isinstance(made, QueuingBackend) else "forward"
    backend: Any = made
    prepare = backend.prepare
    compute = getattr(backend, compute_name)

    def prepare_and_tell(texts: list[str]) -> Any:
        prepared = prepare(texts)
        _file(f"tokenized-{len(texts)}").touch()
        return prepared

    def compute_when_allowed(prepared: Any, rows: Rows, progress: Progress) -> Any:
        texts = len(rows.places)
        if texts not in (FIRST_TEXTS, SECOND_TEXTS):
            return compute(prepared, rows, progress)
        _file(f"held-{texts}").touch()
        if kind == "http":
            return _launched_later(texts, progress, lambda: compute(prepared, rows, progress))
        _wait(texts, progress)
        return compute(prepared, rows, progress)

    backend.prepare = prepare_and_tell
    setattr(backend, compute_name, compute_when_allowed)
    return backend


def _launched_later(
    texts: int, progress: Progress, launch: Callable[[], LaunchedPortion]
) -> LaunchedPortion:
    """A launch that only sends requests must not wait, so the requests are sent later."""
    launched: list[LaunchedPortion] = []

    def is_done() -> bool:
        if not launched and _go_on(texts):
            launched.append(launch())
        return bool(launched) and launched[0].is_done()

    def finish() -> Costs:
        _wait(texts, progress)
        is_done()
        return launched[0].finish()

    return LaunchedPortion(is_done, finish)


def _wait(texts: int, progress: Progress) -> None:
    while not _go_on(texts):
        progress()
        threading.Event().wait(_POLL_SECONDS)


def _go_on(texts: int) -> bool:
    return _file(f"go-on-{texts}").exists()


def _file(name: str) -> Path:
    return Path(os.environ["HELD_FOLDER"]) / name
