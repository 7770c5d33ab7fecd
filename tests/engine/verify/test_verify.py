"""`verify` finds everything that would give a reader other rows than the source's, or wrong
vectors."""

from __future__ import annotations

import errno
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
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import (
    Compared,
    Verified,
    Violation,
    unjudged_kinds,
    verify,
)
from tests.engine.runs import Output, of_kind
from tests.engine.sources.test_parquet_system_errors import refuse_calls
from tests.small_catalogs import (
    FailingStore,
    narrow,
    numbered_rows,
    partition_folder,
    rewrite,
    tamper,
    with_vectors,
    write_catalog,
)

ROWS = 40
CATALOG = {
    "a": numbered_rows("a", ROWS),
    "b": numbered_rows("b", ROWS, start=100),
    "Köln": numbered_rows("Köln", ROWS, start=200),
}


class Complete(Output):
    """A catalog and its complete output."""

    def __init__(self, pool: EncoderPool, root: Path) -> None:
        super().__init__(pool, root / "out")
        self.catalog = root / "catalog"
        self.source_file = self.catalog / "partition=a" / "part-0.parquet"

    @property
    def source(self) -> Source:
        return open_source(self.catalog)

    def found(self, reencode: int | None = 0) -> list[Violation]:
        pool = None if reencode == 0 else self.pool
        return self.violations(self.source, pool=pool, reencode=reencode)

    def kinds(self) -> list[tuple[str, str]]:
        return [(violation.key, violation.kind) for violation in self.found()]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, hash_pool: EncoderPool) -> Complete:
    made = Complete(hash_pool, tmp_path_factory.mktemp("embedded"))
    write_catalog(made.catalog, CATALOG, version=None)
    made.embed(made.source)
    return made


@pytest.fixture
def copy(embedded: Complete, tmp_path: Path) -> Complete:
    """One that the test may spoil."""
    shutil.copytree(embedded.root.parent, tmp_path / "copy")
    return Complete(embedded.pool, tmp_path / "copy")


def test_output_of_a_run_has_no_violation(embedded: Complete) -> None:
    assert embedded.found(reencode=None) == []


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
    hash_pool: EncoderPool, dtype: str, normalize: bool, expected: set[str]
) -> None:
    space = replace(hash_pool.space, dtype=dtype, normalize=normalize)
    assert unjudged_kinds(space) == expected


def unread(events: Iterable[object]) -> list[str]:
    keys: list[str] = []
    for violation in of_kind(events, Violation):
        if violation.kind == "unread":
            assert violation.reason.endswith("Nothing is known about it until it is checked again.")
            assert not violation.is_warning, "a verification with it does not pass"
            keys.append(violation.key)
    return keys


def test_file_that_cannot_be_read_now_is_a_violation(copy: Complete) -> None:
    shutil.rmtree(copy.catalog / "partition=b")
    events = list(verify(copy.source, FailingStore(copy.root, "a", "b"), copy.pool.space))
    assert unread(events) == ["a", f"{copy.space}/b.parquet"]
    assert of_kind(events, Verified) == [
        Verified("Köln", ROWS, source_rows=ROWS),
        Verified("a", 0),
    ]
    assert len(events) == 4


def test_comparison_says_how_many_vectors_and_files_it_judged(embedded: Complete) -> None:
    source = embedded.source
    for store, reencode, expected in (
        (embedded.store, 3, (9, 3, 0)),
        (embedded.store, None, (3 * ROWS, 3, 0)),
        (FailingStore(embedded.root, "a"), 3, (6, 2, 1)),
    ):
        *events, last = verify(
            source, store, embedded.pool.space, pool=embedded.pool, reencode=reencode
        )
        assert isinstance(last, Compared)
        assert (last.vectors, last.partitions, last.partitions_not_compared) == expected
        assert (last.seed is None) == (reencode is None)
        assert len(unread(events)) == expected[2], "what could not be judged is a violation"


def test_rows_that_are_encoded_again_are_drawn_anew_each_time(embedded: Complete) -> None:
    source = embedded.source
    store = embedded.store
    drawn: set[str] = set()
    for _ in range(4):
        *_, last = verify(source, store, embedded.pool.space, pool=embedded.pool, reencode=1)
        drawn.add(repr(last))
    assert len(drawn) > 1
    *_, again = verify(source, store, embedded.pool.space, pool=embedded.pool, reencode=1, seed=5)
    assert isinstance(again, Compared)
    assert again.seed == 5


def test_source_that_cannot_be_read_now_is_a_violation(
    copy: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_calls(monkeypatch, "pyarrow.OSFile", copy.source_file, errno.EIO)
    assert copy.kinds() == [("a", "unread")]


def test_source_that_changed_after_it_was_listed_counts_as_unread(copy: Complete) -> None:
    listed = list(copy.source)
    os.utime(copy.source_file, ns=(1, 1))
    assert copy.kinds() == [("a", "stale")]
    listed[1] = replace(listed[1], source_version="the version before")
    assert unread(verify(cast(Source, listed), copy.store, copy.pool.space)) == ["a"]


def test_unavailable_store_ends_the_verification(
    embedded: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = embedded.store
    events = verify(embedded.source, store, embedded.pool.space)
    assert next(events) == Verified("Köln", ROWS, source_rows=ROWS)

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
        (lambda table: swap(table, "id", 3, 4), "ids", "row 3: the file has the id 'id-4'"),
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
    copy: Complete, change: Callable[[pa.Table], pa.Table], kind: str, reason: str
) -> None:
    rewrite(copy.path("a"), change)
    [violation] = copy.found()
    assert violation.key == "a"
    assert violation.kind == kind
    assert reason in violation.reason


def test_swapped_vectors_are_found_when_all_rows_are_encoded_again(copy: Complete) -> None:
    rewrite(copy.path("a"), lambda table: swap(table, "embedding", 3, 4))
    assert copy.found() == [], "only encoding again can find it"
    [violation] = copy.found(reencode=None)
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
    copy: Complete,
    change: Callable[[pa.Table], pa.Table],
    kind: str,
    found: str,
    metadata: str,
) -> None:
    path = copy.path("a")
    if metadata == "kept":
        tamper(path, change)
    else:
        pq.write_table(change(pq.read_table(path)).replace_schema_metadata(None), path)
    [reported] = copy.found()
    assert reported.key == "a"
    assert reported.kind == kind
    assert found in reported.reason


def test_metadata_that_are_missing_or_name_another_dimension_are_found(copy: Complete) -> None:
    path = copy.path("a")
    rewrite(path, lambda table: table, dimension=17)
    assert copy.kinds() == [("a", "dimension")]
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    assert copy.kinds() == [("a", "damaged")]


def test_file_of_another_partition_or_model_and_a_missing_one_are_found(copy: Complete) -> None:
    shutil.copy(copy.path("b"), copy.path("a"))
    assert copy.kinds() == [("a", "ids")]
    with EncoderPool(EncodingSpec(model="hash://16", document_prompt="query: ")) as other:
        output = Output(other, copy.root)
        output.embed(copy.source)
        shutil.copy(output.path("a"), copy.path("a"))
    assert copy.kinds() == [("a", "space")]
    copy.path("a").unlink()
    assert copy.kinds() == [("a", "missing")]


def test_refused_partition_is_a_violation_also_without_a_file(copy: Complete) -> None:
    path = copy.source_file
    table = pq.read_table(path)
    ids = [*table.column("id").to_pylist()[:-1], "id-0"]
    version = {
        b"surge.source_version": read_facts(
            pq.read_metadata(copy.path("a"))
        ).source_version.encode()
    }
    pq.write_table(table.set_column(0, "id", pa.array(ids)).replace_schema_metadata(version), path)
    assert copy.kinds() == [("a", "ids")]
    copy.path("a").unlink()
    [refused] = copy.found()
    assert refused.key == "a"
    assert refused.kind == "refused"
    assert not refused.is_warning
    assert refused.has_no_file
    assert "row 39" in refused.reason


def test_stray_file_belongs_to_no_partition(copy: Complete) -> None:
    stray = copy.path("a").with_name("notes.parquet")
    pq.write_table(pa.table({"note": ["mine"]}), stray)

    [found] = copy.found()

    assert found.reason.endswith("No partition of the catalog has this name. Move the file away.")


def test_file_of_a_removed_partition_is_a_violation(copy: Complete) -> None:
    derive = DeriveRun(copy.store, copy.pool.space, "float32", 8)
    list(derive.events())
    shutil.rmtree(copy.catalog / "partition=a")
    [orphan] = copy.found()
    assert orphan.key == "a"
    assert orphan.kind == "orphan"
    assert not orphan.is_warning
    deletion = (
        "by hand, or with `surge-dagster embed --removed-partitions delete` (refused if many "
        "partitions were removed)"
    )
    assert orphan.remedy == f"If it does not come back, delete its file {deletion}."
    found = verify(copy.source, copy.store, derive.space)
    [derived] = of_kind(found, Violation)
    assert derived.remedy == (
        f"If it does not come back, delete its file in {copy.space} {deletion}, then run "
        "`surge-dagster derive --removed delete`."
    ), "the parent still has the file"
    with copy.path("a").open("r+b") as file:
        file.truncate(100)
    [damaged] = copy.found()
    assert not damaged.is_warning


def what_a_reader_gets(path: Path) -> pa.Table:
    """Everything that pyarrow gives a reader: schema, rows, file metadata."""
    with pq.ParquetFile(path) as file:
        return file.read()


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_bit_flip_that_changes_what_a_reader_gets_is_found(copy: Complete, step: int) -> None:
    # One random bit of every byte of a whole file, or of every fourth; about 8,000 files are
    # written and verified.
    path = copy.path("a")
    for other in ("b", "Köln"):
        copy.path(other).unlink()
        shutil.rmtree(partition_folder(copy.catalog, other))
    good = what_a_reader_gets(path)
    content = path.read_bytes()
    rng = random.Random(7)
    missed: list[int] = []
    harmless = 0
    for place in range(rng.randrange(step), len(content), step):
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        if copy.found():
            continue
        harmless += 1
        if not what_a_reader_gets(path).equals(good, check_metadata=True):
            missed.append(place)
    assert missed == []
    assert harmless < len(content) // step // 10, "most bytes of a file matter"
