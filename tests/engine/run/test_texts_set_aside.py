"""Texts that end workers are set aside: their partitions are published without these rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.rejected import list_name
from surge_dagster.engine.run import read_again
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RejectedRow, RowBatch
from surge_dagster.engine.store import open_store
from surge_dagster.engine.verify.verification import Verified, verify_partition
from tests.engine.runs import failures, finish, make_run, receipts
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    assert_embedded,
    numbered_rows,
    partition_of,
    row_batch_of,
)

pytestmark = pytest.mark.processes

LARGE = Thresholds(b_min=100_000, b_max=100_000)
SMALL = Thresholds(b_min=100, b_max=200)
REASON = "its text ends every worker that encodes it ("


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncoderPool]:
    """A pool of two workers in which texts do harm; see `encoder/faults.py`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "encoder"))
    spec = EncodingSpec(f"hash://{DIMENSION}")
    with EncoderPool(
        spec, devices="cpu,cpu", backend="faults:FaultyBackend", max_respawns=20
    ) as started:
        started.start()
        yield started


def with_texts(rows: Rows, texts: dict[int, str]) -> Rows:
    return [(id, texts.get(row, text)) for row, (id, text) in enumerate(rows)]


def without(rows: Rows, *places: int) -> Rows:
    return [pair for row, pair in enumerate(rows) if row not in places]


def placed(key: str, rows: Rows, rejected: Sequence[RejectedRow] = ()) -> Partition:
    """A partition in memory whose rows have places, and of which the first ones are set aside."""
    first = len(rejected)

    def read() -> Iterator[RowBatch]:
        for start in range(0, len(rows), 70):
            batch = row_batch_of(rows[start : start + 70])
            place = lambda row, start=start: f"line {first + start + row} of a.jsonl"  # noqa: E731
            yield replace(batch, place=place, rejected=rejected if start == 0 else ())

    return Partition(key, "v1", read, lambda: "v1", rows=len(rows) + first)


def set_aside(pool: EncoderPool, partitions: Any, root: Path, **options: Any) -> EmbeddingRun:
    return make_run(pool, partitions, root, bad_rows="set_aside", **options)


def listed(root: Path, space: str, key: str) -> list[RejectedRow]:
    rows = pq.read_table(root / list_name(space, key)).to_pylist()
    return [RejectedRow(**row) for row in rows]


@pytest.mark.parametrize("thresholds", [LARGE, SMALL], ids=["whole", "split"])
def test_partition_is_published_without_texts_that_end_workers(
    pool: EncoderPool, tmp_path: Path, thresholds: Thresholds
) -> None:
    rows = with_texts(numbered_rows("p", 450), {7: "fail always", 250: "die always"})
    other = numbered_rows("other", 90)
    partitions = [placed("p", rows), partition_of("other", other)]

    run = set_aside(pool, partitions, tmp_path, thresholds=thresholds)
    events = finish(run)

    assert failures(events) == []
    assert sorted(receipt.key for receipt in receipts(events)) == ["other", "p"]
    facts = assert_embedded(tmp_path, run.space.name, "p", without(rows, 7, 250))
    assert (facts.rejected_rows, facts.source_rows) == (2, 450)
    assert_embedded(tmp_path, run.space.name, "other", other)
    found = listed(tmp_path, run.space.name, "p")
    assert [(row.row, row.place, row.id) for row in found] == [
        (7, "line 7 of a.jsonl", "id-7"),
        (250, "line 250 of a.jsonl", "id-250"),
    ]
    assert all(row.reason.startswith(REASON) for row in found)
    assert all(row.ended_worker for row in found)


def test_rows_beside_rejected_ones_of_the_source_have_their_numbers(
    pool: EncoderPool, tmp_path: Path
) -> None:
    rows = with_texts(numbered_rows("p", 5), {1: "fail always"})
    of_source = RejectedRow(0, "line 0 of a.jsonl", "id-1", "the id is repeated")

    run = set_aside(pool, [placed("p", rows, [of_source])], tmp_path)
    finish(run)

    assert sorted(row.row for row in listed(tmp_path, run.space.name, "p")) == [0, 2]
    assert_embedded(tmp_path, run.space.name, "p", without(rows, 1))


@pytest.mark.parametrize(
    ("text", "kind"), [("die always", "transient"), ("fail always", "invalid")]
)
def test_only_a_killed_worker_makes_a_text_transient(
    pool: EncoderPool, tmp_path: Path, text: str, kind: str
) -> None:
    rows = with_texts(numbered_rows("p", 5), {3: text})

    run = set_aside(pool, [placed("p", rows)], tmp_path)
    [receipt] = receipts(finish(run))

    [row] = listed(tmp_path, run.space.name, "p")
    assert row.kind == kind
    assert receipt.transient_rows == (kind == "transient")


def test_next_run_tries_transient_rows_and_no_others(pool: EncoderPool, tmp_path: Path) -> None:
    cured = tmp_path / "cured"
    rows = with_texts(numbered_rows("p", 5), {1: f"die until {cured}", 3: "fail always"})
    partition = placed("p", rows)
    finish(set_aside(pool, [partition], tmp_path / "out"))
    cured.touch()

    run = set_aside(pool, [partition], tmp_path / "out")
    [receipt] = receipts(finish(run))
    third = receipts(finish(set_aside(pool, [partition], tmp_path / "out")))

    assert receipt.action == "encoded"
    assert (receipt.rejected_rows, receipt.transient_rows) == (1, 0)
    assert (receipt.rows_reused, receipt.rows_encoded) == (3, 1)
    assert run.report.costs.replays == 0
    assert_embedded(tmp_path / "out", run.space.name, "p", without(rows, 3))
    assert [each.action for each in third] == ["fresh"]


def test_file_without_such_rows_is_verified(pool: EncoderPool, tmp_path: Path) -> None:
    rows = with_texts(numbered_rows("p", 300), {7: "fail always", 250: "die always"})
    of_source = RejectedRow(0, "line 0 of a.jsonl", "id-9", "the id is repeated")
    partition = placed("p", rows, [of_source])
    run = set_aside(pool, [partition], tmp_path)
    finish(run)

    found = verify_partition(partition, open_store(tmp_path), run.space)

    assert found == Verified("p", 298, rejected_rows=3, source_rows=301)


def test_partition_of_too_many_such_texts_is_refused(
    pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_again, "MOST_READS", 1)
    rows = with_texts(numbered_rows("p", 900), {7: "fail always", 850: "fail always too"})

    run = set_aside(pool, [placed("p", rows)], tmp_path)
    events = finish(run)

    [failure] = failures(events)
    assert "partition 'p', line 850 of a.jsonl: its text ends every worker" in failure.reason
    assert receipts(events) == []


def test_rows_of_one_document_are_set_aside_apart_from_it(
    pool: EncoderPool, tmp_path: Path
) -> None:
    rows = with_texts(numbered_rows("p", 5), {1: "fail always", 3: "fail always too"})
    document = replace(row_batch_of(rows), source_rows=1)
    partition = Partition("p", "v1", lambda: iter([document]), lambda: "v1", source_rows=1)

    [receipt] = receipts(finish(set_aside(pool, [partition], tmp_path)))

    assert (receipt.rows, receipt.rejected_rows, receipt.source_rows) == (3, 2, 1)


def test_equal_texts_are_found_together(pool: EncoderPool, tmp_path: Path) -> None:
    places = (3, 40, 77)
    rows = with_texts(numbered_rows("p", 90), dict.fromkeys(places, "fail always"))

    run = set_aside(pool, [placed("p", rows)], tmp_path)
    finish(run)

    assert [row.row for row in listed(tmp_path, run.space.name, "p")] == list(places)
    assert not run.failed
