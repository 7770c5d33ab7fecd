"""When the stages of a run worked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.support.timeline import Lane, Span
from tests.engine.runs import finish, in_memory, make_run, of_kind
from tests.small_catalogs import DIMENSION, numbered_rows


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as started:
        yield started


def test_lane_sums_all_threads_and_spans_from_the_first_to_the_last() -> None:
    lane = Lane()
    assert lane.span(0) is None
    lane.add(12.0, 13.0)
    lane.add(11.0, 12.5)
    assert lane.span(10.0) == Span(1.0, 3.0, 2.5)


def test_superbatch_report_has_the_spans_of_its_stages(pool: EncoderPool, tmp_path: Path) -> None:
    catalog = {key: numbered_rows(key, 60) for key in "abcd"} | {
        "split": numbered_rows("split", 230)
    }
    run = make_run(pool, in_memory(catalog), tmp_path)
    reports = of_kind(finish(run), SuperBatchReport)
    reports.sort(key=lambda report: report.index)
    assert len(reports) > 4
    encoded = 0.0
    for report in reports:
        encode = report.encode_span
        serialize = report.serialize_span
        assert encode and serialize
        assert 0 <= encode.begun < encode.ended <= serialize.begun < serialize.ended
        assert encode.ended > encoded, "one ends before the next"
        encoded = encode.ended
        costs = report.costs
        assert encode.busy_seconds == costs.encode_seconds
        assert serialize.busy_seconds == costs.serialize_seconds
        assert 0 < report.peak_resident_bytes <= run.report.peak_resident_bytes
    assert run.report.fill_ratio == pytest.approx(
        run.report.texts_encoded / len(reports) / run.memory.bounds.b_min
    )
