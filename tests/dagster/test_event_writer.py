"""The thread that stores a run's events: nothing queued is lost, memory is bounded, and a stopped
step ends in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import dagster as dg
import pytest

from surge_dagster.orchestration import events as events_module
from surge_dagster.orchestration.events import BATCH_EVENTS, EventWriter
from tests.dagster.conftest import Workbench, run_op
from tests.service.lanes import until

Store = Callable[[Sequence[int]], None]


def stores_when(opened: threading.Event, stored: list[int]) -> Store:
    """Return an event log that stores nothing before `opened`."""

    def store(batch: Sequence[int]) -> None:
        assert opened.wait(60)
        stored.extend(batch)

    return store


@pytest.mark.timeout(60)
def test_stopped_step_waits_for_events_no_longer_than_its_grace_time(bench: Workbench) -> None:
    opened = threading.Event()

    @dg.op
    def work(context) -> None:
        with EventWriter(context, stores_when(opened, []), 0.2) as events:
            events.put(1)
            raise KeyboardInterrupt

    try:
        assert not run_op(bench, work).success
    finally:
        opened.set()
    [run] = bench.instance.get_runs()
    messages = [entry.user_message for entry in bench.instance.all_logs(run.run_id)]

    assert any("Not all events were stored within 0.2 s" in message for message in messages)


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_step_stores_everything_it_has_queued_in_order(
    bench: Workbench, end: type[BaseException] | None
) -> None:
    stored: list[int] = []

    @dg.op
    def work(context) -> None:
        with EventWriter(context, stored.extend, 60) as events:
            for number in range(2 * BATCH_EVENTS + 500):
                events.put(number)
            if end is not None:
                raise end

    assert run_op(bench, work).success is (end is None)
    assert stored == list(range(2 * BATCH_EVENTS + 500))


def test_step_waits_for_a_slow_event_log(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    stored: list[int] = []
    queued: list[int] = []
    monkeypatch.setattr(events_module, "BATCH_EVENTS", 5)

    @dg.op
    def work(context) -> None:
        with EventWriter(context, stores_when(opened, stored), 60) as events:

            def put_all() -> None:
                for number in range(50):
                    events.put(number)
                    queued.append(number)

            thread = threading.Thread(target=put_all)
            thread.start()
            until(lambda: len(events._waiting) == 5)  # no more are taken
            assert len(queued) <= 10
            opened.set()
            thread.join()

    assert run_op(bench, work).success
    assert stored == list(range(50))
