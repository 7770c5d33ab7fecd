"""What runs and calibrations teach the planner: with an encoder of fixed costs and all else real,
and with reports made by hand."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.schedule import EncodeMetrics
from surge_dagster.engine.encoder.speed import Call, Speed, speed_of
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.plan.cost_model import (
    Flush,
    Io,
    io_costs,
    io_of,
    predict_flushes,
    store_kind,
)
from surge_dagster.engine.plan.planned_run import RunLog, calibrate, calls_of, known_costs, learning
from surge_dagster.engine.plan.planner import RunCosts, forecast
from surge_dagster.engine.run import encoding
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import RunReport, SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.support.timeline import Span
from tests.engine.priced_pool import C_IPC, C_TEXT, catalog
from tests.engine.runs import SMALL, assert_nothing_is_held, in_memory, make_run
from tests.engine.store.object_server import ObjectServer, open_bucket

SOME = SuperBatchReport(
    index=0,
    partitions=3,
    texts=100,
    text_bytes=4_700,
    costs=Costs(
        tokens=1_200,
        encode_seconds=2.0,
        texts_computed=100,
        texts_encoded=100,
        read_seconds=0.25,
        serialize_seconds=0.3,
        upload_seconds=0.4,
        publish_seconds=0.5,
    ),
    encode_span=Span(1.0, 3.0),
    serialize_span=Span(3.1, 3.4),
)


def superbatch_of(**costs: float) -> SuperBatchReport:
    """SOME with other costs."""
    return replace(SOME, costs=replace(SOME.costs, **costs))


def finish_learning(
    pool: Any, sizes: list[int], output: Path, thresholds: Thresholds = SMALL
) -> EmbeddingRun:
    """A run that has ended, and taught the pool's calibration."""
    run = make_run(pool, in_memory(catalog(sizes)), output, thresholds)
    list(learning(run, pool, open_store(output)))
    assert_nothing_is_held(run)
    return run


def test_prediction_equals_what_an_encoder_of_fixed_costs_takes(
    priced_pool: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    for attempt in range(2):
        sizes = rng.integers(0, 90, 20).tolist()
        costs = known_costs(priced_pool, open_store(tmp_path))
        run = finish_learning(priced_pool, sizes, tmp_path / str(attempt), Thresholds(b_min=100))
        predicted = forecast(predict_flushes(sizes, run.memory.bounds), costs)
        assert run.report.superbatches == len(predict_flushes(sizes, run.memory.bounds))
        assert predicted.encode_seconds == pytest.approx(run.report.costs.encode_seconds, rel=1e-4)
        assert priced_pool.speed.call_seconds == pytest.approx(C_IPC, rel=1e-3)


def test_report_of_a_run_has_prediction_and_outcome_side_by_side(
    priced_pool: Any, tmp_path: Path
) -> None:
    assert RunReport().as_dict()["prediction_error"] is None
    report = finish_learning(priced_pool, [30, 40], tmp_path).report.as_dict()
    assert report["predicted_wall_seconds"] == pytest.approx(C_IPC + C_TEXT * 70, rel=1e-4)
    assert report["prediction_error"] == pytest.approx(
        report["predicted_wall_seconds"] / report["wall_seconds"] - 1
    )


def test_run_without_anything_to_encode_has_no_prediction(priced_pool: Any, tmp_path: Path) -> None:
    finish_learning(priced_pool, [30], tmp_path)
    again = finish_learning(priced_pool, [30], tmp_path)
    assert again.report.superbatches == 0
    assert again.report.predicted_wall_seconds is None
    assert again.report.prediction_error is None


def test_pool_that_goes_on_predicts_its_next_run_by_the_last_one(
    priced_pool: Any, tmp_path: Path
) -> None:
    before = priced_pool.speed.tokens_per_text
    run = finish_learning(priced_pool, [30, 40], tmp_path)
    assert priced_pool.speed.tokens_per_text == run.report.costs.tokens / 70 != before


def test_closed_events_stop_the_run_and_teach_nothing(priced_pool: Any, tmp_path: Path) -> None:
    run = make_run(priced_pool, in_memory(catalog([60] * 20)), tmp_path)
    with contextlib.closing(learning(run, priced_pool, open_store(tmp_path))) as events:
        next(events)
    assert run.stopped
    assert run.report.predicted_wall_seconds is None
    assert priced_pool.calibration.observations("runs cpu") == []


def test_run_teaches_the_costs_of_publishing_to_its_store(priced_pool: Any, tmp_path: Path) -> None:
    finish_learning(priced_pool, [60, 10, 80, 30], tmp_path)
    rows = priced_pool.calibration.observations("io local")
    assert [row[0] for row in rows] == [1, 2, 1]  # files of each SuperBatch
    costs = known_costs(priced_pool, open_store(tmp_path)).io
    assert costs.publish.sum() > 0
    assert costs.read.sum() > 0


def test_log_predicts_all_superbatches_and_keeps_the_newest(
    priced_pool: Any, tmp_path: Path
) -> None:
    log = RunLog(priced_pool, open_store(tmp_path))
    report = RunReport()
    last = 5_000
    for index in [*range(last), last + 1, last]:  # a SuperBatch may be published after the next one
        log.add(replace(SOME, index=index, encode_span=Span(2.0 * index, 2.0 * index + 2)))

    log.end(report)

    expected = (last + 2) * (C_IPC + C_TEXT * 100)
    assert report.predicted_wall_seconds == pytest.approx(expected, rel=1e-4)
    assert len(priced_pool.calibration.observations("runs cpu")) == 256


def test_only_texts_that_were_encoded_count() -> None:
    [call] = calls_of(
        [superbatch_of(texts_encoded=80, texts_deduplicated=32, texts_computed=50, tokens=600)]
    )
    assert call.texts == 50
    assert call.text_bytes == 3_854
    assert call.tokens == 600
    assert call.equal_texts == 32
    speed = Speed(0.0, 1.0).of_texts([call])
    assert speed.equal_share == 32 / 82
    assert speed.tokens_per_text == 12
    assert calls_of([superbatch_of(texts_encoded=0, texts_computed=0)]) == []


def test_calls_do_not_count_what_reading_and_publishing_took_of_their_cores() -> None:
    [call] = calls_of([superbatch_of(host_seconds=0.5)], core_share=0.25)

    assert call.seconds == pytest.approx(2.0 - 0.125)


def test_costs_that_a_run_taught_predict_the_same_run() -> None:
    run = [superbatch_of(encode_seconds=1.2, host_seconds=0.4)] * 20
    calls = calls_of(run, core_share=0.5)
    speed = speed_of([Call(1, 50, 12, 0.01)] * 3, calls)
    io = io_costs([io_of(superbatch, 64) for superbatch in run])
    flushes = [Flush(each.texts, each.partitions, each.text_bytes) for each in run]

    found = forecast(flushes, RunCosts(speed, io, 64, core_share=0.5))

    assert found.encode_seconds == pytest.approx(20 * 1.2, rel=0.01)


def test_processor_seconds_outside_of_the_calls_do_not_count(
    priced_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SimpleNamespace(wall=0.0, processor=0.0)
    monkeypatch.setattr(encoding.time, "perf_counter", lambda: clocks.wall)
    monkeypatch.setattr(encoding.time, "process_time", lambda: clocks.processor)
    measures = encoding._Measures(0.0, priced_pool)
    call: Any = SimpleNamespace(
        metrics=EncodeMetrics(Costs(encode_seconds=1.0)), batch=None, deduplicated=0
    )

    found: list[float] = []
    for wall, processor in ((10.0, 4.0), (11.0, 4.5)):
        clocks.wall = wall
        clocks.processor = processor
        found.append(measures.of(call).metrics.costs.host_seconds)

    assert found == [0.4, 0.5]


def test_run_teaches_the_processor_seconds_of_its_own_process(
    priced_pool: Any, tmp_path: Path
) -> None:
    finish_learning(priced_pool, [60, 10, 80, 30], tmp_path)

    assert known_costs(priced_pool, open_store(tmp_path)).io.host.sum() > 0


def test_calls_whose_time_says_nothing_are_left_out() -> None:
    assert calls_of([superbatch_of(replays=1), replace(SOME, encode_span=None)]) == []


def test_next_run_and_its_plan_have_the_b_min_that_a_run_showed(
    priced_pool: Any, tmp_path: Path
) -> None:
    run_log = RunLog(priced_pool, open_store(tmp_path))
    for index in range(9):
        run_log.add(replace(superbatch_of(texts_computed=10_000), index=index))

    run_log.end(RunReport())

    assert priced_pool.speed.b_min == 25_000
    assert known_costs(priced_pool, open_store(tmp_path)).speed.b_min == 25_000


def test_publishing_does_not_count_the_wait_for_the_superbatch_before() -> None:
    # its threads began 0.1 s after the call
    assert io_of(SOME, 64).publish_seconds == pytest.approx(0.4)
    assert io_of(SOME, 64).file_bytes == 4_700 + 6_400


# A SuperBatch of one partition on 2 cores of AMD Zen 4.
LARGE = Io(1, 780, 0, 1.3e6, read_seconds=0.004, publish_seconds=0.014, host_seconds=0.05)


def test_superbatch_of_one_partition_does_not_make_thousands_of_files_expensive() -> None:
    """5,222 texts in 1,102 partitions took 1.3 s of a processor and 1.3 s of publishing there."""
    found = io_costs([LARGE])

    assert found.host @ [5, 1_102] == pytest.approx(1.3, rel=0.25)
    assert found.publish @ [5, 1_102, 8.5e6] == pytest.approx(1.3, rel=0.25)


@pytest.mark.parametrize("stalled", [{}, {"read_seconds": 9.0, "publish_seconds": 600.0}])
def test_costs_follow_the_pace_of_superbatches(stalled: dict[str, float]) -> None:
    usual = io_costs([LARGE])
    slow = replace(LARGE, read_seconds=0.012, publish_seconds=0.042, host_seconds=0.15)

    found = io_costs([slow, replace(slow, **stalled), slow])

    assert found.read == pytest.approx(3 * usual.read)
    assert found.publish == pytest.approx(3 * usual.publish)
    assert found.host == pytest.approx(3 * usual.host)


def test_buckets_and_the_local_disk_have_costs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert (
        store_kind(open_store(tmp_path / "a")) == store_kind(open_store(tmp_path / "b")) == "local"
    )
    one, deeper, other = map(open_store, ("s3://shop/one", "s3://shop/other/deep", "s3://mall/one"))
    assert store_kind(one) == store_kind(deeper) == "s3://shop"
    assert store_kind(other) == "s3://mall"


def kept(pool: Any) -> list[list[float]]:
    """The calls of runs that the pool's calibration has."""
    return pool.calibration.observations("runs cpu")


def listed(sizes: list[int]) -> list[Partition]:
    return [
        replace(one, rows=rows) for one, rows in zip(in_memory(catalog(sizes)), sizes, strict=True)
    ]


def test_calibration_forgets_earlier_runs_and_leaves_no_file(
    priced_pool: Any, tmp_path: Path
) -> None:
    priced_pool.calibration.observe("runs cpu", [[1, 1, 1, 99.0, 0]])
    output = str(tmp_path / "not" / "there")

    encoded = calibrate(listed([70, 3, 50] * 80), output, StorageOptions(), priced_pool)

    assert encoded == pytest.approx(2_000, rel=0.1)  # twenty seconds of them
    assert list(tmp_path.iterdir()) == []
    assert 99.0 not in [seconds for _, _, _, seconds, _ in kept(priced_pool)]
    assert priced_pool.speed.is_learned


@pytest.mark.parametrize(("sizes", "encoded"), [([], 0), ([0], 0), ([2], 2)])
def test_calibration_with_too_few_texts_keeps_the_costs_of_the_start(
    priced_pool: Any, tmp_path: Path, sizes: list[int], encoded: int
) -> None:
    assert calibrate(listed(sizes), str(tmp_path), StorageOptions(), priced_pool) == encoded
    assert priced_pool.speed.call_seconds == pytest.approx(C_IPC, rel=1e-3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "counted", "seconds", "encoded"),
    [
        ([70, 3, 700], lambda rows: None, 20.0, 70 + 3 + 256),
        ([70, 90], lambda rows: 100, 20.0, 160),  # with rows that are left out
        ([0] * 50 + [3_000], lambda rows: rows, 10.0, 1_000),  # empty ones give no rows
        ([70], lambda rows: rows, 1e-3, 1),  # however long it seems
    ],
)
def test_calibration_encodes_what_its_seconds_allow(
    priced_pool: Any, tmp_path: Path, sizes: list[int], counted: Any, seconds: float, encoded: int
) -> None:
    partitions = [replace(each, rows=counted(each.rows)) for each in listed(sizes)]
    assert (
        calibrate(partitions, str(tmp_path), StorageOptions(), priced_pool, seconds=seconds)
        == encoded
    )


def test_calibration_keeps_the_thresholds_and_the_memory_limit_of_the_run(
    priced_pool: Any, tmp_path: Path
) -> None:
    partitions = listed([70] * 40)
    options = StorageOptions()
    calibrate(
        partitions, str(tmp_path), options, priced_pool, thresholds=Thresholds(b_min=300, b_max=350)
    )
    assert max(texts for texts, *_ in kept(priced_pool)) <= 350
    with pytest.raises(ConfigError, match="memory_limit_bytes"):
        calibrate(partitions, str(tmp_path), options, priced_pool, memory_limit_bytes=1_000_000)


def test_calibration_replaces_the_files_of_a_killed_one_in_a_bucket(
    priced_pool: Any, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bucket(object_server)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", lambda self, name: None)
        assert calibrate(listed([70, 30]), store.url, object_server.options, priced_pool) == 100
    assert object_server.objects(), "as after a kill"
    assert calibrate(listed([70, 30]), store.url, object_server.options, priced_pool) == 100
    assert object_server.objects() == {}
    assert known_costs(priced_pool, store).io.publish.sum() > 0
