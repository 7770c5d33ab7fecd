"""The figures of a run: their names are a promise, and their formulas are the paper's."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from dataclasses import fields

import pytest

from surge_dagster.engine import report
from surge_dagster.engine.report import (
    _ADDED_UP,
    _PEAKS,
    Failure,
    MemoryGauge,
    RunReport,
    SuperBatchReport,
    overlap_ratio,
)

PROMISED = (
    "partitions_written partitions_skipped partitions_failed texts_encoded tokens truncated superbatches wall_seconds "
    "texts_per_second encode_seconds serialize_seconds upload_seconds time_to_first_output_seconds overlap_ratio "
    "duty_cycle exposed_io_seconds pool_start_seconds padding_ratio max_in_flight_texts peak_resident_bytes "
    "peak_rss_bytes space dimension device precision"
)
NOT_ADDED_UP = (
    "space dimension device precision encoder_notes workers b_min b_max partitions_written partitions_skipped "
    "partitions_failed time_to_first_output_seconds storage_retries"
)


def test_the_document_has_every_promised_name_and_is_plain_json() -> None:
    report = RunReport(partitions_failed=[Failure("k", "why", transient=True)])
    document = json.loads(json.dumps(report.as_dict()))
    assert set(PROMISED.split()) <= document.keys()
    assert document["partitions_failed"] == [{"key": "k", "reason": "why"}]


def test_a_run_that_did_nothing_divides_by_nothing() -> None:
    document = RunReport().as_dict()
    assert (document["texts_per_second"], document["duty_cycle"], document["padding_ratio"]) == (0, 0, 0)
    assert document["time_to_first_output_seconds"] is None


@pytest.mark.parametrize(
    ("io_seconds", "encode_seconds", "ratio"), [(0.0, 0.0, 1.0), (1.0, 2.0, 1.0), (2.0, 1.0, 0.5), (2.0, 0.0, 0.0)]
)
def test_the_overlap_is_the_share_of_io_that_encoding_hides(
    io_seconds: float, encode_seconds: float, ratio: float
) -> None:
    assert overlap_ratio(io_seconds, encode_seconds) == ratio


def test_superbatches_are_summed() -> None:
    figures = SuperBatchReport(0, 2, 100, 5000, 900, 1000, 1, 2.0, 0.5, 1.5, 0.25, 0.25, 0.5, 1.0, 1.0, 50.0)
    report = RunReport(wall_seconds=8.0)
    report.count_superbatch(figures)
    report.count_superbatch(figures)
    assert (report.superbatches, report.texts_encoded, report.encode_seconds) == (2, 200, 4.0)
    assert (report.texts_per_second, report.duty_cycle) == (25.0, 0.5)
    assert report.padding_ratio == pytest.approx(0.1)


def test_a_run_that_began_again_has_the_sums_the_ratios_of_the_sums_and_the_highest_peaks() -> None:
    figures = SuperBatchReport(0, 2, 100, 5000, 900, 1000, 1, 2.0, 0.5, 1.5, 0.25, 0.25, 0.5, 1.0, 1.0, 50.0)
    first = RunReport(
        "s", 16, "cuda:0", "fp16", ["a"], workers=2, wall_seconds=6.0, b_min=100, storage_retries={"503": 1}
    )
    first.count_superbatch(figures)
    first.time_to_first_output_seconds, first.peak_rss_bytes = 1.0, 9
    second = RunReport("s", 16, "cuda:0", "fp16", ["a", "b"], workers=2, wall_seconds=2.0, b_min=100)
    second.count_superbatch(figures)
    second.time_to_first_output_seconds, second.peak_rss_bytes, second.storage_retries = 0.5, 7, {"429": 2, "503": 1}
    both = second.after(first)
    assert (both.superbatches, both.texts_encoded, both.wall_seconds) == (2, 200, 8.0)
    assert (both.texts_per_second, both.duty_cycle, both.fill_ratio) == (25.0, 0.5, 1.0)
    assert (both.time_to_first_output_seconds, both.peak_rss_bytes) == (1.0, 9)
    assert (both.encoder_notes, both.storage_retries) == (["a", "b"], {"429": 2, "503": 2})
    found_all_fresh = RunReport("s", 16)
    assert found_all_fresh.after(first) == first, "an attempt without an encoder does not say which there was"
    others = {field.name for field in fields(RunReport)} - {*_ADDED_UP, *_PEAKS}
    assert others == set(NOT_ADDED_UP.split()), "a figure that is new is one or the other"


def test_the_gauge_sees_memory_that_is_taken() -> None:
    with MemoryGauge(interval_seconds=60) as gauge:
        held = bytearray(b"\1") * (200 << 20)
    assert gauge.peak_bytes > len(held)


def test_a_process_that_ends_while_it_is_looked_at_is_left_out() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert report._process_tree(ended.pid) == [ended.pid]
    with MemoryGauge(interval_seconds=60) as gauge, pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_process_tree", lambda _: [os.getpid(), ended.pid])
        gauge._sample()
    assert gauge.peak_bytes > 0


def test_the_gauge_ends_with_its_block() -> None:
    with MemoryGauge(interval_seconds=60) as gauge:
        pass
    assert not gauge._thread.is_alive()


def test_a_process_of_which_the_kernel_says_nothing_holds_up_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(report, "_pss_bytes", lambda _: answers.wait())
    monkeypatch.setattr(report, "_LAST_SAMPLE_SECONDS", 0.1)
    try:
        with MemoryGauge(interval_seconds=60) as gauge:
            pass
        assert gauge._thread.is_alive()
    finally:
        answers.set()
    gauge._thread.join()
