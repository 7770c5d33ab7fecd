"""Old vectors that are not those of the model are not used."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import read_facts, write_file
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.run import old_rows
from surge_dagster.engine.run.report import OldVectorSample
from tests.engine.refreshes import ROWS, Output, output
from tests.engine.runs import finish, make_run, of_kind, receipts
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    assert_embedded,
    numbered_rows,
    partition_of,
    rewrite,
    with_vectors,
)

__all__ = ["output"]


@pytest.fixture(params=["whole", "split"])
def rows(request: pytest.FixtureRequest) -> Rows:
    return ROWS if request.param == "whole" else numbered_rows("k", 450)


def of_another_model(table: pa.Table) -> pa.Table:
    return with_vectors(table, lambda matrix: -matrix)


def test_run_reuses_nothing_when_the_model_changed_behind_its_name(
    output: Output, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    output.embed(rows)
    rewrite(output.path, of_another_model)
    edited = [*rows, ("new", "new")]

    receipt = output.embed(edited)

    output.check(edited)
    assert receipt.rows_reused == 0
    assert output.run.report.drifted_rows == 1
    assert "this run reuses no old vectors" in caplog.text


def test_sample_is_compared_once_and_before_any_partition_is_read(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    """Only the last partition has vectors of another model; those before it are encoded all the
    same."""
    catalog = {key: numbered_rows(key, 40) for key in "abc"}
    finish(
        make_run(hash_pool, [partition_of(key, rows) for key, rows in catalog.items()], tmp_path)
    )
    rewrite(tmp_path / file_name(hash_pool.space.name, "c"), of_another_model)

    run = make_run(
        hash_pool,
        [partition_of(key, rows[1:], version="v2") for key, rows in catalog.items()],
        tmp_path,
    )
    events = finish(run)

    [sample] = of_kind(events, OldVectorSample)
    assert set(sample.drifted) == {"c"}
    assert sample.cosines == pytest.approx({"a": 1, "b": 1, "c": -1}, abs=1e-6)
    assert [receipt.rows_reused for receipt in receipts(events, "encoded")] == [0, 0, 0]
    for key, rows in catalog.items():
        assert_embedded(tmp_path, run.space.name, key, rows[1:])


def test_run_that_replaces_no_file_compares_nothing(hash_pool: EncoderPool, tmp_path: Path) -> None:
    finish(make_run(hash_pool, [partition_of("a", ROWS)], tmp_path))
    run = make_run(hash_pool, [partition_of("a", ROWS), partition_of("b", ROWS)], tmp_path)
    finish(run)
    assert run.report.compared_rows == 0


def test_files_without_texts_are_reused_without_a_comparison(output: Output) -> None:
    output.embed(ROWS, include_text=False)
    receipt = output.embed(ROWS[1:], include_text=False)
    assert receipt.rows_reused == len(ROWS) - 1
    assert output.run.report.compared_rows == 0


def test_nothing_is_reused_when_the_sample_cannot_be_encoded(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(texts: object) -> np.ndarray:
        raise EncoderError("it ends every worker")

    output.embed(ROWS)
    output.pool.vectors = fail  # pyright: ignore[reportAttributeAccessIssue]
    receipt = output.embed(ROWS[1:])
    output.check(ROWS[1:])
    assert receipt.rows_reused == 0
    assert "could not be compared: it ends every worker" in caplog.text


@pytest.mark.parametrize("wrong", [0.0, np.nan, 2.0])
def test_old_file_with_invalid_vectors_is_not_reused(
    output: Output, wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    def change(matrix: np.ndarray) -> np.ndarray:
        matrix[40] *= wrong
        return matrix

    output.embed(ROWS)
    rewrite(output.path, lambda table: with_vectors(table, change))
    receipt = output.embed(ROWS[1:])
    output.check(ROWS[1:])
    assert receipt.rows_reused == 0
    assert "no more vectors are taken from its old file" in caplog.text


def test_flipped_bit_in_the_old_file_never_gives_a_wrong_vector(output: Output) -> None:
    output.embed(ROWS)
    content = output.path.read_bytes()
    for place in random.Random(1).sample(range(len(content)), 60):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        output.path.write_bytes(changed)
        output.embed(ROWS[1:])
        output.check(ROWS[1:])


def test_vectors_of_another_precision_are_not_reused(output: Output) -> None:
    output.embed(ROWS)
    output.pool.precision = "bf16"
    assert output.embed(ROWS[1:]).rows_reused == 0


def test_vectors_of_another_dtype_are_not_reused(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """They are so near to those of float32 that no sample would show it."""
    output.embed(ROWS)
    table = pq.read_table(output.path)
    facts = read_facts(pq.read_metadata(output.path))
    columns = schema(pa.string(), DIMENSION, "float16", include_text=True)
    table = table.replace_schema_metadata(None).cast(columns)
    with pa.OSFile(str(output.path), "wb") as sink:
        write_file(sink, columns, facts, [table])
    assert output.embed(ROWS[1:]).rows_reused == 0
    assert "vectors of its old file are not used" in caplog.text
    output.check(ROWS[1:])


def test_old_file_replaced_after_the_listing_is_not_reused(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.embed(ROWS)
    read = old_rows.open_published

    def replaced(*arguments: Any, **options: Any) -> Any:
        rewrite(output.path, lambda table: table, source_version="other")
        return read(*arguments, **options)

    monkeypatch.setattr(old_rows, "open_published", replaced)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])
