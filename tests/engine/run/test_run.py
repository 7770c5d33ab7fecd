"""A whole run, from partitions to files, with real worker processes whose vectors can be
recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import (
    completed,
    failures,
    finish,
    in_memory,
    limit_bytes,
    make_run,
    of_kind,
    receipts,
)
from tests.small_catalogs import (
    DIMENSION,
    assert_embedded,
    keys_of,
    numbered_rows,
    partition_of,
    published_files,
    read_embedded,
    write_catalog,
    write_partition,
)

CATALOG = {
    "a": numbered_rows("a", 30),
    "b": numbered_rows("b", 45),
    "c": [],
    "d": numbered_rows("d", 5),
}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_catalogs_are_embedded_correctly(
    hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    output = tmp_path_factory.mktemp("random")
    sizes = data.draw(st.lists(st.integers(0, 60) | st.integers(0, 400), max_size=12))
    b_max = data.draw(st.integers(1, 150))
    thresholds = Thresholds(data.draw(st.integers(1, b_max)), b_max)
    catalog = {f"p{n}": numbered_rows(f"p{n}", size, words=n % 5) for n, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        limit_bytes(patch, data.draw(st.integers(4096, 65536)))
        run = make_run(hash_pool, in_memory(catalog), output, thresholds)
        events = finish(run)
    for key, rows in catalog.items():
        assert_embedded(output, run.space.name, key, rows)
    assert run.report.texts_encoded == sum(sizes)
    assert run.report.max_in_flight_texts <= sum(sizes)
    assert {report.texts for report in events if isinstance(report, SuperBatchReport)} <= set(
        range(b_max + 1)
    )


@pytest.mark.parametrize("kind", [pa.int64(), pa.binary()])
def test_ids_keep_their_type(hash_pool: EncoderPool, tmp_path: Path, kind: pa.DataType) -> None:
    make = int if kind == pa.int64() else (lambda n: bytes([n]))
    write_partition(tmp_path / "c", "k", [(make(n), f"text {n}") for n in range(120)], id_type=kind)
    write_partition(tmp_path / "c", "none", [], id_type=kind)
    run = completed(make_run(hash_pool, open_source(tmp_path / "c"), tmp_path / "o"))
    for key in ("k", "none"):
        assert (
            pq.read_schema(tmp_path / "o" / file_name(run.space.name, key)).field("id").type == kind
        )
    assert read_embedded(tmp_path / "o", run.space.name, "k").ids == [make(n) for n in range(120)]


def test_texts_can_be_left_out(hash_pool: EncoderPool, tmp_path: Path) -> None:
    run = completed(make_run(hash_pool, in_memory(CATALOG), tmp_path, include_text=False))
    assert read_embedded(tmp_path, run.space.name, "a").texts is None


def test_truncated_texts_are_counted(hash_pool: EncoderPool, tmp_path: Path) -> None:
    long = "x" * 5000  # hash:// counts a token for every four bytes and takes 256
    catalog = {
        "some": [("1", long), ("2", "short"), ("3", long)],
        "split": [(str(n), long) for n in range(120)],
    }
    run = make_run(hash_pool, in_memory(catalog), tmp_path)
    events = finish(run)
    assert {receipt.key: receipt.truncated for receipt in receipts(events)} == {
        "some": 2,
        "split": 120,
    }
    assert run.report.truncated == 122
    assert read_embedded(tmp_path, run.space.name, "split").facts.truncated == 120


def test_receipts_match_the_published_files(hash_pool: EncoderPool, tmp_path: Path) -> None:
    run = make_run(hash_pool, in_memory(CATALOG | {"split": numbered_rows("split", 250)}), tmp_path)
    for receipt in receipts(finish(run)):
        path = Path(receipt.path)
        facts = read_embedded(tmp_path, run.space.name, receipt.key).facts
        assert path == tmp_path / file_name(run.space.name, receipt.key)
        assert receipt.bytes == path.stat().st_size
        assert receipt.etag == str(path.stat().st_mtime_ns)
        for name in [
            "rows",
            "dimension",
            "truncated",
            "source_version",
            "content_digest",
            "desired_version",
            "space",
        ]:
            assert getattr(receipt, name) == getattr(facts, name), name
        assert facts.model == f"hash://{DIMENSION}"
        assert facts.precision == "fp32"


def test_superbatch_is_reported_before_the_partitions_it_completed(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run = make_run(hash_pool, in_memory(CATALOG | {"split": numbered_rows("split", 250)}), tmp_path)
    reported: set[int] = set()
    for event in finish(run):
        if isinstance(event, SuperBatchReport):
            reported.add(event.index)
        else:
            assert event.superbatch in reported


def test_iterating_a_run_yields_receipts_of_published_partitions_only(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    finish(make_run(hash_pool, in_memory({"a": CATALOG["a"]}), tmp_path))
    again = make_run(hash_pool, in_memory(CATALOG), tmp_path)
    assert keys_of(again) == ["b", "c", "d"]


def test_second_iteration_of_a_run_is_refused(hash_pool: EncoderPool, tmp_path: Path) -> None:
    run = completed(make_run(hash_pool, in_memory(CATALOG), tmp_path))
    with pytest.raises(RuntimeError, match="runs once"):
        list(run)


def test_report_has_the_sums_of_the_events(hash_pool: EncoderPool, tmp_path: Path) -> None:
    run = make_run(hash_pool, in_memory(CATALOG | {"split": numbered_rows("split", 250)}), tmp_path)
    superbatches = of_kind(finish(run), SuperBatchReport)
    document = run.report.as_dict()
    assert document["partitions_written"] == 5
    assert document["texts_encoded"] == sum(batch.texts for batch in superbatches) == 330
    assert document["tokens"] == sum(batch.costs.tokens for batch in superbatches) > 0
    assert document["superbatches"] == len(superbatches)
    assert sorted(batch.index for batch in superbatches) == list(range(len(superbatches)))
    assert 0 < document["time_to_first_output_seconds"] <= document["wall_seconds"]
    assert document["peak_resident_bytes"] > 0
    assert document["peak_rss_bytes"] > 0
    assert 0 <= document["duty_cycle"] <= 1
    assert 0 <= document["overlap_ratio"] <= 1
    assert document["space"] == run.space.name
    assert document["dimension"] == DIMENSION
    assert document["precision"] == "fp32"


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    return write_catalog(tmp_path / "catalog", CATALOG)


def test_fresh_partition_is_skipped_without_being_read(
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path
) -> None:
    finish(make_run(hash_pool, open_source(catalog), tmp_path / "out"))

    def unreadable() -> Iterator[Partition]:
        for partition in open_source(catalog):
            yield Partition(
                partition.key,
                partition.source_version,
                lambda: pytest.fail("it was read"),
                lambda: None,
            )

    run = make_run(hash_pool, unreadable(), tmp_path / "out")
    assert keys_of(receipts(finish(run), "fresh")) == sorted(CATALOG)
    assert run.report.partitions_skipped == 4
    assert run.report.partitions_written == 0
    assert run.report.texts_encoded == 0


def test_other_text_column_makes_existing_files_stale(
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path
) -> None:
    finish(make_run(hash_pool, open_source(catalog), tmp_path / "out"))
    run = make_run(
        hash_pool, open_source(catalog, selection=Selection(text="id")), tmp_path / "out"
    )
    events = finish(run)
    assert keys_of(receipts(events, "encoded")) == ["a", "b", "d"]
    assert keys_of(receipts(events, "republished")) == ["c"], "it has no rows"
    for key, rows in CATALOG.items():
        assert_embedded(tmp_path / "out", run.space.name, key, [(row[0], row[0]) for row in rows])


def test_fewer_rows_than_announced_is_a_transient_failure(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    rows = CATALOG["a"]
    short = Partition("k", "v1", partition_of("k", rows).read, lambda: "v1", rows=len(rows) + 1)
    run = make_run(hash_pool, [short, partition_of("other", rows)], tmp_path)
    [failure] = failures(finish(run))
    assert failure.key == "k"
    assert failure.transient
    assert "31 rows were announced and 30 came" in failure.reason
    assert published_files(tmp_path, run.space.name) == {"other.parquet"}


def test_run_reports_no_start_of_a_pool_that_another_started(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_pool.start()
    monkeypatch.setattr(hash_pool, "start_seconds", 1_000.0)
    run = make_run(hash_pool, [partition_of("a", numbered_rows("a", 3))], tmp_path / "out")

    finish(run)

    assert run.report.pool_start_seconds < 1_000.0
