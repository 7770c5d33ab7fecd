"""Many small reads from a store, several of them concurrently."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import TURN_SECONDS

CONCURRENT_READS = 32
T = TypeVar("T")


def read_concurrently(
    store: Store, names: Sequence[str], read: Callable[[Store, str], T], keep: Callable[[str, T], None]
) -> None:
    """Read each name in one of `CONCURRENT_READS` threads; keep the results in this thread, in the order of the names.

    After an error or an interrupt nothing more is kept, and reads under way are not waited for.

    Args:
        read: called in any thread, with a store whose waits end when the results are no longer needed.

    Raises:
        BaseException: the first error of a read, in the order of the names; of the names behind it at most
            `2 * CONCURRENT_READS` have been read.
    """
    over = threading.Event()
    view = store.until(over)
    pool = ThreadPoolExecutor(CONCURRENT_READS, thread_name_prefix="surge-footer")

    def answers() -> Iterator[tuple[str, Future[T]]]:
        ahead: deque[tuple[str, Future[T]]] = deque()
        for name in names:
            ahead.append((name, pool.submit(read, view, name)))
            if len(ahead) == 2 * CONCURRENT_READS:
                yield ahead.popleft()
        yield from ahead

    try:
        for name, answer in answers():
            while not wait([answer], TURN_SECONDS).done:  # in turns, so that a signal to any thread interrupts it
                pass
            keep(name, answer.result())
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
