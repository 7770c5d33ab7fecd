"""Many small reads from a bucket: each waits for its answer, so many are on their way together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

READS_AT_ONCE = 32


def read_at_once(names: Sequence[str], read: Callable[[str], None]) -> None:
    """Call `read` with each name, from `READS_AT_ONCE` threads.

    Raises:
        BaseException: what a call raised first; those that have not begun by then are left out.
    """
    if not names:
        return
    waiting: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(min(READS_AT_ONCE, len(names)), thread_name_prefix="surge-footer")
    try:
        for name in names:
            waiting.append(pool.submit(read, name))
            if len(waiting) > 2 * READS_AT_ONCE:
                waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
