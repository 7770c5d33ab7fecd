"""The thread that stores a run's events: nothing logged is lost, memory is bounded, and a stopped step ends in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import dagster as dg
import pytest

from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.orchestration import events as events_module
from surge_dagster.orchestration.dagster_internals import Event
from surge_dagster.orchestration.events import BATCH_EVENTS, EventWriter
from tests.dagster.conftest import Workbench
from tests.dagster.test_events import MATERIALIZATION, execute, ids_of
from tests.signals import interrupted_in_another_thread

Report = Callable[[dg.DagsterInstance, dg.OpExecutionContext | None, Sequence[Event]], None]


def report_when(opened: threading.Event, stored: list[int], begun: threading.Event | None = None) -> Report:
    """An event log that stores nothing before `opened`; counts in `stored`."""

    def report(instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, events: Sequence[Event]) -> None:
        if begun is not None:
            begun.set()
        assert opened.wait(60)
        stored[0] += len(events)

    return report


def test_publishing_and_storing_its_events_share_one_grace_time(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["grace_seconds"] = 8
    bench.write("a")
    given: list[float | None] = []

    def stopped_seven_seconds_ago(run: EmbeddingRun) -> Iterator[None]:
        run._stop.requested_at = time.monotonic() - 7
        given.append(run._stop.grace_seconds)
        raise KeyboardInterrupt
        yield

    def close(writer: EventWriter, seconds: float | None = None) -> int:
        given.append(seconds)
        return whole_close(writer, seconds)

    whole_close = EventWriter.close
    monkeypatch.setattr(EmbeddingRun, "events", stopped_seven_seconds_ago)
    monkeypatch.setattr(EventWriter, "close", close)
    assert not bench.refresh().success
    for_publishing, for_events = given
    assert for_publishing == 6 and for_events is not None and for_events <= 1


@pytest.mark.timeout(60)
def test_signal_in_another_thread_interrupts_a_step_that_waits_for_the_event_log(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened = threading.Event(), threading.Event()
    monkeypatch.setattr(events_module, "report_events", report_when(opened, [0], begun))
    monkeypatch.setattr(events_module, "_WAITING_EVENTS", 1)

    @dg.op
    def work(context) -> None:
        event = dg.AssetMaterialization("thing")
        with EventWriter(context, grace_seconds=0) as events:
            events.log(event)
            assert begun.wait(60)
            with interrupted_in_another_thread():
                for _ in range(2):
                    events.log(event)
            with interrupted_in_another_thread():
                events.close()
            opened.set()

    assert execute(bench, work).success


@pytest.mark.timeout(60)
def test_step_without_grace_time_left_does_not_wait_for_events(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr(events_module, "report_events", report_when(opened, [0]))

    @dg.op
    def work(context) -> None:
        with EventWriter(context, grace_seconds=3600, stopped_at=lambda: time.monotonic() - 3600) as events:
            events.log(dg.AssetMaterialization("thing"))
            raise KeyboardInterrupt

    try:
        assert not execute(bench, work).success
    finally:
        opened.set()
    [run] = bench.instance.get_runs()
    said = [entry.user_message for entry in bench.instance.all_logs(run.run_id)]
    assert any("1 events were not stored within the grace time" in message for message in said)


class TestWriter:
    """The writer inside an op of its own."""

    @staticmethod
    def event(number: int) -> dg.AssetMaterialization:
        return dg.AssetMaterialization("thing", partition=str(number))

    @pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
    def test_a_step_that_is_ended_early_stores_what_it_has_logged(
        self, bench: Workbench, end: type[BaseException]
    ) -> None:
        @dg.op
        def work(context) -> None:
            with EventWriter(context, grace_seconds=60) as events:
                for number in range(700):
                    events.log(self.event(number))
                raise end

        assert not execute(bench, work).success
        assert len(ids_of(bench, dg.AssetKey("thing"), MATERIALIZATION)) == 700

    def test_a_run_that_is_faster_than_the_event_log_waits_for_it(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened, logged, stored = threading.Event(), [0], [0]

        monkeypatch.setattr(events_module, "report_events", report_when(opened, stored))
        monkeypatch.setattr(events_module, "_WAITING_EVENTS", 600)
        seen: list[int] = []

        @dg.op
        def work(context) -> None:
            with EventWriter(context, grace_seconds=60) as events:

                def log_all() -> None:
                    for number in range(5_000):
                        events.log(self.event(number))
                        logged[0] += 1

                logger = threading.Thread(target=log_all)
                logger.start()
                with events._changed:  # as many as wait and one batch are taken, and no more
                    assert events._changed.wait_for(lambda: len(events._waiting) == 600, 60)
                logger.join(0.2)
                seen.append(logged[0])
                opened.set()
                logger.join()

        assert execute(bench, work).success
        assert seen[0] <= 600 + BATCH_EVENTS and stored == [5_000]

    def test_event_that_points_back_is_made_when_what_it_points_at_is_stored(self, bench: Workbench) -> None:
        cause, stored, pointed = dg.AssetKey("cause"), set[str | None](), list[bool]()

        def pointing(number: int) -> dg.AssetMaterialization:
            pointed.append(str(number) in stored)
            return self.event(number)

        def learn(events: Sequence[Event]) -> None:
            stored.update(ids_of(bench, cause, MATERIALIZATION))

        @dg.op
        def work(context) -> None:
            with EventWriter(context, grace_seconds=60, stored=learn) as events:
                for number in range(1_200):
                    events.log(dg.AssetMaterialization(cause, partition=str(number)))
                    events.log_after(lambda number=number: pointing(number))

        assert execute(bench, work).success
        assert pointed == [True] * 1_200
        assert len(ids_of(bench, dg.AssetKey("thing"), MATERIALIZATION)) == 1_200
