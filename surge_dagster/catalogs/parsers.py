"""Processes that read sources, one per core, which never outlive the process that asked for them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def parser_pool() -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes start with the first task; leaving the block by an error drops the tasks that wait."""
    # Not forked: a process that already runs threads can deadlock its forked children.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context, initializer=_begin) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin() -> None:
    gc.disable()  # syntax trees hold no cycles, and looking for some in them costs a seventh of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # The pool's pipes stay open in the other children, so a killed parent is not seen through them.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
