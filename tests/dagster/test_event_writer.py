"""The writer of a run's events: nothing is lost, memory is bounded, and a stopped step ends in
time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from surge_dagster.orchestration import events as events_module
from surge_dagster.orchestration.events import BATCH_EVENTS, EventWriter
from tests.waiting import until

Store = Callable[[Sequence[int]], None]


def stores_when(opened: threading.Event, stored: list[int]) -> Store:
    """Return an event log that stores nothing before `opened`."""

    def store(batch: Sequence[int]) -> None:
        assert opened.wait(60)
        stored.extend(batch)

    return store


@pytest.mark.timeout(60)
def test_stopped_step_waits_for_events_no_longer_than_its_grace_time() -> None:
    opened = threading.Event()

    with (
        pytest.raises(KeyboardInterrupt),
        EventWriter(stores_when(opened, []), 0.2).opened() as events,
    ):
        events.put(1)
        raise KeyboardInterrupt

    opened.set()


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_step_stores_everything_that_it_puts_in_order(end: type[BaseException] | None) -> None:
    stored: list[int] = []

    with (
        suppress(KeyboardInterrupt, RuntimeError),
        EventWriter(stored.extend, 60).opened() as events,
    ):
        for number in range(2 * BATCH_EVENTS + 500):
            events.put(number)
        if end is not None:
            raise end

    assert stored == list(range(2 * BATCH_EVENTS + 500))


def test_step_waits_for_a_slow_event_log(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    stored: list[int] = []
    monkeypatch.setattr(events_module, "BATCH_EVENTS", 5)

    with EventWriter(stores_when(opened, stored), 60).opened() as events:

        def put_all() -> None:
            for number in range(50):
                events.put(number)

        thread = threading.Thread(target=put_all)
        thread.start()
        until(lambda: len(events._waiting) == 5)  # no more are taken
        opened.set()
        thread.join()

    assert stored == list(range(50))
