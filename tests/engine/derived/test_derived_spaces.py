"""What reads a space reads a derived one too: search, loading, verification and the switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster import open_embeddings
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.parquet import read_facts, write_file
from surge_dagster.engine.model.spec import DERIVED_DTYPES, DerivedDtype, Space
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.verify.verification import (
    Compared,
    SwitchRefused,
    Violation,
    switch_space,
    verify,
)
from tests.engine.runs import Output, in_memory, of_kind
from tests.small_catalogs import keys_of, numbered_rows, rewrite
from tests.spaces import KEYS, ROWS, Spaces

MODEL = "hash://16"
POLARS = {"float32": pl.Float32, "float16": pl.Float16, "int8": pl.Int8, "binary": pl.UInt8}


def derived(made: Spaces, dtype: DerivedDtype = "int8", dimension: int | None = None) -> Space:
    run = DeriveRun(made.store, made.of(MODEL), dtype, dimension)
    assert set(keys_of(run.events())) <= set(KEYS)
    assert not run.report.partitions_failed
    return run.space


def violations(made: Spaces, space: Space) -> list[Violation]:
    return of_kind(verify(made.source, made.store, space), Violation)


@pytest.mark.parametrize("dtype", DERIVED_DTYPES)
def test_best_hit_of_a_text_in_a_derived_space_is_its_own_row(
    made: Spaces, hash_pool: EncoderPool, dtype: DerivedDtype
) -> None:
    space = derived(made, dtype, 16 if dtype == "binary" else 8)
    text = numbered_rows("b", ROWS)[17][1]
    [hits] = search(made.store, hash_pool, [text], 3, space)
    assert hits[0].key == "b"
    assert hits[0].id == "id-17"
    assert hits[0].text == text
    least = {"binary": 0.6, "int8": 0.999}.get(dtype, 0.99999)
    assert least < hits[0].score < 1.00001


def test_query_of_another_model_is_refused(
    three_spaces: Spaces, made: Spaces, hash_pool: EncoderPool
) -> None:
    space = derived(made)
    assert space.derived
    other = replace(
        space,
        derived=replace(space.derived, parent_sha256=three_spaces.of("hash://24").spec_sha256),
    )
    with pytest.raises(ConfigError, match="and the space is"):
        search(made.store, hash_pool, ["any"], 3, other)


@pytest.mark.parametrize("dtype", DERIVED_DTYPES)
def test_loading_gives_the_stored_vectors(output: Output, dtype: DerivedDtype) -> None:
    output.embed(in_memory({"a": numbered_rows("a", 30)}))
    deriving = DeriveRun(output.store, output.pool.space, dtype, 8)
    list(deriving.events())
    opened = open_embeddings(output.root, deriving.space.name)
    frame = opened.lazy().collect()
    assert frame["embedding"].dtype == pl.Array(POLARS[dtype], 1 if dtype == "binary" else 8)
    stored = opened.dataset().to_table()["embedding"].combine_chunks()
    if pa.types.is_fixed_size_binary(stored.type):
        values = np.frombuffer(
            b"".join(stored.to_pylist()), np.int8 if dtype == "int8" else np.uint8
        )
    else:
        values = stored.flatten().to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(frame["embedding"].to_numpy(), values.reshape(30, -1))
    assert opened.facts("a").dimension == 8


def test_derived_rows_keep_which_texts_were_truncated(output: Output) -> None:
    output.embed(in_memory({"a": [("1", "boots"), ("2", "shoes " * 1_000)]}))
    deriving = DeriveRun(output.store, output.pool.space, "int8", 8)
    list(deriving.events())

    frame = open_embeddings(output.root, deriving.space.name).lazy().collect()

    assert frame["truncated"].to_list() == [False, True]


def test_complete_derived_space_is_verified_and_can_become_current(made: Spaces) -> None:
    space = derived(made, "binary")
    *_, compared = verify(made.source, made.store, space)
    assert violations(made, space) == []
    assert compared == Compared(ROWS * len(KEYS), len(KEYS), 0, None)
    assert switch_space(made.source, made.store, space).current.space == space.name
    assert open_embeddings(made.store).space.name == space.name


def change_vector(path: Path) -> None:
    """A file as this project writes it, with one other byte in a vector."""
    table = pq.read_table(path)
    facts = read_facts(pq.read_metadata(path))
    column = table["embedding"].combine_chunks()
    values = np.frombuffer(column.buffers()[1], np.uint8).copy()
    values[9 * column.type.byte_width] ^= 1
    changed = pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(values)])
    place = table.schema.get_field_index("embedding")
    table = table.set_column(place, table.schema.field(place), changed)
    with pa.OSFile(str(path), "wb") as sink:
        write_file(sink, table.schema, facts, [table])


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (
            lambda parent, own: change_vector(own),
            "its vectors do not follow from hash-16-",
        ),
        (lambda parent, own: parent.unlink(), "has no file of it"),
        (lambda parent, own: parent.write_bytes(b"nothing"), "cannot be read because"),
        (
            lambda parent, own: rewrite(parent, lambda table: table, rows_version="0" * 32),
            "from earlier rows of hash",
        ),
    ],
)
def test_vectors_that_do_not_follow_from_the_parent_are_found(
    made: Spaces, spoil: Callable[[Path, Path], object], finding: str
) -> None:
    space = derived(made)
    spoil(made.file(MODEL, "b"), made.root / "output" / space.name / "b.parquet")
    [violation] = violations(made, space)
    assert violation.key == "b"
    assert violation.kind == "vectors"
    assert finding in violation.finding
    with pytest.raises(SwitchRefused, match="1 vectors: 'b'"):
        switch_space(made.source, made.store, space)
    (made.root / "output" / space.name / "c.parquet").unlink()
    with pytest.raises(SwitchRefused, match="1 missing: 'c'"):
        switch_space(made.source, made.store, space)


def test_missing_derived_file_is_named_with_the_command_that_makes_it(made: Spaces) -> None:
    space = derived(made)
    (made.root / "output" / space.name / "b.parquet").unlink()

    [violation] = violations(made, space)

    assert violation.kind == "missing"
    assert violation.remedy == "Run again, then derive the space again (`surge-dagster derive`)."
