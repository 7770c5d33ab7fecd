"""The document and the aims of the Dagster benchmark, from a run of small size."""

from __future__ import annotations

import json

import pytest

from benchmarks import dagster
from benchmarks.dagster_pages import pages_targets
from benchmarks.harness import scenario_lines, scenario_targets


@pytest.mark.soak
def test_small_refresh_with_its_pages_and_ticks_gives_the_document() -> None:
    """Takes half a minute: a run, a webserver, a browser and ticks, each a process that starts."""
    words = ["--quick", "--scenarios", "refresh,pages,sensor", "--partitions", "1200"]
    document = json.loads(json.dumps(dagster.measure(dagster.parse(words))))
    refresh, pages, sensor = document["refresh"], document["pages"], document["sensor"]
    assert refresh["partitions"] == pages["partitions"] == sensor["partitions"] == 1200
    assert refresh["partitions_per_second"] * refresh["seconds"] == pytest.approx(1200)
    own, rss = refresh["own_bytes_at_quarters"], refresh["rss_bytes_at_quarters"]
    assert len(own) == len(rss) == 4
    assert all(1e6 < mine < all_of_it for mine, all_of_it in zip(own, rss, strict=True))
    known = pages["queries"][0]
    assert known["name"] == "KnownPartitionQuery" and known["seconds"] > 0
    assert known["bytes"] > 1200 * len("category%20000") * 2, "the keys, and which of them are materialized"
    if "missing" not in pages:
        assert "PartitionHealthQuery" in {query["name"] for query in pages["queries"]}
        assert len(pages["page_seconds"]) == 1
    assert len(sensor["idle_ticks"]) == 3 and sensor["registering_ticks"]
    assert len(scenario_targets(dagster.SCENARIOS, document)) == 4
    assert "sensor at 1,200 partitions" in "\n".join(scenario_lines(dagster.SCENARIOS, document))


def test_queries_of_the_page_are_not_measured_without_a_browser() -> None:
    known = {"name": "k", "seconds": 1.0, "cpu_seconds": 0.5, "bytes": 9}
    statuses, page = pages_targets({"partitions": 3, "missing": "Chromium is not installed", "queries": [known]})
    assert statuses.met and page.met is None and page.note == "Chromium is not installed"
