"""A whole run, from partitions to files, with real worker processes whose vectors can be
recomputed."""

from __future__ import annotations

import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import (
    Output,
    finish,
    in_memory,
    limit_bytes,
    of_kind,
    receipts,
)
from tests.small_catalogs import (
    DIMENSION,
    ids_of,
    keys_of,
    numbered_catalog,
    numbered_rows,
    partition_of,
    write_catalog,
    write_partition,
)

CATALOG = {
    "a": numbered_rows("a", 30),
    "b": numbered_rows("b", 45),
    "c": [],
    "d": numbered_rows("d", 5),
}


_SHARED_FACTS = ("rows", "dimension", "truncated", "space")
_SHARED_FACTS += ("source_version", "content_digest", "desired_version")


@settings(max_examples=15)
@given(data=st.data())
def test_random_catalogs_are_embedded_correctly(
    hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    output = Output(hash_pool, tmp_path_factory.mktemp("random"))
    sizes = data.draw(st.lists(st.integers(0, 60) | st.integers(0, 400), max_size=12))
    b_max = data.draw(st.integers(1, 150))
    thresholds = Thresholds(data.draw(st.integers(1, b_max)), b_max)
    catalog = numbered_catalog(sizes, words=data.draw(st.integers(0, 4)))
    with pytest.MonkeyPatch.context() as patch:
        limit_bytes(patch, data.draw(st.integers(4096, 65536)))
        run = output.run(in_memory(catalog), thresholds)
        superbatches = of_kind(finish(run), SuperBatchReport)
    output.check_all(catalog)
    assert run.report.texts_encoded == sum(sizes)
    assert run.report.max_in_flight_texts <= sum(sizes)
    for superbatch in superbatches:
        assert superbatch.texts <= b_max


@pytest.mark.parametrize("kind", [pa.int64(), pa.binary()])
def test_ids_keep_their_type(output: Output, tmp_path: Path, kind: pa.DataType) -> None:
    ids = [*range(120)] if kind == pa.int64() else [*map(str.encode, string.printable)]
    rows = [(row_id, f"text {row_id}") for row_id in ids]
    write_partition(tmp_path / "c", "k", rows, id_type=kind)
    write_partition(tmp_path / "c", "none", [], id_type=kind)
    output.embed(open_source(tmp_path / "c"))
    for key in ("k", "none"):
        assert pq.read_schema(output.path(key)).field("id").type == kind
    assert output.read("k").ids == ids


def test_texts_can_be_left_out(output: Output) -> None:
    output.embed(in_memory(CATALOG), include_text=False)
    assert output.read("a").texts is None


def test_truncated_texts_are_counted(output: Output) -> None:
    long = "x" * 5000  # hash:// counts a token for every four bytes and takes 256
    catalog = {
        "some": [("1", long), ("2", "short"), ("3", long)],
        "split": [(str(n), long) for n in range(120)],
    }
    run = output.run(in_memory(catalog))
    for receipt in receipts(finish(run)):
        expected = {"some": 2, "split": 120}[receipt.key]
        assert receipt.truncated == output.read(receipt.key).facts.truncated == expected
    assert run.report.truncated == 122


def test_receipts_match_the_published_files(output: Output) -> None:
    run = output.run(in_memory(CATALOG | {"split": numbered_rows("split", 250)}))
    for receipt in receipts(finish(run)):
        path = Path(receipt.path)
        facts = output.read(receipt.key).facts
        assert path == output.path(receipt.key)
        assert receipt.bytes == path.stat().st_size
        assert receipt.etag == str(path.stat().st_mtime_ns)
        for name in _SHARED_FACTS:
            assert getattr(receipt, name) == getattr(facts, name), name
        assert facts.model == f"hash://{DIMENSION}"
        assert facts.precision == "fp32"


def test_superbatch_is_reported_before_the_partitions_it_completed(output: Output) -> None:
    run = output.run(in_memory(CATALOG | {"split": numbered_rows("split", 250)}))
    reported: set[int] = set()
    for event in finish(run):
        if isinstance(event, SuperBatchReport):
            reported.add(event.index)
        else:
            assert event.superbatch in reported


def test_iterating_a_run_yields_receipts_of_published_partitions_only(output: Output) -> None:
    output.events(in_memory({"a": CATALOG["a"]}))
    again = output.run(in_memory(CATALOG))
    assert keys_of(again) == ["b", "c", "d"]


def test_second_iteration_of_a_run_is_refused(output: Output) -> None:
    run = output.embed(in_memory(CATALOG))
    with pytest.raises(RuntimeError, match="runs once"):
        list(run)


def test_report_has_the_sums_of_the_events(output: Output) -> None:
    run = output.run(in_memory(CATALOG | {"split": numbered_rows("split", 250)}))
    superbatches = of_kind(finish(run), SuperBatchReport)
    document = run.report.as_dict()
    assert document["partitions_written"] == 5
    texts = 0
    tokens = 0
    indexes: list[int] = []
    for batch in superbatches:
        texts += batch.texts
        tokens += batch.costs.tokens
        indexes.append(batch.index)
    assert document["texts_encoded"] == texts == 330
    assert document["tokens"] == tokens > 0
    assert document["superbatches"] == len(superbatches)
    assert sorted(indexes) == list(range(len(superbatches)))
    assert 0 < document["time_to_first_output_seconds"] <= document["wall_seconds"]
    assert document["peak_resident_bytes"] > 0
    assert document["peak_rss_bytes"] > 0
    assert 0 <= document["duty_cycle"] <= 1
    assert 0 <= document["overlap_ratio"] <= 1
    assert document["space"] == output.space
    assert document["dimension"] == DIMENSION
    assert document["precision"] == "fp32"


def test_other_text_column_makes_existing_files_stale(output: Output, tmp_path: Path) -> None:
    catalog = write_catalog(tmp_path / "catalog", CATALOG)
    output.events(open_source(catalog))
    run = output.run(open_source(catalog, selection=Selection(text="id")))
    events = finish(run)
    assert keys_of(receipts(events, "encoded")) == ["a", "b", "d"]
    assert keys_of(receipts(events, "republished")) == ["c"], "it has no rows"
    for key, rows in CATALOG.items():
        ids = ids_of(rows)
        output.check(key, list(zip(ids, ids, strict=True)))


def test_fewer_rows_than_announced_is_a_transient_failure(output: Output) -> None:
    rows = CATALOG["a"]
    short = Partition("k", "v1", partition_of("k", rows).read, lambda: "v1", rows=len(rows) + 1)
    failure = output.failure([short, partition_of("other", rows)])
    assert failure.key == "k"
    assert failure.transient
    assert "31 rows were announced and 30 came" in failure.reason
    assert output.keys() == {"other"}


def test_run_reports_no_start_of_a_pool_that_another_started(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.pool.start()
    monkeypatch.setattr(output.pool, "start_seconds", 1_000.0)
    run = output.run([partition_of("a", numbered_rows("a", 3))])

    finish(run)

    assert run.report.pool_start_seconds < 1_000.0
