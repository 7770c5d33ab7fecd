"""Many small reads from a store: from a bucket several concurrently, from a disk one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import in_background, result_of

CONCURRENT_READS = 32
T = TypeVar("T")


def reads_ahead(
    store: Store, names: Sequence[str], read: Callable[[Store, str], T]
) -> Generator[T]:
    """Yield what is read of each name, in their order; from a bucket while the next ones are being
    read.

    If the generator ends early, it does not wait for reads under way, as an executor would.

    Args:
        read: called in any thread, with a store whose waits end when the results are no longer
            needed.
    """
    if not store.is_remote:
        for name in names:
            yield read(store, name)
        return
    over = threading.Event()
    view = store.until(over)
    ahead: deque[Future[T]] = deque()
    try:
        for name in names:
            ahead.append(in_background(partial(read, view, name), "surge-footer"))
            if len(ahead) == CONCURRENT_READS:
                yield result_of(ahead.popleft())
        while ahead:
            yield result_of(ahead.popleft())
    finally:
        over.set()
