"""Many small reads from a store, several of them concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from surge_dagster.engine.store.store import Store

READS_AT_ONCE = 32
_POLL_SECONDS = 0.1
T = TypeVar("T")


def read_at_once(
    store: Store, names: Sequence[str], read: Callable[[Store, str], T], keep: Callable[[str, T], None]
) -> None:
    """Read each name in one of `READS_AT_ONCE` threads, and keep the results in this one, in the order of the names.

    An error, or an interrupt, does not wait for reads under way; nothing is kept after it.

    Args:
        read: called in any thread, with a store whose waits end when the results are no longer needed.

    Raises:
        BaseException: the first error of a read, in the order of the names; reads that have not begun are left out.
    """
    over = threading.Event()
    view = store.until(over)
    pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="surge-footer")
    try:
        for name, answer in [(name, pool.submit(read, view, name)) for name in names]:
            while not wait([answer], _POLL_SECONDS).done:  # in turns, so that any thread's signal interrupts it
                pass
            keep(name, answer.result())
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
