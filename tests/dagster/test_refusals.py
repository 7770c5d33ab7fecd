"""Tests of refused partitions: Dagster shows them, and the sensor does not request them until
something changes."""

from __future__ import annotations

from typing import Any

import pytest

from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.orchestration.refresh import Refresh
from tests.dagster.conftest import Workbench, requested, shown
from tests.dagster.test_failures import NULL_TEXT


def test_refusals_are_reported_by_a_run_that_another_error_ends(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise StoreUnavailable("the store is down")

    bench.write("bad", NULL_TEXT)
    bench.write("good")
    monkeypatch.setattr(Refresh, "_report_fresh", down)

    ran = bench.refresh()

    assert not ran.success
    assert ran.will_retry
    assert ran.failure().startswith("the store is down\n1 partition had failed by then:")

    whole, bad = str(ran.metrics()["failed"]).splitlines()[2:]
    assert whole == "| `(the whole run)` | `the store is down` |"
    assert bad.startswith("| `bad` | `partition 'bad', row 1")
    assert shown(bench) == ({"good"}, {"bad"})
    assert "1 refused" in bench.tick().skip_message


@pytest.mark.parametrize("setting", [{"text": "name"}, {"max_text_bytes": 4}])
def test_refused_partition_is_requested_once_the_setting_is_fixed(
    bench: Workbench, setting: dict[str, Any]
) -> None:
    bench.write("a")
    bench.tick()
    bench.settings |= setting

    assert not bench.refresh().success
    assert requested(bench.tick()) == []

    for name in setting:
        del bench.settings[name]

    assert requested(bench.tick()) == [["a"]]
