"""`verify` finds everything that would give a reader other rows than the source's, or wrong vectors."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.files.parquet import read_facts
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Compared, Verified, Violation, verify
from tests.engine.sources.test_parquet_system_errors import refuse_calls
from tests.small_catalogs import DIMENSION, FailingStore, rewrite, with_vectors

KEYS = ["a", "b", "Köln"]
ROWS = 40


def build_catalog(root: Path) -> Path:
    for key in KEYS:
        folder = root / f"partition={key.replace('ö', '%C3%B6')}"
        folder.mkdir(parents=True)
        texts = [f"{key} text number {row} {'long ' * (row % 7)}" for row in range(ROWS)]
        pq.write_table(pa.table({"id": [f"{key}-{row}" for row in range(ROWS)], "text": texts}), folder / "0.parquet")
    return root


@pytest.fixture(scope="module")
def pool():
    with EncoderPool(EncodingSpec(model="hash://16")) as started:
        yield started


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, pool: EncoderPool) -> Path:
    root = tmp_path_factory.mktemp("embedded")
    build_catalog(root / "catalog")
    run = EmbeddingRun(open_source(root / "catalog"), open_store(root / "out"), pool, Thresholds(b_min=50, b_max=100))
    assert len(list(run)) == len(KEYS)
    return root


@pytest.fixture
def copy(embedded: Path, tmp_path: Path) -> Path:
    shutil.copytree(embedded, tmp_path / "copy")
    return tmp_path / "copy"


def violations(root: Path, pool: EncoderPool, reencode: int | None = 0) -> list[Violation]:
    source, store = open_source(root / "catalog"), open_store(root / "out")
    events = verify(source, store, pool.space, pool=pool if reencode != 0 else None, reencode=reencode)
    return [event for event in events if isinstance(event, Violation)]


def output_file(root: Path, pool: EncoderPool, name: str = "a") -> Path:
    return root / "out" / pool.space.name / f"{name}.parquet"


def test_output_of_a_run_has_no_violation(embedded: Path, pool: EncoderPool) -> None:
    assert violations(embedded, pool, reencode=None) == []


def unread(events: Iterable[object]) -> list[str]:
    found = [event for event in events if isinstance(event, Violation) and event.kind == "unread"]
    assert all(one.reason.endswith("Nothing is known about it until it is checked again.") for one in found)
    assert not any(one.is_warning for one in found), "a verification with it does not pass"
    return [one.key for one in found]


def test_file_that_cannot_be_read_now_is_a_violation_and_the_others_are_read(copy: Path, pool: EncoderPool) -> None:
    shutil.rmtree(copy / "catalog" / "partition=b")
    events = list(verify(open_source(copy / "catalog"), FailingStore(copy / "out", "a", "b"), pool.space))
    assert unread(events) == ["a", f"{pool.space.name}/b.parquet"]
    assert [event for event in events if isinstance(event, Verified)] == [Verified("Köln", ROWS), Verified("a", 0)]
    assert len(events) == 4


def test_comparison_says_how_many_vectors_it_judged_and_of_how_many_files_it_could_not(
    embedded: Path, pool: EncoderPool
) -> None:
    source = open_source(embedded / "catalog")
    for store, reencode, expected in (
        (LocalStore(embedded / "out"), 3, (9, 3, 0)),
        (LocalStore(embedded / "out"), None, (3 * ROWS, 3, 0)),
        (FailingStore(embedded / "out", "a"), 3, (6, 2, 1)),
    ):
        *events, last = verify(source, store, pool.space, pool=pool, reencode=reencode)
        assert isinstance(last, Compared)
        assert (last.vectors, last.partitions, last.partitions_not_compared) == expected
        assert (last.seed is None) == (reencode is None)
        assert len(unread(events)) == expected[2], "what could not be judged is a violation"


def test_rows_that_are_encoded_again_are_drawn_anew_each_time(embedded: Path, pool: EncoderPool) -> None:
    source, store = open_source(embedded / "catalog"), LocalStore(embedded / "out")
    drawn: set[str] = set()
    for _ in range(4):
        *_, last = verify(source, store, pool.space, pool=pool, reencode=1)
        drawn.add(repr(last))
    assert len(drawn) > 1
    *_, again = verify(source, store, pool.space, pool=pool, reencode=1, seed=5)
    assert isinstance(again, Compared) and again.seed == 5


def test_source_that_cannot_be_read_now_is_a_violation(
    copy: Path, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_calls(monkeypatch, "os.scandir", copy / "catalog" / "partition=a", errno.EIO)
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "unread")]


def test_source_that_changed_after_it_was_listed_counts_as_unread(copy: Path, pool: EncoderPool) -> None:
    listed = list(open_source(copy / "catalog"))
    os.utime(copy / "catalog" / "partition=a" / "0.parquet", ns=(1, 1))
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "stale")]
    listed[1] = replace(listed[1], source_version="the version before")
    assert unread(verify(cast(Source, listed), open_store(copy / "out"), pool.space)) == ["a"]


def test_unavailable_store_ends_the_verification(
    embedded: Path, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(embedded / "out")
    events = verify(open_source(embedded / "catalog"), store, pool.space)
    assert next(events) == Verified("Köln", ROWS)

    def fail(*_: object) -> None:
        raise StoreUnavailable("the store is down")

    monkeypatch.setattr(store, "open", fail)
    with pytest.raises(StoreUnavailable):
        next(events)


def test_removed_row_is_found(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: pa.concat_tables([table.slice(0, 7), table.slice(8)]))
    found = violations(copy, pool)
    assert [(one.key, one.kind) for one in found] == [("a", "rows")]
    assert "39 rows and the source 40" in found[0].reason and "row 7" in found[0].reason


def test_removed_last_row_is_found(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: table.slice(0, ROWS - 1))
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "rows")]


def swap(table: pa.Table, column: str, first: int, second: int) -> pa.Table:
    order = list(range(table.num_rows))
    order[first], order[second] = order[second], order[first]
    index = table.schema.get_field_index(column)
    return table.set_column(index, table.schema.field(column), table.column(column).take(pa.array(order)))


def test_swapped_ids_are_found(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: swap(table, "id", 3, 4))
    found = violations(copy, pool)
    assert [(one.key, one.kind) for one in found] == [("a", "ids")]
    assert "row 3" in found[0].reason


def test_swapped_texts_are_found(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: swap(table, "text", 3, 4))
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "texts")]


def test_swapped_text_hash_is_found(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: swap(table, "text_hash", 3, 4))
    [found] = violations(copy, pool)
    assert (found.key, found.kind) == ("a", "texts") and "row 3: the file has the text_hash" in found.reason


def test_swapped_vectors_are_found_when_all_rows_are_encoded_again(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: swap(table, "embedding", 3, 4))
    assert violations(copy, pool) == [], "only encoding again can find it"
    found = violations(copy, pool, reencode=None)
    assert [(one.key, one.kind) for one in found] == [("a", "vectors")]
    assert "row 3" in found[0].reason


@pytest.mark.parametrize(("factor", "kind"), [(1.5, "length"), (float("nan"), "finite"), (float("inf"), "finite")])
def test_vector_without_length_1_is_found(copy: Path, pool: EncoderPool, factor: float, kind: str) -> None:
    def stretch(matrix: np.ndarray) -> np.ndarray:
        matrix[5] *= factor
        return matrix

    rewrite(output_file(copy, pool), lambda table: with_vectors(table, stretch))
    found = violations(copy, pool)
    assert [(one.key, one.kind) for one in found] == [("a", kind)]
    assert "row 5" in found[0].reason


def test_file_with_another_dimension_is_found(copy: Path, pool: EncoderPool) -> None:
    rewrite(output_file(copy, pool), lambda table: table, dimension=17)
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "dimension")]


def narrow(table: pa.Table) -> pa.Table:
    """A file's rows with vectors of half the dimension."""
    halves = [vector[: DIMENSION // 2] for vector in table.column("embedding").to_pylist()]
    return table.set_column(
        table.schema.get_field_index("embedding"),
        "embedding",
        pa.array(halves, pa.list_(pa.float32(), DIMENSION // 2)),
    )


def as_lists(table: pa.Table) -> pa.Table:
    """A file's rows with vectors in a column whose type has no dimension, as some programs write them."""
    return table.set_column(
        table.schema.get_field_index("embedding"),
        "embedding",
        pa.array(table.column("embedding").to_pylist(), pa.list_(pa.float32())),
    )


@pytest.mark.parametrize("metadata", ["kept", "lost"])
@pytest.mark.parametrize(
    ("change", "kind", "found"),
    [
        (narrow, "dimension", "expected 16 numbers per row"),
        (as_lists, "dimension", "expected 16 numbers per row"),
        (lambda table: narrow(table).slice(1), "dimension", "expected 16 numbers per row"),
        (lambda table: table.slice(0, ROWS - 1), "rows", "the file has 39 rows and the source 40."),
        (lambda table: table.slice(1), "rows", "the file has 39 rows and the source 40."),
        (lambda table: pa.concat_tables([table, table.slice(3, 1)]), "rows", "the file has 41 rows and the source 40."),
    ],
)
def test_dimension_and_rows_are_those_of_the_file_not_of_its_metadata(
    copy: Path, pool: EncoderPool, change: Callable[[pa.Table], pa.Table], kind: str, found: str, metadata: str
) -> None:
    path = output_file(copy, pool)
    table = pq.read_table(path)
    promised = table.schema.metadata if metadata == "kept" else None
    pq.write_table(change(table).replace_schema_metadata(promised), path)  # as another program writes it
    [reported] = violations(copy, pool)
    assert (reported.key, reported.kind) == ("a", kind) and found in reported.reason


def test_file_without_metadata_is_damaged_though_its_rows_are_right(copy: Path, pool: EncoderPool) -> None:
    path = output_file(copy, pool)
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "damaged")]


def test_truncated_file_is_found(copy: Path, pool: EncoderPool) -> None:
    path = output_file(copy, pool)
    for kept in (0, 3, path.stat().st_size // 2, path.stat().st_size - 1):
        shutil.copy(output_file(copy, pool, "b"), path)
        with path.open("r+b") as file:
            file.truncate(kept)
        assert ("a", "damaged") in [(one.key, one.kind) for one in violations(copy, pool)]


def test_file_of_another_partition_is_found(copy: Path, pool: EncoderPool) -> None:
    shutil.copy(output_file(copy, pool, "b"), output_file(copy, pool))
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "ids")]


def test_file_of_another_model_is_found(copy: Path, pool: EncoderPool) -> None:
    with EncoderPool(EncodingSpec(model="hash://16", document_prompt="query: ")) as other:
        list(EmbeddingRun(open_source(copy / "catalog"), open_store(copy / "out"), other))
        shutil.copy(output_file(copy, other), output_file(copy, pool))
    found = violations(copy, pool)
    assert [(one.key, one.kind) for one in found] == [("a", "space")]


def test_missing_file_is_found(copy: Path, pool: EncoderPool) -> None:
    output_file(copy, pool).unlink()
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "missing")]


def test_changed_partition_is_found(copy: Path, pool: EncoderPool) -> None:
    path = copy / "catalog" / "partition=a" / "0.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)
    assert [(one.key, one.kind) for one in violations(copy, pool)] == [("a", "stale")]


def test_refused_partition_is_a_violation_also_without_a_file(copy: Path, pool: EncoderPool) -> None:
    path = copy / "catalog" / "partition=a" / "0.parquet"
    table = pq.read_table(path)
    ids = [*table.column("id").to_pylist()[:-1], "a-0"]
    version = {b"surge.source_version": read_facts(pq.read_metadata(output_file(copy, pool))).source_version.encode()}
    pq.write_table(table.set_column(0, "id", pa.array(ids)).replace_schema_metadata(version), path)
    assert [(one.key, one.kind, one.is_warning) for one in violations(copy, pool)] == [("a", "ids", False)]
    output_file(copy, pool).unlink()
    found = violations(copy, pool)
    assert [(one.key, one.kind, one.is_warning) for one in found] == [("a", "refused", False)]
    assert found[0].has_no_file
    assert "row 39" in found[0].reason


def test_orphan_file_is_a_warning_only_if_it_is_valid(copy: Path, pool: EncoderPool) -> None:
    shutil.rmtree(copy / "catalog" / "partition=a")
    found = violations(copy, pool)
    assert [(one.key, one.kind, one.is_warning) for one in found] == [("a", "orphan", True)]
    with output_file(copy, pool).open("r+b") as file:
        file.truncate(100)
    assert [one.is_warning for one in violations(copy, pool)] == [False]


def what_a_reader_gets(store: Store, name: str) -> tuple[object, ...]:
    """Everything that pyarrow gives a reader: schema, rows, file metadata."""
    with store.open(name) as source:
        reader = pq.ParquetFile(source)
        table = reader.read()
        metadata = {key: value for key, value in (reader.metadata.metadata or {}).items() if key != b"ARROW:schema"}
        return (
            str(table.schema.remove_metadata()),
            table.column("id").to_pylist(),
            table.column("text").to_pylist(),
            np.asarray(table.column("embedding").combine_chunks().flatten()).tobytes(),
            json.dumps(sorted((str(key), str(value)) for key, value in metadata.items())),
        )


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_bit_flip_that_changes_what_a_reader_gets_is_found(copy: Path, pool: EncoderPool, step: int) -> None:
    # One random bit of every byte of a whole file, or of every fourth; about 8,000 files are written and verified.
    store = open_store(copy / "out")
    catalog = copy / "one"
    shutil.copytree(copy / "catalog" / "partition=a", catalog / "partition=a")
    path = output_file(copy, pool)
    for other in ("b", "K%C3%B6ln"):
        output_file(copy, pool, other).unlink()
    name = f"{pool.space.name}/a.parquet"
    good, content = what_a_reader_gets(store, name), path.read_bytes()
    source, rng = open_source(catalog), random.Random(7)
    missed: list[int] = []
    harmless = 0
    for place in range(rng.randrange(step), len(content), step):
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        if any(isinstance(event, Violation) for event in verify(source, store, pool.space)):
            continue
        harmless += 1
        if what_a_reader_gets(store, name) != good:
            missed.append(place)
    assert missed == []
    assert harmless < len(content) // step // 10, "most bytes of a file matter"
