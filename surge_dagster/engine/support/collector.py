"""Python's collector of cycles, which is wasted on what a listing makes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Let no cycles be collected in this process until the end.

    The collector looks through everything again whenever a quarter more has been made. In a process
    that has imported Dagster and lists tens of thousands of partitions, which have no cycles, this
    is half of the time. The process should be back to normal within a minute.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
