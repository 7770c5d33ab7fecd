"""The metrics of a run: their names are documented, and their formulas are those of the paper."""

from __future__ import annotations

import json

import pytest

from surge_dagster.engine.encoder.metrics import Costs, overlap_ratio
from surge_dagster.engine.run.report import Failure, Prices, RunReport, SuperBatchReport

PROMISED = (
    "partitions_written partitions_skipped partitions_failed texts_encoded tokens truncated "
    "superbatches wall_seconds "
    "texts_per_second encode_seconds serialize_seconds upload_seconds "
    "time_to_first_output_seconds overlap_ratio "
    "duty_cycle exposed_io_seconds pool_start_seconds padding_ratio max_in_flight_texts "
    "peak_resident_bytes "
    "peak_rss_bytes space space_title dimension device hardware precision"
)
SUPERBATCH = SuperBatchReport(
    0,
    2,
    100,
    5000,
    Costs(tokens=900, padded_tokens=1000, encode_seconds=2.0, texts_computed=80, texts_encoded=100),
    truncated=1,
)


def test_document_has_every_documented_name_and_is_plain_json() -> None:
    report = RunReport(partitions_failed=[Failure("k", "why", transient=True)])
    document = json.loads(json.dumps(report.as_dict()))
    assert set(PROMISED.split()) <= document.keys()
    assert document["partitions_failed"] == [{"key": "k", "reason": "why"}]


def test_ratios_of_a_run_without_work_are_zero_or_one() -> None:
    document = RunReport().as_dict()
    assert document["texts_per_second"] == 0
    assert document["duty_cycle"] == 0
    assert document["padding_ratio"] == 0
    assert document["time_to_first_output_seconds"] is None


@pytest.mark.parametrize(
    ("io_seconds", "encode_seconds", "ratio"),
    [(0.0, 0.0, 1.0), (1.0, 2.0, 1.0), (2.0, 1.0, 0.5), (2.0, 0.0, 0.0)],
)
def test_overlap_is_the_share_of_io_that_encoding_hides(
    io_seconds: float, encode_seconds: float, ratio: float
) -> None:
    assert overlap_ratio(io_seconds, encode_seconds) == ratio


def test_speed_of_a_superbatch_counts_only_texts_that_its_call_computed() -> None:
    assert SUPERBATCH.texts_per_second == 40.0


def test_superbatch_without_an_encode_call_has_no_speed() -> None:
    reused = SuperBatchReport(0, 2, 100, 5000, Costs(rows_reused=100))
    assert reused.texts_per_second is None


def test_cost_is_the_price_of_all_machines_over_the_run() -> None:
    report = RunReport(run_seconds=1800.0, machines=3, prices=Prices(per_hour=2.0))

    assert report.cost == 3.0


def test_cost_per_million_texts_counts_texts_with_new_vectors() -> None:
    costs = Costs(texts_encoded=400_000, texts_deduplicated=100_000, rows_reused=50_000)
    report = RunReport(costs=costs, run_seconds=3600.0, prices=Prices(per_hour=2.0))

    assert report.cost_per_million_texts == pytest.approx(5.0)


def test_run_that_encoded_nothing_has_a_cost_and_none_per_million_texts() -> None:
    document = RunReport(run_seconds=36.0, prices=Prices(per_hour=1.0)).as_dict()

    assert document["cost"] == pytest.approx(0.01)
    assert document["cost_per_million_texts"] is None


def test_run_without_a_price_has_no_cost() -> None:
    assert RunReport(run_seconds=36.0).cost is None
