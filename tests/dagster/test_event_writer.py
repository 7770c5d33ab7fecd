"""How a step that is ended early shares its grace time between publishing and telling."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import pytest

from surge_dagster.assets import event_writer
from surge_dagster.assets.event_batches import Store
from surge_dagster.assets.event_writer import EventWriter
from surge_dagster.engine.run import EmbeddingRun
from tests.dagster.conftest import Workbench
from tests.dagster.test_events import execute


def test_publishing_and_storing_the_events_of_that_share_one_grace_time(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["grace_seconds"] = 8
    bench.write("a")
    given: list[float | None] = []

    def stopped_seven_seconds_ago(run: EmbeddingRun) -> Iterator[None]:
        run._stopped_at = time.monotonic() - 7
        given.append(run._grace_seconds)
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
def test_a_step_whose_grace_time_is_spent_waits_for_no_event(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()

    @contextmanager
    def stuck(context: dg.OpExecutionContext) -> Iterator[Store]:
        yield lambda events, wanted: [None] * len(events) if opened.wait(3600) else []

    monkeypatch.setattr(event_writer, "event_store", stuck)

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
