"""Reading old vectors must be cheaper than encoding, and fit into memory."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.parquet import STRING_COPIES, ParquetFile
from surge_dagster.engine.run import previous_rows
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.run_context import EncodingSpeed
from surge_dagster.engine.run.thresholds import Thresholds
from tests.engine.refreshes import ROWS, Output, output
from tests.engine.runs import finish, make_run, receipts
from tests.small_catalogs import (
    Rows,
    numbered_rows,
    partition_of,
)

__all__ = ["output"]


def test_vectors_are_encoded_where_reading_them_takes_longer(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.embed(ROWS)
    monkeypatch.setattr(previous_rows.Rate, "is_below", lambda *_: False)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])


def test_rows_in_any_order_read_the_old_file_a_few_times_and_not_for_each_piece(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rows, group_rows = previous_rows.PreviousRows._read_group, numbered_rows("k", 320), 16
    groups: list[int] = []

    def noted(previous: Any, group: int) -> Any:
        groups.append(group)
        return read(previous, group)

    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", group_rows)
    monkeypatch.setattr(previous_rows, "_MOST_READINGS", 3)
    monkeypatch.setattr(previous_rows.PreviousRows, "_read_group", noted)
    output.embed(rows)
    shuffled = Random(2).sample(rows, len(rows))
    receipt = output.embed(shuffled, batch_rows=20)
    output.check(shuffled)
    assert 3 * 20 <= len(groups) < 4 * 20 and 60 < receipt.rows_reused < 160
    groups.clear()
    assert output.embed(shuffled[1:], batch_rows=20).rows_reused == 319 and len(groups) == 20, "each once, in order"


def test_row_group_is_read_where_it_has_enough_of_the_rows(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two row groups one has a single row of each piece: it is encoded, as reading it takes longer."""
    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", 40)
    rows = numbered_rows("k", 80)
    output.embed(rows)
    monkeypatch.setattr(EncodingSpeed, "text_seconds", 1.0)
    monkeypatch.setattr(previous_rows.Rate, "is_below", lambda rate, seconds: seconds > 1)
    assert output.embed([*rows[:6], rows[50], *rows[7:20]], batch_rows=10).rows_reused == 19


def test_slow_moment_does_not_end_the_reuse_of_a_run() -> None:
    rate = previous_rows.Rate()
    for _ in range(3):
        assert rate.is_below(1)
        rate.add(10)
    declined = [rate.is_below(1) for _ in range(1000)].index(True)
    assert 500 < declined < 600
    rate.add(0.5)
    assert rate.is_below(1)


def test_single_slow_piece_does_not_stop_the_next() -> None:
    rate = previous_rows.Rate()
    for seconds in (*[0.5] * 8, 3):
        rate.add(seconds)
    assert rate.is_below(1)


@pytest.mark.parametrize("seconds", [1.5, 10.0, 1000.0])
def test_trying_what_stays_slow_takes_little(seconds: float) -> None:
    rate, tried = previous_rows.Rate(), 0
    for _ in range(100_000):
        if rate.is_below(1):
            tried += 1
            rate.add(seconds)
    assert (tried - 3) * (seconds - 1) <= 100_000 / 8


def test_slow_large_files_do_not_keep_small_ones_from_being_used(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a second per row to open a file, one second to encode a text, by a clock of the test's own."""
    clock, read = SimpleNamespace(now=0.0), previous_rows._read_hashes

    def slow(reader: Any) -> Any:
        clock.now += reader.facts.rows * clock.row_seconds
        return read(reader)

    def embed(version: str) -> dict[str, int]:
        sizes = {**{f"a{n}": 300 for n in range(4)}, **{f"b{n}": 10 for n in range(4)}}
        partitions = [
            partition_of(key, [*numbered_rows(key, sizes[key]), (version, version)], version=version) for key in sizes
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


def test_old_file_that_does_not_fit_is_not_used(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.embed(ROWS)
    monkeypatch.setattr(previous_rows, "LOOKUP_BYTES", 1 << 40)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])


@pytest.mark.parametrize("beyond", [0, -70_000])
def test_copying_a_file_does_not_wait_for_vectors_that_wait_for_it(
    output: Output, monkeypatch: pytest.MonkeyPatch, beyond: int
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


def test_old_rows_give_way_to_the_ids_of_a_grown_partition(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.embed(ROWS)
    reserve = previous_rows._Memory.reserve

    def greedy(memory: Any, size: int) -> bool:
        return reserve(memory, memory._context.memory.source - memory.held)

    monkeypatch.setattr(previous_rows._Memory, "reserve", greedy)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])
