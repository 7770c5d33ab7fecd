"""The engine's warnings in the log of a run: killed workers, memory, retries.

The engine does not know Dagster and warns through Python's logging, which Dagster does not record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import dagster as dg

_ENGINE = logging.getLogger("surge_dagster")


class _RunLog(logging.Handler):
    def __init__(self, context: dg.OpExecutionContext) -> None:
        super().__init__(logging.WARNING)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # without a database the engine goes on
            self._context.log.log(record.levelno, record.getMessage())


@contextmanager
def engine_warnings(context: dg.OpExecutionContext) -> Iterator[None]:
    """Write warnings and errors of the engine into the run's log while the block works."""
    handler = _RunLog(context)
    _ENGINE.addHandler(handler)
    try:
        yield
    finally:
        _ENGINE.removeHandler(handler)
