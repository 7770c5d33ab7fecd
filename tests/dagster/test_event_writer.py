"""The thread that stores a run's events: nothing queued is lost, memory is bounded, and a stopped
step ends in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import dagster as dg
import pytest

from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.orchestration import events as events_module
from surge_dagster.orchestration.events import BATCH_EVENTS, EventWriter
from surge_dagster.orchestration.run_events import RunEvents
from tests.dagster.conftest import Workbench, run_op
from tests.service.lanes import until
from tests.signals import interrupted_in_another_thread

Store = Callable[[Sequence[int]], None]


def stores_when(
    opened: threading.Event, stored: list[int], begun: threading.Event | None = None
) -> Store:
    """An event log that stores nothing before `opened`."""

    def store(batch: Sequence[int]) -> None:
        if begun is not None:
            begun.set()
        assert opened.wait(60)
        stored.extend(batch)

    return store


def test_publishing_and_storing_its_events_share_one_grace_time(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["grace_seconds"] = 8
    bench.write("a")
    given: list[float] = []

    def stopped(run: EmbeddingRun) -> Iterator[None]:
        given.append(run._stop.grace_seconds)
        raise KeyboardInterrupt
        yield

    def watched(events: RunEvents, *arguments: object) -> None:
        given.append(events._grace_seconds)
        leave(events, *arguments)  # pyright: ignore[reportArgumentType]

    leave = RunEvents.__exit__
    monkeypatch.setattr(EmbeddingRun, "events", stopped)
    monkeypatch.setattr(RunEvents, "__exit__", watched)
    assert not bench.refresh().success
    assert given == [6, 2]


@pytest.mark.timeout(60)
def test_signal_in_another_thread_interrupts_a_step_that_waits_for_the_event_log(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened, closing = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(events_module, "_WAITING_EVENTS", 1)

    @dg.op
    def work(context) -> None:
        writer = EventWriter(context, stores_when(opened, [], begun), 0)
        with interrupted_in_another_thread(after=closing.is_set), writer as events:
            events.put(1)
            assert begun.wait(60)
            with interrupted_in_another_thread():
                for number in range(2):
                    events.put(number)
            closing.set()
        opened.set()

    assert run_op(bench, work).success


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
    assert any("1 event not stored within 0.2 s" in message for message in messages)


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
    opened, queued, stored = threading.Event(), [0], list[int]()
    monkeypatch.setattr(events_module, "_WAITING_EVENTS", 600)
    seen: list[int] = []

    @dg.op
    def work(context) -> None:
        with EventWriter(context, stores_when(opened, stored), 60) as events:

            def put_all() -> None:
                for number in range(5_000):
                    events.put(number)
                    queued[0] += 1

            thread = threading.Thread(target=put_all)
            thread.start()
            until(lambda: len(events._waiting) == 600)  # with one batch; no more are taken
            thread.join(0.2)
            seen.append(queued[0])
            opened.set()
            thread.join()

    assert run_op(bench, work).success
    assert seen[0] <= 600 + BATCH_EVENTS and stored == list(range(5_000))
