"""Old vectors that are not those of the model are not used."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.files.parquet import read_facts, write_file
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.run import old_rows
from surge_dagster.engine.run.report import OldVectorSample
from tests.engine.refreshes import ROWS, Refreshed
from tests.engine.runs import Output, finish, in_memory, of_kind, receipts
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    numbered_catalog,
    numbered_rows,
    partition_of,
    rewrite,
    with_vectors,
)


@pytest.fixture(params=["whole", "split"])
def rows(request: pytest.FixtureRequest) -> Rows:
    return ROWS if request.param == "whole" else numbered_rows("k", 450)


def of_another_model(table: pa.Table) -> pa.Table:
    return with_vectors(table, lambda matrix: -matrix)


def test_run_reuses_nothing_when_the_model_changed_behind_its_name(
    refreshed: Refreshed, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    refreshed.embed(rows)
    rewrite(refreshed.path, of_another_model)
    edited = [*rows, ("new", "new")]

    receipt = refreshed.embed(edited)

    refreshed.check(edited)
    assert receipt.rows_reused == 0
    assert refreshed.run.report.drifted_rows == 1
    assert "this run reuses no old vectors" in caplog.text


def test_sample_is_compared_once_and_before_any_partition_is_read(output: Output) -> None:
    """Only the last partition has vectors of another model; those before it are encoded all the
    same."""
    catalog = numbered_catalog([40] * 3)
    changed = {"p0": catalog["p0"][1:], "p1": catalog["p1"][1:], "p2": catalog["p2"][1:]}
    output.events(in_memory(catalog))
    rewrite(output.path("p2"), of_another_model)

    events = output.events(in_memory(changed, "v2"))

    [sample] = of_kind(events, OldVectorSample)
    assert set(sample.drifted) == {"p2"}
    assert sample.cosines == pytest.approx({"p0": 1, "p1": 1, "p2": -1}, abs=1e-6)
    for receipt in receipts(events, "encoded"):
        assert receipt.rows_reused == 0
    output.check_all(changed)


def test_run_that_replaces_no_file_compares_nothing(output: Output) -> None:
    output.events([partition_of("a", ROWS)])
    run = output.run([partition_of("a", ROWS), partition_of("b", ROWS)])
    finish(run)
    assert run.report.compared_rows == 0


def test_files_without_texts_are_reused_without_a_comparison(refreshed: Refreshed) -> None:
    refreshed.embed(ROWS, include_text=False)
    receipt = refreshed.embed(ROWS[1:], include_text=False)
    assert receipt.rows_reused == len(ROWS) - 1
    assert refreshed.run.report.compared_rows == 0


def test_nothing_is_reused_when_the_sample_cannot_be_encoded(
    refreshed: Refreshed, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(texts: object) -> np.ndarray:
        raise EncoderError("it ends every worker")

    refreshed.embed(ROWS)
    refreshed.pool.vectors = fail  # pyright: ignore[reportAttributeAccessIssue]
    receipt = refreshed.embed(ROWS[1:])
    refreshed.check(ROWS[1:])
    assert receipt.rows_reused == 0
    assert "could not be compared: it ends every worker" in caplog.text


@pytest.mark.parametrize("wrong", [0.0, np.nan, 2.0])
def test_old_file_with_invalid_vectors_is_not_reused(
    refreshed: Refreshed, wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    def change(matrix: np.ndarray) -> np.ndarray:
        matrix[40] *= wrong
        return matrix

    refreshed.embed(ROWS)
    rewrite(refreshed.path, lambda table: with_vectors(table, change))
    receipt = refreshed.embed(ROWS[1:])
    refreshed.check(ROWS[1:])
    assert receipt.rows_reused == 0
    assert "no more vectors are taken from its old file" in caplog.text


def test_flipped_bit_in_the_old_file_never_gives_a_wrong_vector(refreshed: Refreshed) -> None:
    refreshed.embed(ROWS)
    content = refreshed.path.read_bytes()
    for place in random.Random(1).sample(range(len(content)), 60):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        refreshed.path.write_bytes(changed)
        refreshed.embed(ROWS[1:])
        refreshed.check(ROWS[1:])


def test_vectors_of_another_precision_are_not_reused(refreshed: Refreshed) -> None:
    refreshed.embed(ROWS)
    refreshed.pool.precision = "bf16"
    assert refreshed.embed(ROWS[1:]).rows_reused == 0


def test_vectors_of_another_dtype_are_not_reused(
    refreshed: Refreshed, caplog: pytest.LogCaptureFixture
) -> None:
    """They are so near to those of float32 that no sample would show it."""
    refreshed.embed(ROWS)
    table = pq.read_table(refreshed.path)
    facts = read_facts(pq.read_metadata(refreshed.path))
    columns = schema(pa.string(), DIMENSION, "float16", include_text=True)
    table = table.replace_schema_metadata(None).cast(columns)
    with pa.OSFile(str(refreshed.path), "wb") as sink:
        write_file(sink, columns, facts, [table])
    assert refreshed.embed(ROWS[1:]).rows_reused == 0
    assert "vectors of its old file are not used" in caplog.text
    refreshed.check(ROWS[1:])


def test_old_file_replaced_after_the_listing_is_not_reused(
    refreshed: Refreshed, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed.embed(ROWS)
    read = old_rows.open_published

    def replaced(*arguments: Any, **options: Any) -> Any:
        rewrite(refreshed.path, lambda table: table, source_version="other")
        return read(*arguments, **options)

    monkeypatch.setattr(old_rows, "open_published", replaced)
    assert refreshed.embed(ROWS[1:]).rows_reused == 0
    refreshed.check(ROWS[1:])
