"""What the publishing threads share."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.run.failures import DroppedPartitions
from surge_dagster.engine.run.publisher import Publisher, _Tasks
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.support.waiting import StopSignal
from tests.small_catalogs import partition_of


def test_two_threads_that_find_the_store_down_agree() -> None:
    first_is_done = threading.Event()

    class Over(threading.Event):
        def is_set(self) -> bool:
            if threading.current_thread() is second:
                # loses the processor; a lock keeps the first one out meanwhile
                first_is_done.wait(0.5)
            return super().is_set()

    memory = Mock()
    memory.stop = StopSignal()
    memory.stop.over = Over()
    publisher = Publisher(Mock(), Mock(), memory, Mock(), DroppedPartitions(), None, Mock())

    def fail(key: str) -> None:
        publisher._failure(
            PartitionToRead(partition_of(key, [])), StoreUnavailable("it does not answer")
        )

    second = threading.Thread(target=fail, args=("b",))
    second.start()
    fail("a")
    first_is_done.set()
    second.join()
    assert publisher._store_is_down


def test_file_whose_error_cannot_be_explained_ends_the_run() -> None:
    memory = Mock()
    memory.stop = StopSignal(grace_seconds=60)
    publisher = Publisher(Mock(), Mock(), memory, Mock(), DroppedPartitions(), None, Mock())
    partition = PartitionToRead(partition_of("a", []))
    publisher._split[partition] = Mock()
    publisher._assemble = Mock(side_effect=OSError("it went"))
    publisher._failure = Mock(side_effect=ValueError("it cannot be explained"))

    publisher._unfinished_files = 1
    publisher._write_file(partition)

    assert not publisher._unfinished_files
    with pytest.raises(ValueError, match="it cannot be explained"):
        publisher.close()


def test_publishing_tasks_share_a_limited_number_of_threads() -> None:
    together, most, lock = 0, 0, threading.Lock()
    both_run = threading.Barrier(2)

    def task() -> None:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        both_run.wait(60)
        with lock:
            together -= 1

    tasks = _Tasks("test", 2)
    for _ in range(20):
        tasks.add(task)
    tasks.end()
    tasks.wait()
    assert (together, most) == (0, 2)
