"""What the publishing threads share."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.run.publisher import Publisher
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.support.waiting import StopSignal
from tests.small_catalogs import partition_of


def publisher_of(stop: StopSignal) -> Publisher:
    return Publisher(Mock(), Mock(), Mock(stop=stop), Mock(), set(), None)


def test_two_threads_that_find_the_store_down_agree() -> None:
    first_is_done = threading.Event()

    class Over(threading.Event):
        def is_set(self) -> bool:
            if threading.current_thread() is second:
                # loses the processor; a lock keeps the first one out meanwhile
                first_is_done.wait(0.5)
            return super().is_set()

    stop = StopSignal()
    stop.over = Over()
    publisher = publisher_of(stop)

    def fail(key: str) -> None:
        partition = PartitionToRead(partition_of(key, []))
        publisher._failure(partition, StoreUnavailable("it does not answer"))

    second = threading.Thread(target=fail, args=("b",))
    second.start()
    fail("a")
    first_is_done.set()
    second.join()

    assert publisher._store_is_down


def test_error_that_no_partition_explains_ends_the_run() -> None:
    publisher = publisher_of(StopSignal(grace_seconds=60))
    publisher._publish = Mock(side_effect=ValueError("it cannot be explained"))

    publisher.submit(Mock())

    with pytest.raises(ValueError, match="it cannot be explained"):
        publisher.close()
