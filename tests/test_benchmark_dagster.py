"""What the benchmark of Dagster promises: its document and its aims, from a run of small size."""

from __future__ import annotations

import json

import pytest

from benchmarks import dagster
from benchmarks.dagster_pages import pages_targets


@pytest.mark.soak
def test_a_small_refresh_and_its_pages_give_the_promised_document() -> None:
    """Takes half a minute: a run, a webserver and a browser, each a process that starts."""
    words = ["--quick", "--scenarios", "refresh,pages", "--refresh-partitions", "1200"]
    document = json.loads(json.dumps(dagster.measure(dagster.parse(words))))
    refresh, pages = document["refresh"], document["pages"]
    assert refresh["partitions"] == pages["partitions"] == 1200
    assert refresh["partitions_per_second"] * refresh["seconds"] == pytest.approx(1200)
    own, rss = refresh["own_bytes_at_quarters"], refresh["rss_bytes_at_quarters"]
    assert len(own) == len(rss) == 4 and all(
        1e6 < mine < mine_and_shared for mine, mine_and_shared in zip(own, rss, strict=True)
    )
    known = pages["queries"][0]
    assert known["name"] == "KnownPartitionQuery" and known["seconds"] > 0
    assert known["bytes"] > 1200 * len("category%20000") * 2, "the keys, and which of them are materialized"
    if "missing" not in pages:
        asked = {query["name"] for query in pages["queries"]}
        assert "PartitionHealthQuery" in asked and len(asked) > 5
        assert len(pages["page_seconds"]) == 1
    names = [aim["name"] for aim in document["targets"]]
    assert names[1:] == [
        "s for all statuses of 1,200 partitions",
        "s for the page's slowest question, 1,200 partitions",
    ]


def test_without_a_browser_the_pages_own_questions_are_not_measured() -> None:
    found = {
        "partitions": 3,
        "missing": "no Chromium here",
        "queries": [{"name": "k", "seconds": 1.0, "cpu_seconds": 0.5, "bytes": 9}],
    }
    known, page = pages_targets(found)
    assert known.met and page.met is None and page.note == "no Chromium here"
