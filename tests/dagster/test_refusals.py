"""Tests of refused partitions: Dagster shows them, and the sensor does not request them until
something changes."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from surge_dagster.assets import embeddings
from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.orchestration.partition_keys import to_partition_key
from tests.dagster.conftest import Workbench, requested, shown, when_footers_are_checked
from tests.dagster.test_failures import NULL_TEXT


def test_partition_fixed_during_the_run_does_not_count_as_refused(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("bad", "worse"):
        bench.write(key, NULL_TEXT)
    bench.write("good")
    bench.tick()  # all are reported as they are
    report = embeddings.report_failures

    def fixed_before(*arguments: Any) -> None:
        patch.undo()
        bench.write("bad", 2, version="v2")
        bench.tick()  # it is reported before the run has reported any refusal
        report(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "report_failures", fixed_before)
        assert not bench.refresh().success
    assert shown(bench) == ({"good"}, {"bad", "worse"})
    assert requested(bench.tick()) == [["bad"]]
    ran = bench.embed_keys(select="failed")
    assert set(ran.materialized()) == {"bad"}


def test_too_long_key_stops_no_other_partition(bench: Workbench) -> None:
    key = "".join(random.Random(1).choices(string.ascii_letters, k=4_000))
    bench.fill(("a", key, "z"))
    assert requested(bench.tick()) == [["a", shown_as := encode_key(key), "z"]]
    ran = bench.refresh()
    assert (
        "has 4,000 bytes as a partition key" in ran.failure()
        and "Give it a shorter key." in ran.failure()
    )
    assert shown(bench) == ({"a", "z"}, {to_partition_key(shown_as)})
    found = bench.tick()
    assert requested(found) == [] and "1 refused" in found.skip_message


def test_refusals_are_reported_by_a_run_that_another_error_ends(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise StoreUnavailable("the store is down")

    bench.write("bad", NULL_TEXT)
    bench.write("good")
    with monkeypatch.context() as patch:
        when_footers_are_checked(patch, down)
        ran = bench.refresh()
    assert not ran.success
    assert ran.will_retry
    assert ran.failure().splitlines()[:2] == [
        "the store is down",
        "1 partition had failed by then:",
    ]
    assert shown(bench)[1] == {"bad"}
    metrics = ran.metrics()
    assert (
        metrics["texts_encoded"],
        metrics["partitions_written"],
        metrics["partitions_skipped"],
    ) == (3, 1, 0)
    assert [failed["key"] for failed in metrics["partitions_failed"]] == ["bad"]
    whole, bad = str(metrics["failed"]).splitlines()[2:]
    assert whole == "| `(the whole run)` | `the store is down` | `Run again.` |" and bad.startswith(
        "| `bad` | `row 1"
    )
    assert shown(bench) == ({"good"}, {"bad"})
    found = bench.tick()
    assert requested(found) == [] and "1 refused" in found.skip_message


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
