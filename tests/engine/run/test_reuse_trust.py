"""Old vectors that are not those of the model are not used."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.files.formats import new_writer
from surge_dagster.engine.files.parquet import read_facts
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.run import previous_rows
from surge_dagster.engine.run.staging import STAGING
from tests.engine.refreshes import ROWS, Output, output
from tests.engine.run.test_staged_runs import cut_off
from tests.engine.runs import finish, make_run
from tests.small_catalogs import DIMENSION, Rows, numbered_rows, partition_of, rewrite, with_vectors

__all__ = ["output"]


@pytest.fixture(params=["whole", "split"])
def rows(request: pytest.FixtureRequest) -> Rows:
    return ROWS if request.param == "whole" else numbered_rows("k", 450)


def test_partition_is_encoded_again_when_the_model_changed_behind_its_name(
    output: Output, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    output.embed(rows)
    rewrite(output.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
    edited = [*rows, ("new", "new")]
    receipt = output.embed(edited)
    output.check(edited)
    assert receipt.rows_reused == 0 and "the whole partition is encoded" in caplog.text
    assert receipt.previous_cosine is not None and receipt.previous_cosine < 0.9


def test_split_partition_does_not_mix_the_vectors_of_two_models(output: Output) -> None:
    """Rows from 200 on are another model's, and the sample shows it three SuperBatches later."""
    rows = numbered_rows("k", 450)
    output.embed(rows)
    rewrite(output.path, lambda table: with_vectors(table, lambda matrix: np.vstack([matrix[:200], -matrix[200:]])))
    receipt = output.embed(rows[:-1])
    output.check(rows[:-1])
    assert (receipt.rows_reused, receipt.rows_encoded) == (0, 449)
    assert (receipt.compared_rows, receipt.previous_cosine) == (1, pytest.approx(-1, abs=1e-6))
    assert not (output.root / STAGING).exists()


def test_rows_staged_under_another_model_are_encoded_with_the_others(output: Output) -> None:
    rows = numbered_rows("k", 450)
    output.embed(rows)
    rewrite(output.path, lambda table: with_vectors(table, lambda matrix: -matrix))
    whole = partition_of("k", rows[1:], version="v2")
    readings = iter([whole.read, cut_off("k", rows[1:], 270).read])  # the first finds out whether the content is new
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surge_dagster.engine.run.superbatch_call.cosines", lambda one, other: np.ones(len(one)))
        finish(make_run(output.pool, [replace(whole, read=lambda: next(readings)())], output.root))
    assert (output.root / STAGING).exists()
    assert output.embed(rows[1:]).rows_reused == 0
    output.check(rows[1:])


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
    assert receipt.rows_reused == 0 and "its old file is damaged" in caplog.text


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


def test_vectors_of_another_dtype_are_not_reused(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """They are so near to those of float32 that no sample would show it."""
    output.embed(ROWS)
    table, facts = pq.read_table(output.path), read_facts(pq.read_metadata(output.path))
    columns = schema(pa.string(), DIMENSION, "float16", include_text=True)
    with pa.OSFile(str(output.path), "wb") as sink, new_writer(sink, columns, facts) as writer:
        writer.append_table(table.replace_schema_metadata(None).cast(columns))
        writer.close()
    assert output.embed(ROWS[1:]).rows_reused == 0 and "vectors of its old file are not used" in caplog.text
    output.check(ROWS[1:])


def test_old_file_replaced_after_the_listing_is_not_reused(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.embed(ROWS)
    read = previous_rows.open_published

    def replaced(*arguments: Any, **options: Any) -> Any:
        rewrite(output.path, lambda table: table, source_version="other")
        return read(*arguments, **options)

    monkeypatch.setattr(previous_rows, "open_published", replaced)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])
