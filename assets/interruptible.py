"""Following a run so that it can be left at once.

A run that is closed first finishes the SuperBatch it is encoding, which can be half a minute away. Who terminates a
run in the UI wants it to end now. So the events are taken from the run by a thread of its own, and whoever leaves
early ends the encoder first: the run then has nothing to wait for. What was encoded by then is still published, and is
adopted by the next run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run import EmbeddingRun, Event

_EVENTS_WAITING = 1000


def events_of(run: EmbeddingRun, pool: EncoderPool) -> Generator[Event]:
    """The events of a run, in order; closing this generator, or an exception in it, ends the pool and the run."""
    handed: queue.Queue[Event | BaseException | None] = queue.Queue(_EVENTS_WAITING)

    def follow() -> None:
        try:
            for event in run.events():
                handed.put(event)
        except BaseException as error:
            handed.put(error)
        handed.put(None)

    follower = threading.Thread(target=follow, name="surge-follow", daemon=True)
    follower.start()
    finished = False
    try:
        while (event := handed.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
        finished = True
    finally:
        if not finished:
            pool.close()
        while follower.is_alive():  # it may be waiting to hand over what is no longer wanted
            with contextlib.suppress(queue.Empty):
                handed.get(timeout=0.05)
        follower.join()
