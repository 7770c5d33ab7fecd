"""The metrics of a run that Dagster began again."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.run.report import RunReport, SuperBatchReport
from surge_dagster.orchestration.attempts import ADDED_UP, PEAKS, combined

SUPERBATCH = SuperBatchReport(
    0,
    2,
    100,
    5000,
    Costs(tokens=900, padded_tokens=1000, encode_seconds=2.0, texts_computed=100, texts_encoded=100),
    truncated=1,
)
NOT_ADDED_UP = (
    "costs predicted_wall_seconds call_seconds "
    "space space_title dimension device hardware precision encoder_notes workers b_min b_max machines "
    "price_per_hour partitions_written partitions_skipped partitions_failed time_to_first_output_seconds "
    "storage_retries"
)


def test_retried_run_has_sums_ratios_of_sums_and_highest_peaks() -> None:
    same: Any = {"dimension": 16, "device": "cuda:0", "precision": "fp16", "workers": 2, "b_min": 100}
    first = RunReport("s", **same, encoder_notes=["a"], wall_seconds=6.0, storage_retries={"503": 1})
    first.count(SUPERBATCH, 0.0)
    first.time_to_first_output_seconds, first.peak_rss_bytes = 1.0, 9
    second = RunReport("s", **same, encoder_notes=["a", "b"], wall_seconds=2.0)
    second.count(SUPERBATCH, 0.0)
    second.time_to_first_output_seconds, second.peak_rss_bytes, second.storage_retries = 0.5, 7, {"429": 2, "503": 1}
    both = combined(first, second)
    assert (both.superbatches, both.texts_encoded, both.wall_seconds) == (2, 200, 8.0)
    assert (both.texts_per_second, both.duty_cycle, both.fill_ratio) == (25.0, 0.5, 1.0)
    assert (both.time_to_first_output_seconds, both.peak_rss_bytes) == (1.0, 9)
    assert (both.encoder_notes, both.storage_retries) == (["a", "b"], {"429": 2, "503": 2})
    found_all_fresh = RunReport("s", dimension=16)
    assert combined(first, found_all_fresh) == first, "an attempt without an encoder does not say which there was"
    others = {field.name for field in fields(RunReport)} - {*ADDED_UP, *PEAKS}
    assert others == set(NOT_ADDED_UP.split()), "a new metric is one or the other"


def test_attempts_of_a_run_add_up_their_predictions() -> None:
    first = RunReport(superbatches=1, wall_seconds=10.0, predicted_wall_seconds=11.0)
    second = RunReport(superbatches=2, wall_seconds=10.0, predicted_wall_seconds=13.0)
    both = combined(first, second)
    assert (both.predicted_wall_seconds, both.prediction_error) == (24.0, pytest.approx(0.2))
    assert combined(first, RunReport()).predicted_wall_seconds == 11.0, "the second attempt had nothing left"
    assert combined(replace(first, predicted_wall_seconds=None), second).predicted_wall_seconds is None
    assert combined(RunReport(), RunReport()).predicted_wall_seconds is None
