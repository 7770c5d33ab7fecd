"""`verify` finds everything that would give a reader other rows than the source's, or wrong
vectors."""

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

from surge_dagster.engine.derived.derive import DeriveRun
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
from surge_dagster.engine.verify.verification import (
    Compared,
    Verified,
    Violation,
    unjudged_kinds,
    verify,
)
from tests.engine.sources.test_parquet_system_errors import refuse_calls
from tests.small_catalogs import FailingStore, narrow, rewrite, tamper, with_vectors

KEYS = ["a", "b", "Köln"]
ROWS = 40


def build_catalog(root: Path) -> Path:
    for key in KEYS:
        folder = root / f"partition={key.replace('ö', '%C3%B6')}"
        folder.mkdir(parents=True)
        texts = [f"{key} text number {row} {'long ' * (row % 7)}" for row in range(ROWS)]
        pq.write_table(
            pa.table({"id": [f"{key}-{row}" for row in range(ROWS)], "text": texts}),
            folder / "0.parquet",
        )
    return root


@pytest.fixture(scope="module")
def pool():
    with EncoderPool(EncodingSpec(model="hash://16")) as started:
        yield started


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, pool: EncoderPool) -> Path:
    root = tmp_path_factory.mktemp("embedded")
    build_catalog(root / "catalog")
    run = EmbeddingRun(
        open_source(root / "catalog"),
        open_store(root / "out"),
        pool,
        Thresholds(b_min=50, b_max=100),
    )
    assert len(list(run)) == len(KEYS)
    return root


@pytest.fixture
def copy(embedded: Path, tmp_path: Path) -> Path:
    shutil.copytree(embedded, tmp_path / "copy")
    return tmp_path / "copy"


def violations(root: Path, pool: EncoderPool, reencode: int | None = 0) -> list[Violation]:
    source = open_source(root / "catalog")
    store = open_store(root / "out")
    events = verify(
        source, store, pool.space, pool=pool if reencode != 0 else None, reencode=reencode
    )
    return [event for event in events if isinstance(event, Violation)]


def kinds(root: Path, pool: EncoderPool, reencode: int | None = 0) -> list[tuple[str, str]]:
    return [(violation.key, violation.kind) for violation in violations(root, pool, reencode)]


def output_file(root: Path, pool: EncoderPool, name: str = "a") -> Path:
    return root / "out" / pool.space.name / f"{name}.parquet"


def test_output_of_a_run_has_no_violation(embedded: Path, pool: EncoderPool) -> None:
    assert violations(embedded, pool, reencode=None) == []


@pytest.mark.parametrize(
    ("dtype", "normalize", "expected"),
    [
        ("float32", True, set()),
        ("float16", True, set()),
        ("float32", False, {"length"}),
        ("int8", True, {"finite", "length"}),
        ("binary", False, {"finite", "length"}),
    ],
)
def test_kinds_that_a_space_cannot_have_are_named(
    pool: EncoderPool, dtype: str, normalize: bool, expected: set[str]
) -> None:
    space = replace(pool.space, dtype=dtype, normalize=normalize)
    assert unjudged_kinds(space) == expected


def unread(events: Iterable[object]) -> list[str]:
    unread = [event for event in events if isinstance(event, Violation) and event.kind == "unread"]
    for violation in unread:
        assert violation.reason.endswith("Nothing is known about it until it is checked again.")
        assert not violation.is_warning, "a verification with it does not pass"
    return [violation.key for violation in unread]


def test_file_that_cannot_be_read_now_is_a_violation(copy: Path, pool: EncoderPool) -> None:
    shutil.rmtree(copy / "catalog" / "partition=b")
    events = list(
        verify(open_source(copy / "catalog"), FailingStore(copy / "out", "a", "b"), pool.space)
    )
    assert unread(events) == ["a", f"{pool.space.name}/b.parquet"]
    assert [event for event in events if isinstance(event, Verified)] == [
        Verified("Köln", ROWS),
        Verified("a", 0),
    ]
    assert len(events) == 4


def test_comparison_says_how_many_vectors_and_files_it_judged(
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


def test_rows_that_are_encoded_again_are_drawn_anew_each_time(
    embedded: Path, pool: EncoderPool
) -> None:
    source = open_source(embedded / "catalog")
    store = LocalStore(embedded / "out")
    drawn: set[str] = set()
    for _ in range(4):
        *_, last = verify(source, store, pool.space, pool=pool, reencode=1)
        drawn.add(repr(last))
    assert len(drawn) > 1
    *_, again = verify(source, store, pool.space, pool=pool, reencode=1, seed=5)
    assert isinstance(again, Compared)
    assert again.seed == 5


def test_source_that_cannot_be_read_now_is_a_violation(
    copy: Path, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_calls(
        monkeypatch, "pyarrow.OSFile", copy / "catalog" / "partition=a" / "0.parquet", errno.EIO
    )
    assert kinds(copy, pool) == [("a", "unread")]


def test_source_that_changed_after_it_was_listed_counts_as_unread(
    copy: Path, pool: EncoderPool
) -> None:
    listed = list(open_source(copy / "catalog"))
    os.utime(copy / "catalog" / "partition=a" / "0.parquet", ns=(1, 1))
    assert kinds(copy, pool) == [("a", "stale")]
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


def swap(table: pa.Table, column: str, first: int, second: int) -> pa.Table:
    order = list(range(table.num_rows))
    order[first], order[second] = order[second], order[first]
    index = table.schema.get_field_index(column)
    return table.set_column(
        index, table.schema.field(column), table.column(column).take(pa.array(order))
    )


def stretch(table: pa.Table, factor: float) -> pa.Table:
    def stretched(matrix: np.ndarray) -> np.ndarray:
        matrix[5] *= factor
        return matrix

    return with_vectors(table, stretched)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (
            lambda table: pa.concat_tables([table[:7], table[8:]]),
            "rows",
            "39 rows and the source 40. row 7: ",
        ),
        (lambda table: table[: ROWS - 1], "rows", "39 rows"),
        (lambda table: swap(table, "id", 3, 4), "ids", "row 3: the file has the id 'a-4'"),
        (lambda table: swap(table, "text", 3, 4), "texts", "row 3: the file has the text 'a"),
        (
            lambda table: swap(table, "text_hash", 3, 4),
            "texts",
            "row 3: the file has the text_hash",
        ),
        (lambda table: stretch(table, 1.5), "length", "row 5"),
        (lambda table: stretch(table, float("nan")), "finite", "row 5"),
        (lambda table: stretch(table, float("inf")), "finite", "row 5"),
    ],
)
def test_changed_row_is_found_and_named(
    copy: Path, pool: EncoderPool, change: Callable[[pa.Table], pa.Table], kind: str, reason: str
) -> None:
    rewrite(output_file(copy, pool), change)
    [violation] = violations(copy, pool)
    assert violation.key == "a"
    assert violation.kind == kind
    assert reason in violation.reason


def test_swapped_vectors_are_found_when_all_rows_are_encoded_again(
    copy: Path, pool: EncoderPool
) -> None:
    rewrite(output_file(copy, pool), lambda table: swap(table, "embedding", 3, 4))
    assert violations(copy, pool) == [], "only encoding again can find it"
    [violation] = violations(copy, pool, reencode=None)
    assert violation.key == "a"
    assert violation.kind == "vectors"
    assert "row 3" in violation.reason


@pytest.mark.parametrize("metadata", ["kept", "lost"])
@pytest.mark.parametrize(
    ("change", "kind", "found"),
    [
        (narrow, "dimension", "expected 16 numbers per row"),
        (lambda table: narrow(table, -1), "dimension", "expected 16 numbers per row"),
        (lambda table: narrow(table).slice(1), "dimension", "expected 16 numbers per row"),
        (lambda table: table.slice(0, ROWS - 1), "rows", "the file has 39 rows and the source 40."),
        (lambda table: table.slice(1), "rows", "the file has 39 rows and the source 40."),
        (
            lambda table: pa.concat_tables([table, table.slice(3, 1)]),
            "rows",
            "the file has 41 rows and the source 40.",
        ),
    ],
)
def test_dimension_and_rows_are_those_of_the_file_not_of_its_metadata(
    copy: Path,
    pool: EncoderPool,
    change: Callable[[pa.Table], pa.Table],
    kind: str,
    found: str,
    metadata: str,
) -> None:
    path = output_file(copy, pool)
    if metadata == "kept":
        tamper(path, change)
    else:
        pq.write_table(change(pq.read_table(path)).replace_schema_metadata(None), path)
    [reported] = violations(copy, pool)
    assert reported.key == "a"
    assert reported.kind == kind
    assert found in reported.reason


def test_metadata_that_are_missing_or_name_another_dimension_are_found(
    copy: Path, pool: EncoderPool
) -> None:
    path = output_file(copy, pool)
    rewrite(path, lambda table: table, dimension=17)
    assert kinds(copy, pool) == [("a", "dimension")]
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    assert kinds(copy, pool) == [("a", "damaged")]


def test_file_of_another_partition_or_model_and_a_missing_one_are_found(
    copy: Path, pool: EncoderPool
) -> None:
    shutil.copy(output_file(copy, pool, "b"), output_file(copy, pool))
    assert kinds(copy, pool) == [("a", "ids")]
    with EncoderPool(EncodingSpec(model="hash://16", document_prompt="query: ")) as other:
        list(EmbeddingRun(open_source(copy / "catalog"), open_store(copy / "out"), other))
        shutil.copy(output_file(copy, other), output_file(copy, pool))
    assert kinds(copy, pool) == [("a", "space")]
    output_file(copy, pool).unlink()
    assert kinds(copy, pool) == [("a", "missing")]


def test_refused_partition_is_a_violation_also_without_a_file(
    copy: Path, pool: EncoderPool
) -> None:
    path = copy / "catalog" / "partition=a" / "0.parquet"
    table = pq.read_table(path)
    ids = [*table.column("id").to_pylist()[:-1], "a-0"]
    version = {
        b"surge.source_version": read_facts(
            pq.read_metadata(output_file(copy, pool))
        ).source_version.encode()
    }
    pq.write_table(table.set_column(0, "id", pa.array(ids)).replace_schema_metadata(version), path)
    assert kinds(copy, pool) == [("a", "ids")]
    output_file(copy, pool).unlink()
    [refused] = violations(copy, pool)
    assert refused.key == "a"
    assert refused.kind == "refused"
    assert not refused.is_warning
    assert refused.has_no_file
    assert "row 39" in refused.reason


def test_stray_file_belongs_to_no_partition(copy: Path, pool: EncoderPool) -> None:
    stray = output_file(copy, pool).with_name("notes.parquet")
    pq.write_table(pa.table({"note": ["mine"]}), stray)

    [found] = violations(copy, pool)

    assert found.reason.endswith("No partition of the catalog has this name. Move the file away.")


def test_file_of_a_removed_partition_is_a_violation(copy: Path, pool: EncoderPool) -> None:
    derive = DeriveRun(open_store(copy / "out"), pool.space, "float32", 8)
    list(derive.events())
    shutil.rmtree(copy / "catalog" / "partition=a")
    [orphan] = violations(copy, pool)
    assert orphan.key == "a"
    assert orphan.kind == "orphan"
    assert not orphan.is_warning
    deletion = (
        "by hand, or with `surge-dagster embed --removed-partitions delete` (refused if many "
        "partitions were removed)"
    )
    assert orphan.remedy == f"If it does not come back, delete its file {deletion}."
    found = verify(open_source(copy / "catalog"), open_store(copy / "out"), derive.space)
    [derived] = [event for event in found if isinstance(event, Violation)]
    assert derived.remedy == (
        f"If it does not come back, delete its file in {pool.space.name} {deletion}, then run "
        "`surge-dagster derive --removed delete`."
    ), "the parent still has the file"
    with output_file(copy, pool).open("r+b") as file:
        file.truncate(100)
    assert [violation.is_warning for violation in violations(copy, pool)] == [False]


def what_a_reader_gets(store: Store, name: str) -> tuple[object, ...]:
    """Everything that pyarrow gives a reader: schema, rows, file metadata."""
    with store.open(name) as source:
        reader = pq.ParquetFile(source)
        table = reader.read()
        metadata = {
            key: value
            for key, value in (reader.metadata.metadata or {}).items()
            if key != b"ARROW:schema"
        }
        return (
            str(table.schema.remove_metadata()),
            table.column("id").to_pylist(),
            table.column("text").to_pylist(),
            np.asarray(table.column("embedding").combine_chunks().flatten()).tobytes(),
            json.dumps(sorted((str(key), str(value)) for key, value in metadata.items())),
        )


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_bit_flip_that_changes_what_a_reader_gets_is_found(
    copy: Path, pool: EncoderPool, step: int
) -> None:
    # One random bit of every byte of a whole file, or of every fourth; about 8,000 files are
    # written and verified.
    store = open_store(copy / "out")
    catalog = copy / "one"
    shutil.copytree(copy / "catalog" / "partition=a", catalog / "partition=a")
    path = output_file(copy, pool)
    for other in ("b", "K%C3%B6ln"):
        output_file(copy, pool, other).unlink()
    name = f"{pool.space.name}/a.parquet"
    good = what_a_reader_gets(store, name)
    content = path.read_bytes()
    source = open_source(catalog)
    rng = random.Random(7)
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
