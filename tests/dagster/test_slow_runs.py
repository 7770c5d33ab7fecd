"""A slow encode call reaches the people who operate Dagster: the run's log, a check of the run, and
the alerts."""

from __future__ import annotations

import dagster as dg

from tests.dagster.conftest import Workbench

_SLOW = "SuperBatch 0: its 3 texts took 0.0 s, 3.0 times as long as usual."


def test_slow_call_is_a_warning_in_the_log_of_the_run(bench: Workbench, slow_pace: None) -> None:
    bench.fill("a")
    ran = bench.refresh()

    logged = bench.instance.all_logs(ran.run_id)
    warned = [entry.user_message for entry in logged if entry.level == 30]

    assert len([message for message in warned if message.startswith(_SLOW)]) == 1


def test_slow_call_fails_the_check_of_the_run_as_a_warning(
    bench: Workbench, slow_pace: None
) -> None:
    bench.fill("a")
    check = bench.refresh().checks()["encode_not_slow"]

    assert not check.passed
    assert check.severity == dg.AssetCheckSeverity.WARN
    assert check.metadata["slowest_pace_ratio"].value == 3.0
    assert _SLOW in str(check.metadata["slow"].value)
