"""Tests of the schedules: which runs they request."""

from __future__ import annotations

import threading
from unittest import mock

import dagster as dg
import pytest

from surge_dagster.automation import embedding_runs
from surge_dagster.engine.errors import Cancelled, StoreUnavailable
from surge_dagster.engine.store.local_store import LocalStore
from tests.dagster.conftest import NAMES, Workbench, options_of, requested


def test_cron_and_timezone_come_from_the_settings(bench: Workbench) -> None:
    bench.settings |= {
        "nightly_cron": "30 4 * * 1",
        "check_cron": "0 5 * * 0",
        "timezone": "Europe/Berlin",
    }
    schedules = bench.definitions.get_repository_def().schedule_defs

    shown = [(each.name, each.job_name, each.cron_schedule) for each in schedules]
    assert sorted(shown) == [
        (NAMES.schedule, NAMES.refresh_job, "30 4 * * 1"),
        (NAMES.check_schedule, NAMES.check_job, "0 5 * * 0"),
    ]
    assert {schedule.execution_timezone for schedule in schedules} == {"Europe/Berlin"}


def test_requested_run_is_unattended_whoever_launches_it(bench: Workbench) -> None:
    """A test launch of the tick keeps the config and drops hidden tags."""
    [request] = bench.scheduled().run_requests

    options = {"keys": None, "unattended": True, "removed_partitions": "report"}
    assert options_of(request) == options


@pytest.mark.parametrize("failing", ["known_space", "states_of_unfinished"])
def test_nightly_refresh_without_an_answering_store_is_one_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    bench.fill("ab")
    bench.settings["max_runs"] = 2
    down = mock.Mock(side_effect=StoreUnavailable("GET failed (503: SlowDown) after 3 attempts."))
    monkeypatch.setattr(embedding_runs, failing, down)

    assert requested(bench.scheduled()) == [None]


def test_nightly_refresh_whose_store_hangs_is_one_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[threading.Event] = []

    def until(self: LocalStore, over: threading.Event) -> LocalStore:
        limits.append(over)
        return self

    def hang(*_: object, **options: object) -> None:
        assert limits[0].wait(60)
        raise Cancelled  # as an object store does then

    bench.settings["max_runs"] = 2
    monkeypatch.setattr(LocalStore, "until", until)
    monkeypatch.setattr(embedding_runs, "known_space", hang)
    monkeypatch.setattr(embedding_runs, "_LOOK_SECONDS", 0.1)

    assert requested(bench.scheduled()) == [None]


def schedules_of(bench: Workbench) -> dict[str, bool]:
    """Which schedules the definitions have, and whether each is on from the start."""
    schedules = bench.definitions.get_repository_def().schedule_defs
    return {
        each.name: each.default_status is dg.DefaultScheduleStatus.RUNNING for each in schedules
    }


def test_schedules_are_off_from_the_start_if_no_cron_is_set(bench: Workbench) -> None:
    assert schedules_of(bench) == {NAMES.schedule: False, NAMES.check_schedule: False}


def test_check_cron_turns_on_only_the_check_of_the_catalog(bench: Workbench) -> None:
    bench.settings["check_cron"] = "0 5 * * 0"

    assert schedules_of(bench) == {NAMES.schedule: False, NAMES.check_schedule: True}


def test_nightly_cron_turns_on_the_refresh_and_the_check_of_the_catalog(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_NIGHTLY_CRON", "0 2 * * *")  # also with the default time
    bench.settings["b_min"] = 5  # definitions that no other test has loaded

    assert schedules_of(bench) == {NAMES.schedule: True, NAMES.check_schedule: True}


@pytest.mark.parametrize("written", ["none", ""])
def test_check_cron_of_none_leaves_out_the_check_of_the_catalog(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setenv("SURGE_CHECK_CRON", written)
    bench.settings["nightly_cron"] = "0 3 * * *"

    assert schedules_of(bench) == {NAMES.schedule: True}
