"""A derived space follows its parent: only what is missing or stale is computed, and never from a
damaged file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.derived.conversion import convert, cut
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import DERIVED_DTYPES, DerivedDtype, EncodingSpec, Space
from surge_dagster.engine.output.current_space import read_current
from surge_dagster.engine.output.spaces import find_space, list_spaces
from surge_dagster.engine.run.report import Failure
from tests.small_catalogs import keys_of, make_unreadable, rewrite, with_vectors
from tests.spaces import KEYS, ROWS, Spaces

MODEL = "hash://16"


def run(
    made: Spaces, dtype: DerivedDtype = "int8", dimension: int | None = None, **options
) -> DeriveRun:
    return DeriveRun(made.store, made.of(MODEL), dtype, dimension, **options)


def derive(
    made: Spaces, dtype: DerivedDtype = "int8", dimension: int | None = None, **options
) -> dict[str, str]:
    """What became of each partition: "derived", "fresh", or why it failed."""
    derived = run(made, dtype, dimension, **options)
    return {
        event.key: event.reason if isinstance(event, Failure) else event.action
        for event in derived.events()
    }


def file_of(made: Spaces, space: Space, key: str) -> Path:
    return made.root / "output" / space.name / f"{key}.parquet"


def matrix_in(path: Path, dtype: str) -> np.ndarray:
    column = pq.read_table(path)["embedding"].combine_chunks()
    if dtype in ("int8", "binary"):
        return np.frombuffer(column.buffers()[1], np.int8 if dtype == "int8" else np.uint8).reshape(
            len(column), -1
        )
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)


@pytest.mark.parametrize("dtype", DERIVED_DTYPES)
def test_every_file_has_the_rows_of_its_parent_with_converted_vectors(
    made: Spaces, dtype: DerivedDtype
) -> None:
    derived = run(made, dtype, 8)
    assert keys_of(derived.events()) == list(KEYS)
    for key in KEYS:
        parent = made.file(MODEL, key)
        own = file_of(made, derived.space, key)
        vectors = cut(matrix_in(parent, "float32"), derived.space)
        np.testing.assert_array_equal(matrix_in(own, dtype), convert(vectors, derived.space))
        rows = pq.read_table(own).drop_columns(["embedding"])
        assert rows.equals(pq.read_table(parent).drop_columns(["embedding"]))
    assert derived.report.rows == ROWS * len(KEYS)


def test_partitions_with_other_rows_and_damaged_ones_are_derived_again(
    made: Spaces,
) -> None:
    assert derive(made) == dict.fromkeys(KEYS, "derived")
    before = file_of(made, run(made).space, "a").stat().st_mtime_ns
    assert derive(made) == dict.fromkeys(KEYS, "fresh")
    rewrite(made.file(MODEL, "b"), lambda table: table, rows_version="other")
    rewrite(made.file(MODEL, "c"), lambda table: table, source_version="later")
    assert derive(made) == {"a": "fresh", "b": "derived", "c": "derived"}
    assert file_of(made, run(made).space, "a").stat().st_mtime_ns == before
    file_of(made, run(made).space, "a").write_bytes(b"damaged")
    assert derive(made) == {"a": "derived", "b": "fresh", "c": "fresh"}


def test_damaged_file_of_the_parent_fails_its_partition_alone(made: Spaces) -> None:
    content = made.file(MODEL, "b").read_bytes()
    made.file(MODEL, "b").write_bytes(content[:600] + b"damage" + content[606:])
    made.file(MODEL, "c").write_bytes(b"nothing")
    outcomes = derive(made, "float16")
    assert outcomes["a"] == "derived"
    assert "b.parquet' cannot be read because it is damaged" in outcomes["b"]
    assert "embed" in outcomes["b"]
    assert "c.parquet' cannot be read because it is damaged" in outcomes["c"]
    derived = file_of(made, run(made, "float16").space, "a")
    assert list(derived.parent.glob("*.p*")) == [derived]


@pytest.mark.parametrize("dtype", ["int8", "binary"])
def test_file_of_the_parent_that_cannot_be_read_fails_its_partition_alone(
    made: Spaces, monkeypatch: pytest.MonkeyPatch, dtype: DerivedDtype
) -> None:
    make_unreadable(monkeypatch, "/b.parquet")
    outcomes = derive(made, dtype)
    assert outcomes["a"] == "derived"
    assert outcomes["c"] == "derived"
    assert "partition 'b'" in outcomes["b"]
    assert "Permission denied" in outcomes["b"]
    monkeypatch.undo()
    assert derive(made, dtype) == {"a": "fresh", "b": "derived", "c": "fresh"}
    own = file_of(made, run(made, dtype).space, "b")
    own.write_bytes(own.read_bytes())  # what was read of it is known no more
    make_unreadable(monkeypatch, f"{own.parent.name}/b.parquet")
    assert "Permission denied" in derive(made, dtype)["b"], "whether it is fresh is not known"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), TransientError("disk is full")]
)
def test_file_that_cannot_be_written_fails_its_partition_by_key(
    made: Spaces, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise type(error)(*error.args)

    monkeypatch.setattr("surge_dagster.engine.derived.derive.write_rows", fail)
    outcomes = derive(made, "float16")
    assert list(outcomes) == list(KEYS)
    assert not {"derived", "fresh"} & set(outcomes.values())
    monkeypatch.undo()
    assert derive(made, "float16") == dict.fromkeys(KEYS, "derived")


def test_vector_that_is_zero_in_the_kept_dimensions_is_refused(made: Spaces) -> None:
    def empty_the_beginning(matrix: np.ndarray) -> np.ndarray:
        matrix[5] = np.eye(16, dtype=np.float32)[15]
        return matrix

    rewrite(made.file(MODEL, "b"), lambda table: with_vectors(table, empty_the_beginning))
    outcomes = derive(made, "float32", 8)
    assert outcomes["b"].startswith("partition 'b', row 5: its vector has length 0.0000")
    assert outcomes["a"] == "derived"


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "binary"])
def test_vector_of_zeros_of_a_blank_text_is_derived(made: Spaces, dtype: DerivedDtype) -> None:
    def of_blank_text(matrix: np.ndarray) -> np.ndarray:
        matrix[5] = 0
        return matrix

    rewrite(made.file(MODEL, "b"), lambda table: with_vectors(table, of_blank_text))
    assert derive(made, dtype, 8)["b"] == "derived"


def test_files_of_removed_partitions_are_reported_or_deleted(made: Spaces) -> None:
    derive(made)
    made.file(MODEL, "b").unlink()
    kept = run(made)
    list(kept.events())
    assert kept.report.partitions_removed == ["b"]
    assert file_of(made, kept.space, "b").exists()
    deleting = run(made, removed="delete")
    list(deleting.events(["a"]))
    assert deleting.report.partitions_removed == [], "the whole space was not looked at"
    list(deleting.events())
    assert not file_of(made, kept.space, "b").exists()
    assert file_of(made, kept.space, "a").exists()


def test_file_that_another_run_derives_before_the_deletion_is_kept(made: Spaces) -> None:
    parent = made.file(MODEL, "b")
    content = parent.read_bytes()
    parent.unlink()
    deleting = run(made, removed="delete")

    parent.write_bytes(content)
    derive(made)
    list(deleting.events())

    assert deleting.report.partitions_removed == []
    assert file_of(made, deleting.space, "b").exists()


def test_ranges_are_found_once_and_are_part_of_the_space(made: Spaces) -> None:
    first = run(made)
    list(first.events())
    vectors = np.concatenate([matrix_in(made.file(MODEL, key), "float32") for key in KEYS])
    assert first.space.derived
    assert first.space.derived.ranges == (
        tuple(vectors.min(0).tolist()),
        tuple(vectors.max(0).tolist()),
    )
    made.file(MODEL, "c").unlink()
    assert run(made).space == first.space, "later rows do not move them"
    other = made.of(MODEL).derive("int8", ranges=((-1.0,) * 16, (1.0,) * 16))
    assert other.name != first.space.name
    assert run(made, "int8", 8).space.name not in (first.space.name, other.name)


def test_embedding_never_finds_a_derived_space(made: Spaces) -> None:
    parent = made.of(MODEL)
    names = {parent.name}
    for dtype in ("int8", "float16", "binary"):
        names.add(run(made, dtype).space.name)
    assert find_space(made.store, EncodingSpec(MODEL)) == parent
    assert find_space(made.store, EncodingSpec(MODEL, dtype="float16")) is None
    assert {space.name for space in list_spaces(made.store)} == names
    assert len(names) == 4
    current = read_current(made.store)
    assert current and current.space == parent.name, "readers stay with the parent"


@pytest.mark.parametrize(
    ("dtype", "dimension", "message"),
    [
        ("float32", None, "has 16 dimensions in float32 already"),
        ("float32", 17, "dimension is 1 to 16"),
        ("binary", 12, "a multiple of 8, not 12"),
        ("int4", None, "is one of float32, float16, int8, binary"),
    ],
)
def test_conversion_that_cannot_be_is_refused(
    made: Spaces, dtype, dimension: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(made, dtype, dimension)


def test_empty_parent_cannot_be_calibrated(made: Spaces) -> None:
    for key in KEYS:
        made.file(MODEL, key).unlink()
    with pytest.raises(ConfigError, match="has no vectors to find the ranges"):
        run(made)
    assert len(list_spaces(made.store)) == 1, "no space was begun"


def test_space_is_derived_from_float32_vectors_alone(made: Spaces) -> None:
    half = run(made, "float16").space
    with pytest.raises(ConfigError, match=rf"is derived from {made.of(MODEL).name}"):
        half.derive("int8")
    with pytest.raises(ConfigError, match="holds float16 vectors"):
        replace(made.of(MODEL), dtype="float16").derive("int8")


def test_run_that_is_stopped_leaves_complete_files_and_no_threads(made: Spaces) -> None:
    events: Iterator = run(made, "float16", threads=1).events()
    next(events)
    events.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert set(derive(made, "float16").values()) <= {"fresh", "derived"}
