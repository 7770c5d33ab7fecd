"""The freshness policy of `embeddings`, which follows the nightly refresh."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
import yaml

from tests.dagster import private_dagster
from tests.dagster.conftest import NAMES, Workbench, execute


def policy(bench: Workbench) -> dg.FreshnessPolicy | None:
    return bench.definitions.resolve_asset_graph().get(NAMES.embeddings).freshness_policy


def window(fail_hours: float, warn_hours: float) -> dg.FreshnessPolicy:
    return dg.FreshnessPolicy.time_window(timedelta(hours=fail_hours), timedelta(hours=warn_hours))


@pytest.mark.parametrize(
    ("cron", "fail_hours", "warn_hours"),
    [
        ("0 2 * * *", 48, 30),
        ("0 2 * * 1-5", 144, 90),
        ("0 * * * *", 2, 1.25),
        ("0 8-18 * * 1-5", 124, 77.5),
        ("*/5 * * * 1-5", 2 * (48 + 1 / 12), 1.25 * (48 + 1 / 12)),
        ("* 8-18 * * *", 2 * (13 + 1 / 60), 1.25 * (13 + 1 / 60)),
        ("*/5 * * * *", 2, 1.25),
        ("0 2 29 2 *", 70_128, 43_830),
    ],
)
def test_policy_follows_the_longest_time_between_nightly_runs(
    bench: Workbench, cron: str, fail_hours: float, warn_hours: float
) -> None:
    bench.settings["nightly_cron"] = cron

    assert policy(bench) == window(fail_hours, warn_hours)


def test_policy_allows_for_the_longest_day_of_the_time_zone(bench: Workbench) -> None:
    bench.settings |= {"nightly_cron": "0 2 * * *", "timezone": "Europe/Berlin"}

    assert policy(bench) == window(50, 31.25)


def test_there_is_no_policy_if_the_nightly_refresh_is_off(bench: Workbench) -> None:
    assert policy(bench) is None


def test_wrong_cron_is_named_by_the_schedule(bench: Workbench) -> None:
    bench.settings["nightly_cron"] = "at night"

    with pytest.raises(dg.DagsterInvalidDefinitionError, match="nightly_refresh"):
        policy(bench)


@pytest.mark.parametrize(
    ("hours", "state"), [(1, "PASS"), (29, "PASS"), (31, "WARN"), (47, "WARN"), (49, "FAIL")]
)
def test_one_missed_night_is_a_warning_and_two_are_a_failure(
    bench: Workbench, hours: int, state: str
) -> None:
    bench.settings["nightly_cron"] = "0 2 * * *"
    bench.write("a")
    bench.nightly()

    at = datetime.now(UTC) + timedelta(hours=hours)

    assert private_dagster.freshness(bench.instance, bench.definitions, NAMES.embeddings, at) == (
        state
    )


def test_catalog_runs_where_freshness_is_off(bench: Workbench) -> None:
    bench.settings["nightly_cron"] = "0 2 * * *"
    bench.write("a")
    home = bench.root / "home"
    written = yaml.safe_load((home / "dagster.yaml").read_text())
    (home / "dagster.yaml").write_text(yaml.safe_dump(written | {"freshness": {"enabled": False}}))

    with dg.DagsterInstance.from_config(str(home)) as instance:
        ran = execute(instance, bench.definitions.resolve_job_def(NAMES.refresh_job))

        assert not instance.freshness_enabled
        assert ran.success


def test_freshness_is_on_in_the_settings_that_the_project_gives(bench: Workbench) -> None:
    assert "freshness" in bench.instance.get_ref().settings
    assert bench.instance.freshness_enabled
