"""The metrics of a run: their names are documented, and their formulas are those of the paper."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from surge_dagster.engine.encoder.metrics import Costs, overlap_ratio
from surge_dagster.engine.run.report import _ADDED_UP, _PEAKS, Failure, RunReport, SuperBatchReport

PROMISED = (
    "partitions_written partitions_skipped partitions_failed texts_encoded tokens truncated superbatches wall_seconds "
    "texts_per_second encode_seconds serialize_seconds upload_seconds time_to_first_output_seconds overlap_ratio "
    "duty_cycle exposed_io_seconds pool_start_seconds padding_ratio max_in_flight_texts peak_resident_bytes "
    "peak_rss_bytes space space_title dimension device hardware precision"
)
SUPERBATCH = SuperBatchReport(
    0, 2, 100, 5000, Costs(tokens=900, padded_tokens=1000, encode_seconds=2.0, texts_encoded=100), truncated=1
)
NOT_ADDED_UP = (
    "costs predicted_wall_seconds call_seconds "
    "space space_title dimension device hardware precision encoder_notes workers b_min b_max partitions_written "
    "partitions_skipped partitions_failed time_to_first_output_seconds storage_retries"
)


def test_document_has_every_documented_name_and_is_plain_json() -> None:
    report = RunReport(partitions_failed=[Failure("k", "why", transient=True)])
    document = json.loads(json.dumps(report.as_dict()))
    assert set(PROMISED.split()) <= document.keys()
    assert document["partitions_failed"] == [{"key": "k", "reason": "why"}]


def test_ratios_of_a_run_without_work_are_zero_or_one() -> None:
    document = RunReport().as_dict()
    assert (document["texts_per_second"], document["duty_cycle"], document["padding_ratio"]) == (0, 0, 0)
    assert document["time_to_first_output_seconds"] is None


@pytest.mark.parametrize(
    ("io_seconds", "encode_seconds", "ratio"), [(0.0, 0.0, 1.0), (1.0, 2.0, 1.0), (2.0, 1.0, 0.5), (2.0, 0.0, 0.0)]
)
def test_overlap_is_the_share_of_io_that_encoding_hides(io_seconds: float, encode_seconds: float, ratio: float) -> None:
    assert overlap_ratio(io_seconds, encode_seconds) == ratio


def test_superbatches_are_summed() -> None:
    report = RunReport(wall_seconds=8.0)
    for _ in range(2):
        report.count_superbatch(SUPERBATCH)
    assert (report.superbatches, report.texts_encoded, report.costs.encode_seconds) == (2, 200, 4.0)
    assert (report.texts_per_second, report.duty_cycle) == (25.0, 0.5)
    assert report.costs.padding_ratio == pytest.approx(0.1)


def test_retried_run_has_sums_ratios_of_sums_and_highest_peaks() -> None:
    same: Any = {"dimension": 16, "device": "cuda:0", "precision": "fp16", "workers": 2, "b_min": 100}
    first = RunReport("s", **same, encoder_notes=["a"], wall_seconds=6.0, storage_retries={"503": 1})
    first.count_superbatch(SUPERBATCH)
    first.time_to_first_output_seconds, first.peak_rss_bytes = 1.0, 9
    second = RunReport("s", **same, encoder_notes=["a", "b"], wall_seconds=2.0)
    second.count_superbatch(SUPERBATCH)
    second.time_to_first_output_seconds, second.peak_rss_bytes, second.storage_retries = 0.5, 7, {"429": 2, "503": 1}
    both = second.after(first)
    assert (both.superbatches, both.texts_encoded, both.wall_seconds) == (2, 200, 8.0)
    assert (both.texts_per_second, both.duty_cycle, both.fill_ratio) == (25.0, 0.5, 1.0)
    assert (both.time_to_first_output_seconds, both.peak_rss_bytes) == (1.0, 9)
    assert (both.encoder_notes, both.storage_retries) == (["a", "b"], {"429": 2, "503": 2})
    found_all_fresh = RunReport("s", dimension=16)
    assert found_all_fresh.after(first) == first, "an attempt without an encoder does not say which there was"
    others = {field.name for field in fields(RunReport)} - {*_ADDED_UP, *_PEAKS}
    assert others == set(NOT_ADDED_UP.split()), "a new metric is one or the other"
