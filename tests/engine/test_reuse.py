"""Incremental runs: rows whose text is in the partition's old file keep its vector, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import STRING_COPIES, ParquetFile
from surge_dagster.engine.output import previous_rows
from surge_dagster.engine.output.publication import Publication
from surge_dagster.engine.output.run_context import EncodingSpeed
from surge_dagster.engine.report import Receipt
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.superbatch import RowChanges, Segment
from surge_dagster.engine.thresholds import Thresholds
from tests.engine.runs import SMALL, finish, make_run, receipts
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    assert_embedded,
    numbered_rows,
    partition_of,
    read_embedded,
    rewrite,
    row_batch_of,
    with_vectors,
)

LONG = "x" * 5000  # hash:// counts a token for every four bytes and takes 256


class CountingPool:
    """Wraps a pool, and counts the rows that are encoded."""

    def __init__(self, pool: EncoderPool) -> None:
        self._pool = pool
        self.rows = 0
        self.precision = pool.precision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None) -> EncodeCall:
        self.rows += len(slot) if rows is None else len(rows)
        return self._pool.submit(slot, borders, rows)


class Output:
    """One partition `k` that is embedded again and again, each time with another source version.

    Attributes:
        encoded: rows that the last run gave to the pool.
    """

    def __init__(self, pool: EncoderPool, root: Path) -> None:
        self.root = root
        self.pool = CountingPool(pool)
        self.encoded = 0
        self._version = 0

    def embed(self, rows: Rows, batch_rows: int = 7, thresholds: Thresholds = SMALL, **options: Any) -> Receipt:
        """Embed these rows, check the file, and return the receipt."""
        self._version += 1
        self.pool.rows = 0
        partition = partition_of("k", rows, version=f"v{self._version}", batch_rows=batch_rows)
        self.run: EmbeddingRun = make_run(self.pool, [partition], self.root, thresholds, **options)
        [receipt] = receipts(finish(self.run))
        self.encoded = self.pool.rows
        return receipt

    def check(self, rows: Rows) -> None:
        """Row i of the file is row i of the source, with its own vector."""
        assert_embedded(self.root, self.run.space.name, "k", rows)

    @property
    def path(self) -> Path:
        """The partition's file."""
        return self.root / file_name(self.run.space.name, "k", self.run.space.file_format)


@pytest.fixture
def output(hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """An output, where reading old vectors counts as cheaper than encoding, which it is not with hashes."""
    monkeypatch.setattr(previous_rows.Rate, "mean", 0.0)
    return Output(hash_pool, tmp_path)


ROWS = numbered_rows("k", 60)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_only_rows_with_new_texts_are_encoded(output: Output, file_format: str) -> None:
    output.embed(ROWS, file_format=file_format)
    edited = [*ROWS[:10], ("new", "inserted"), *ROWS[10:20], ("id-20", "edited"), *ROWS[21:40], *ROWS[50:], ROWS[45]]
    receipt = output.embed(edited, file_format=file_format)
    output.check(edited)
    assert (receipt.rows_encoded, receipt.rows_reused) == (2, 50)
    assert output.encoded == 2 + 1, "and one row of the others, to be compared"
    assert (output.run.report.texts_encoded, output.run.report.rows_reused) == (2, 50)
    assert (receipt.compared_rows, receipt.previous_cosine) == (1, pytest.approx(1, abs=1e-6))


def test_moved_rows_and_rows_with_other_ids_keep_their_vectors(output: Output) -> None:
    output.embed(ROWS)
    shuffled = [(row_id, text) for (row_id, _), (_, text) in zip(ROWS, random.Random(3).sample(ROWS, 60), strict=True)]
    assert output.embed(shuffled).rows_encoded == 0
    output.check(shuffled)
    assert output.encoded == 1


def test_equal_texts_take_one_old_vector(output: Output) -> None:
    output.embed(ROWS)
    doubled = [(f"{copy}-{row_id}", text) for copy in range(3) for row_id, text in ROWS[:20]]
    assert output.embed(doubled).rows_reused == 60
    output.check(doubled)


def test_rows_of_a_split_partition_are_reused(output: Output) -> None:
    rows = numbered_rows("k", 450)
    output.embed(rows)
    edited = [("first", "first"), *rows[:200], *rows[210:], ("last", "last")]
    receipt = output.embed(edited)
    output.check(edited)
    assert (receipt.rows_encoded, receipt.rows_reused, output.encoded) == (2, 440, 2 + 2)
    assert read_embedded(output.root, output.run.space.name, "k").facts.rows_reused == 440


def test_vectors_of_many_row_groups_are_found(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", 16)
    monkeypatch.setattr(previous_rows, "_PIECE_BYTES", 10 * 4 * DIMENSION)
    rows = numbered_rows("k", 90)
    output.embed(rows)
    shuffled = random.Random(5).sample(rows, 80)
    assert output.embed(shuffled, batch_rows=33).rows_encoded == 0
    output.check(shuffled)


def test_forced_run_reuses_nothing(output: Output) -> None:
    output.embed(ROWS)
    receipt = output.embed(ROWS, force=True)
    assert (receipt.rows_encoded, receipt.rows_reused, output.encoded) == (60, 0, 60)


def test_truncated_texts_are_counted_exactly_and_reused(output: Output) -> None:
    rows = [*ROWS[:5], *((f"long-{n}", f"{LONG} {n}") for n in range(4)), *ROWS[5:]]
    assert output.embed(rows).truncated == 4
    edited = [*rows[1:7], *rows[8:], ("long-9", LONG + " new")]
    receipt = output.embed(edited)
    assert (receipt.truncated, receipt.rows_encoded) == (4, 1)
    assert read_embedded(output.root, output.run.space.name, "k").facts.truncated == 4


def test_text_of_which_nothing_tells_whether_it_was_truncated_is_encoded(output: Output) -> None:
    rows = [("a", "short"), ("b", "between"), ("c", LONG)]
    output.embed(rows)
    rewrite(output.path, lambda table: table, longest_whole_bytes=20, shortest_truncated_bytes=6)
    receipt = output.embed([*rows, ("d", "new")])
    assert (receipt.rows_encoded, receipt.rows_reused, receipt.truncated) == (2, 2, 1)
    rewrite(output.path, lambda table: table, shortest_truncated_bytes=0)
    assert output.embed(rows).rows_reused == 0


def test_file_of_before_there_were_hashes_is_reused(output: Output) -> None:
    output.embed(ROWS)
    rewrite(output.path, lambda table: table.drop_columns(["text_hash"]))
    assert "text_hash" not in pq.read_schema(output.path).names
    receipt = output.embed(ROWS[5:])
    output.check(ROWS[5:])
    assert (receipt.rows_encoded, receipt.rows_reused) == (0, 55)


def test_file_without_texts_is_reused_by_its_hashes(output: Output) -> None:
    output.embed(ROWS, include_text=False)
    assert output.embed(ROWS[5:], include_text=False).rows_reused == 55


def test_oldest_vector_of_a_file_is_as_old_as_that_of_the_file_it_came_from(output: Output) -> None:
    first = output.embed(ROWS)
    rewrite(output.path, lambda table: table, oldest_encoded_at="2020-02-02T02:02:02+00:00")
    assert output.embed(ROWS[1:]).oldest_encoded_at == "2020-02-02T02:02:02+00:00"
    assert output.embed(ROWS, force=True).oldest_encoded_at >= first.oldest_encoded_at > "2020-02-03"


class TestDistrust:
    """Old vectors that are not those of the model are not used."""

    @pytest.fixture(params=["whole", "split"])
    def rows(self, request: pytest.FixtureRequest) -> Rows:
        return ROWS if request.param == "whole" else numbered_rows("k", 450)

    def test_vectors_of_another_model_behind_the_same_name(
        self, output: Output, rows: Rows, caplog: pytest.LogCaptureFixture
    ) -> None:
        output.embed(rows)
        rewrite(output.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
        edited = [*rows, ("new", "new")]
        receipt = output.embed(edited)
        output.check(edited)
        assert receipt.rows_reused == 0 and "the whole partition is encoded" in caplog.text
        assert receipt.previous_cosine is not None and receipt.previous_cosine < 0.9

    @pytest.mark.parametrize("wrong", [0.0, np.nan, 2.0])
    def test_vectors_that_are_no_embeddings(
        self, output: Output, wrong: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        def change(matrix: np.ndarray) -> np.ndarray:
            matrix[40] *= wrong
            return matrix

        output.embed(ROWS)
        rewrite(output.path, lambda table: with_vectors(table, change))
        receipt = output.embed(ROWS[1:])
        output.check(ROWS[1:])
        assert receipt.rows_reused == 0 and "its old file is damaged" in caplog.text

    def test_file_with_flipped_bits(self, output: Output) -> None:
        output.embed(ROWS)
        content = output.path.read_bytes()
        for place in random.Random(1).sample(range(len(content)), 60):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            output.path.write_bytes(changed)
            output.embed(ROWS[1:])
            output.check(ROWS[1:])

    def test_vectors_of_another_precision(self, output: Output) -> None:
        output.embed(ROWS)
        output.pool.precision = "bf16"
        assert output.embed(ROWS[1:]).rows_reused == 0

    def test_file_that_was_replaced_since_it_was_listed(self, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
        output.embed(ROWS)
        read = previous_rows.open_output_file

        def replaced(*arguments: Any, **options: Any) -> Any:
            rewrite(output.path, lambda table: table, source_version="other")
            return read(pa.OSFile(str(output.path)), "parquet")

        monkeypatch.setattr(previous_rows, "open_output_file", replaced)
        assert output.embed(ROWS[1:]).rows_reused == 0
        output.check(ROWS[1:])


class TestCosts:
    """Reading old vectors must be cheaper than encoding, and fit into memory."""

    def test_vectors_are_encoded_where_reading_them_takes_longer(
        self, output: Output, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output.embed(ROWS)
        monkeypatch.setattr(previous_rows.Rate, "mean", 1e6)
        assert output.embed(ROWS[1:]).rows_reused == 0
        output.check(ROWS[1:])

    def test_slow_large_files_do_not_keep_small_ones_from_being_used(
        self, hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Half a second per row to open a file, one second to encode a text, by a clock of the test's own."""
        clock, read = SimpleNamespace(now=0.0), previous_rows._read_hashes

        def slow(reader: Any) -> Any:
            clock.now += reader.facts.rows * clock.row_seconds
            return read(reader)

        def embed(version: str) -> dict[str, int]:
            sizes = {**{f"a{n}": 300 for n in range(4)}, **{f"b{n}": 10 for n in range(4)}}
            partitions = [
                partition_of(key, [*numbered_rows(key, sizes[key]), (version, version)], version=version)
                for key in sizes
            ]
            run = make_run(hash_pool, partitions, tmp_path, force=version == "v1")
            return {receipt.key: receipt.rows_reused for receipt in receipts(finish(run), "encoded")}

        rows = {"a": 300, "b": 10}
        monkeypatch.setattr(EncodingSpeed, "text_seconds", 1.0)
        monkeypatch.setattr(previous_rows, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(previous_rows, "_read_hashes", slow)
        embed("v1")
        clock.row_seconds = 0.5
        assert all(reused == rows[key[0]] for key, reused in embed("v2").items())
        clock.row_seconds, caplog.records[:] = 2, []
        with caplog.at_level("INFO"):
            assert {key for key, reused in embed("v3").items() if not reused} == {"a3", "b3"}
        assert caplog.text.count("opening it would take longer than encoding") == 2

    def test_old_file_that_does_not_fit_is_not_used(self, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
        output.embed(ROWS)
        monkeypatch.setattr(previous_rows, "_LOOKUP_BYTES", 1 << 40)
        assert output.embed(ROWS[1:]).rows_reused == 0
        output.check(ROWS[1:])

    @pytest.mark.parametrize("beyond", [0, -70_000])
    def test_copying_a_file_does_not_wait_for_vectors_that_wait_for_it(
        self, output: Output, monkeypatch: pytest.MonkeyPatch, beyond: int
    ) -> None:
        """The file takes what is left beside a SuperBatch, or so much less as the gathered vectors take."""
        rows = [(f"id-{n}", str(n)) for n in range(950)]
        thresholds = Thresholds(b_min=1000, b_max=1000, b_min_bytes=24_000, b_max_bytes=24_000)

        def run(version: str, rows: Rows) -> EmbeddingRun:
            partitions = [partition_of("a", rows, version=version), partition_of("b", ROWS, version=version)]
            return make_run(output.pool, partitions, output.root, thresholds)

        finish(run("v1", rows))
        second = run("v2", rows[1:])
        left = second.memory.beside_superbatch - second.memory.reader - (1 + STRING_COPIES) * 40
        try_reserve = second.ledger.try_reserve
        monkeypatch.setattr(ParquetFile, "reading_bytes", lambda *_: left + beyond)

        def reserve_at_once(size: int, cancelled: Any = None) -> None:
            if not try_reserve(size):
                raise AssertionError(f"nothing would release the {size:,} bytes that are waited for")

        monkeypatch.setattr(second.ledger, "reserve", reserve_at_once)
        found = {receipt.key: (receipt.action, receipt.rows_reused) for receipt in receipts(finish(second))}
        assert found == {"a": ("encoded", 949), "b": ("republished", 0) if beyond else ("encoded", 60)}

    def test_old_rows_give_way_to_the_ids_of_a_grown_partition(
        self, output: Output, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output.embed(ROWS)
        book = previous_rows._previous_rows

        def greedy(context: Any, *arguments: Any, **options: Any) -> Any:
            previous = book(context, *arguments, **options)
            assert previous is not None
            context.ledger.reserve(context.memory.source - previous.held)
            previous.held = context.memory.source
            return previous

        monkeypatch.setattr(previous_rows, "_previous_rows", greedy)
        assert output.embed(ROWS[1:]).rows_reused == 0
        output.check(ROWS[1:])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RowChanges | None]]:
    """What the runs of a test found out about changed rows."""
    changes: list[RowChanges | None] = []
    finish_changes = Publication._finish_changes

    def noted(publication: Publication, segment: Segment) -> None:
        finish_changes(publication, segment)
        if segment.last:
            changes.append(segment.partition.changes)

    monkeypatch.setattr(Publication, "_finish_changes", noted)
    yield changes


class TestChanges:
    """Which rows a run finds to be changed, by their ids."""

    def test_rows_are_compared_by_id(self, output: Output, found: list[RowChanges | None]) -> None:
        output.embed(ROWS, changes=True)
        version = read_embedded(output.root, output.run.space.name, "k").facts.rows_version
        edited = [ROWS[1], ROWS[0], ("id-2", "edited"), ("new", ROWS[3][1]), *ROWS[5:50]]
        output.embed(edited, changes=True)
        [first, second] = found
        assert first is None and second is not None
        assert second.operations.tolist() == [0, 0, 2, 1] + 45 * [0]
        assert second.deleted.to_pylist() == [ROWS[n][0] for n in (3, 4, *range(50, 60))]
        assert second.previous_rows_version == version

    def test_row_takes_the_vector_of_its_own_id_where_texts_are_equal(
        self, output: Output, found: list[RowChanges | None]
    ) -> None:
        output.embed([("a", "equal"), ("b", "equal"), ("c", "other")], changes=True)
        output.embed([("b", "equal"), ("c", "other"), ("a", "equal")], changes=True)
        assert found[1] is not None and found[1].operations.tolist() == [0, 0, 0]

    def test_rows_whose_old_vectors_are_not_trusted_have_changed(
        self, output: Output, found: list[RowChanges | None]
    ) -> None:
        output.embed(ROWS, changes=True)
        rewrite(output.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
        output.embed(ROWS[1:], changes=True)
        assert found[1] is not None and set(found[1].operations.tolist()) == {2}

    def test_rows_that_were_encoded_again_have_changed(self, output: Output, found: list[RowChanges | None]) -> None:
        output.embed(ROWS, changes=True)
        output.embed(ROWS, changes=True, force=True)
        assert found[1] is not None and set(found[1].operations.tolist()) == {2}

    def test_rows_of_a_split_partition_are_compared(self, output: Output, found: list[RowChanges | None]) -> None:
        rows = numbered_rows("k", 450)
        output.embed(rows, changes=True)
        output.embed([*rows[:300], ("new", "new"), *rows[301:]], changes=True)
        assert found[1] is not None and np.flatnonzero(found[1].operations).tolist() == [300]
        assert found[1].deleted.to_pylist() == ["id-300"]

    def test_rows_whose_carried_columns_differ_have_changed(
        self, output: Output, found: list[RowChanges | None]
    ) -> None:
        def embed(prices: list[int | None]) -> Receipt:
            carried = pa.record_batch({"price": pa.array(prices, pa.int64())})
            batch = replace(row_batch_of(ROWS), carried=carried)
            version = str(prices)
            partition = Partition("k", version, lambda: iter([batch]), lambda: version)
            [receipt] = receipts(finish(make_run(output.pool, [partition], output.root, changes=True)))
            return receipt

        embed([1, None, None, *range(57)])
        assert embed([2, None, 5, *range(57)]).rows_reused == 60
        assert found[1] is not None and found[1].operations.tolist() == [2, 0, 2] + 57 * [0]

    def test_ids_of_another_type_are_not_compared(self, output: Output, found: list[RowChanges | None]) -> None:
        output.embed(ROWS, changes=True)
        rewrite(output.path, lambda table: table.set_column(0, pa.field("id", pa.int64(), False), [list(range(60))]))
        assert output.embed(ROWS[1:], changes=True).rows_reused == 59
        assert found[1] is None


@pytest.mark.usefixtures("output")
def test_rows_of_many_partitions_in_a_superbatch_are_reused(hash_pool: EncoderPool, tmp_path: Path) -> None:
    first = [partition_of(f"p{n}", numbered_rows(f"p{n}", 40), version="v1") for n in range(12)]
    second = [partition_of(f"p{n}", numbered_rows(f"p{n}", 41), version="v2") for n in range(12)]
    finish(make_run(hash_pool, first, tmp_path))
    run = make_run(hash_pool, second, tmp_path)
    assert all(receipt.rows_reused == 40 for receipt in receipts(finish(run)))
