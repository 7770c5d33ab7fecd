"""What the publishing threads share: records that nobody changes, and a counter that all of them
change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from unittest.mock import Mock

import pytest

from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.run.failures import DroppedPartitions
from surge_dagster.engine.run.publisher import Publisher, _Tasks
from surge_dagster.engine.run.superbatch import PartitionToRead, Segment
from surge_dagster.engine.support.waiting import StopSignal
from tests.engine.runs import read_of
from tests.small_catalogs import partition_of

THREADS, WRITES = 8, 100


class InterruptedPublisher(Publisher):
    """Lets another thread run between reading the counter and writing it."""

    @property
    def _refused_writes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        count = self._count
        time.sleep(1e-5)
        return count

    @_refused_writes.setter
    def _refused_writes(self, count: int) -> None:
        self._count = count


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    memory = Mock()
    memory.plan.result.threads = 1
    memory.stop.seconds_left.return_value = None
    publisher = InterruptedPublisher(Mock(), Mock(), memory, Mock(), Mock(), None)
    yield publisher
    publisher.close()


def test_publishing_threads_cannot_change_what_the_reader_handed_on() -> None:
    partition, read = PartitionToRead(partition_of("k", [])), read_of([])
    segment = Segment(partition, 0, 0, 0, (), read)
    for record, name in ((partition, "reuse"), (read, "rows"), (segment, "read")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, None)


def test_refused_writes_in_a_row_are_counted_exactly_while_other_threads_write(
    publisher: Publisher,
) -> None:
    counts: list[int] = []

    def write(number: int) -> None:
        counts.extend(
            publisher._count_writes(refused=(turn + number) % 10 > 0) for turn in range(WRITES)
        )

    threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = Counter(counts)
    assert times[0] == THREADS * WRITES // 10 and len(counts) == THREADS * WRITES
    assert times[1] <= times[0] + 1
    assert all(times[count] <= times[count - 1] for count in range(2, max(times) + 1)), (
        "no count comes twice in a row"
    )


def test_store_that_is_down_is_known_to_be_when_two_threads_find_it_in_the_same_moment() -> None:
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
    publisher = Publisher(Mock(), Mock(), memory, Mock(), DroppedPartitions(), None)

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
    tasks.wait(60)
    assert (together, most) == (0, 2)
