"""Many small reads from a bucket: each waits for its answer, so many are on their way together."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import next_item

READS_AT_ONCE = 32
T = TypeVar("T")


def read_at_once(
    store: Store, names: Sequence[str], read: Callable[[Store, str], T], keep: Callable[[str, T], None]
) -> None:
    """Read each name in one of `READS_AT_ONCE` threads, and keep in this one what comes of it.

    An error, or an interrupt, waits for no read that is under way; nothing is kept after it.

    Args:
        read: from any thread; of the store it is given, which waits for nothing once nobody waits for the answer.

    Raises:
        BaseException: what a read raised first; those that have not begun by then are left out.
    """
    over = threading.Event()
    asked = store.until(over)
    left = deque(names)
    answers: queue.SimpleQueue[tuple[str, T] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        while left and not over.is_set():
            try:
                name = left.popleft()
            except IndexError:
                return  # another one took the last
            try:
                answers.put((name, read(asked, name)))
            except BaseException as error:  # the thread would keep it to itself
                answers.put(error)

    try:
        for _ in range(min(READS_AT_ONCE, len(names))):
            # No process that is to end waits for a daemon's answer from the bucket.
            threading.Thread(target=run, name="surge-footer", daemon=True).start()
        for _ in names:
            answer = next_item(answers)
            if isinstance(answer, BaseException):
                raise answer
            keep(*answer)
    finally:
        over.set()
