"""Further columns of a source reach the output beside their own rows, from every kind of source,
whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import file_name, read_published_file
from surge_dagster.engine.files.rows import carried_columns
from surge_dagster.engine.readers.loading import open_embeddings
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Selection, Source
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.tables.frames import FrameCatalog
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.runs import (
    completed,
    failures,
    finish,
    finish_receipts,
    limit_bytes,
    make_run,
    of_kind,
    receipts,
)
from tests.small_catalogs import assert_embedded, rewrite

SELECTION = Selection(carried=("sku", "price"))
NAMES = ("id", "text", "category", "sku", "price")
ROWS = [
    (
        f"i{row}",
        f"text {row}",
        "big" if row % 4 else "small",
        f"sku {row}",
        None if row % 7 == 0 else row / 4,
    )
    for row in range(300)
]
# from every kind of source
DIGESTS = {"cece46b7e1f35946f587f996667ccf6d", "022127d33c1b8da83eaa91b7674bf7a0"}
SPLIT = Thresholds(1, 60)  # "big" has 225 rows


def columns_of(rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(NAMES)}


def shuffled() -> list[tuple[Any, ...]]:
    """The rows of both keys in turns, those of each in their order."""
    chosen = random.Random(3).sample(range(len(ROWS)), len(ROWS))
    coming = {key: iter([row for row in ROWS if row[2] == key]) for key in ("big", "small")}
    return [next(coming[ROWS[place][2]]) for place in chosen]


def in_folders(folder: Path) -> Source:
    for key in ("big", "small"):
        (folder / f"partition={key}").mkdir(parents=True)
        pq.write_table(
            pa.table(columns_of([row for row in ROWS if row[2] == key])),
            folder / f"partition={key}/a.parquet",
        )
    return open_source(folder, selection=SELECTION)


def in_table(folder: Path) -> Source:
    folder.mkdir()
    pq.write_table(pa.table(columns_of(shuffled())), folder / "t.parquet")
    return open_source(folder / "t.parquet", selection=SELECTION, partition_by=["category"])


def in_frames(folder: Path) -> Source:
    frames = {
        key: pa.table(columns_of([row for row in ROWS if row[2] == key]))
        for key in ("big", "small")
    }
    return FrameCatalog(frames, SELECTION)


def carried(output: Path) -> list[tuple[Any, ...]]:
    """All rows of an output as the rows of the catalog."""
    table = (
        open_embeddings(output)
        .dataset()
        .to_table(columns=["id", "text", "partition", "sku", "price"])
    )
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def expected() -> list[tuple[Any, ...]]:
    return [tuple(row) for key in ("big", "small") for row in ROWS if row[2] == key]


@pytest.mark.parametrize("made", [in_folders, in_table, in_frames])
def test_columns_are_beside_their_own_rows(
    hash_pool: EncoderPool, tmp_path: Path, made: Any
) -> None:
    source = made(tmp_path / "in")
    output = tmp_path / "out"
    run = make_run(hash_pool, source, output, SPLIT)
    assert len(finish_receipts(run, "encoded")) == 2
    assert carried(output) == expected()
    digests = {
        row.content_digest
        for row in finish_receipts(make_run(hash_pool, source, output, SPLIT), "fresh")
    }
    assert digests == DIGESTS
    assert not of_kind(verify(source, open_store(output), run.space), Violation)


def test_types_are_stored_searched_and_loaded_in_both_formats(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    further = {
        "a:b c": pa.array([[1], None, []], pa.list_(pa.int64())),
        "made": pa.array([{"x": "y"}, None, {"x": None}]),
        "when": pa.array([0, None, 5], pa.timestamp("us", "UTC")),
        "is": pa.array([True, None, False]),
    }
    table = pa.table({"id": ["1", "2", "3"], "text": ["one", "two", "three"], **further})
    source = FrameCatalog({"k": table}, Selection(carried=tuple(further)))
    run = make_run(hash_pool, source, tmp_path)
    assert finish_receipts(run, "encoded")
    opened = open_embeddings(tmp_path)
    names = ["partition", "id", "text", *further, "embedding"]
    for loaded in (opened.dataset().to_table(), opened.lazy().collect().to_arrow()):
        assert loaded.column_names == names
        assert [loaded[name].to_pylist() for name in further] == [
            column.to_pylist() for column in further.values()
        ]
    assert opened.dataset().schema.field("when").type == pa.timestamp("us", "UTC")
    [[hit]] = search(open_store(tmp_path), hash_pool, ["one"], 1)
    assert hit.columns == {name: column[0].as_py() for name, column in further.items()}
    assert (
        assert_embedded(
            tmp_path, run.space.name, "k", [("1", "one"), ("2", "two"), ("3", "three")]
        ).rows
        == 3
    )


def cut_off(partition: Partition, at: int) -> Partition:
    """A partition whose storage stops to answer at a row."""

    def read() -> Iterator[RowBatch]:
        for batch in partition.read():
            yield batch.rows(0, at)
            raise OSError("the storage does not answer")

    return replace(partition, read=read)


def test_killed_run_goes_on_from_staged_rows_with_their_columns(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    [big, _] = in_frames(tmp_path)
    assert failures(finish(make_run(hash_pool, [cut_off(big, 130)], tmp_path, SPLIT)))
    [receipt] = finish_receipts(make_run(hash_pool, [big], tmp_path, Thresholds(1, 100)), "encoded")
    assert receipt.texts_reused == 120
    assert carried(tmp_path) == [row for row in expected() if row[2] == "big"]


def test_changed_value_or_list_of_columns_makes_files_stale(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    def actions(table: pa.Table, *names: str, version: str) -> list[str]:
        source = FrameCatalog({"k": table}, Selection(carried=names), versions={"k": version})
        return [each.action for each in receipts(finish(make_run(hash_pool, source, tmp_path)))]

    table = pa.table({"id": ["1"], "text": ["one"], "price": [1.5], "sku": ["s"]})
    assert actions(table, version="v1") == ["encoded"]
    assert actions(table, "price", version="v1") == ["encoded"]
    assert actions(table, "price", version="v1") == ["fresh"]
    assert actions(table, "price", version="v2") == ["republished"]
    assert carried_names(tmp_path, hash_pool) == ["price"]
    other = table.set_column(2, "price", pa.array([2.5]))
    assert actions(other, "price", version="v3") == ["encoded"]
    assert actions(other, "price", "sku", version="v3") == ["encoded"]
    assert actions(other, version="v3") == ["encoded"]
    assert carried_names(tmp_path, hash_pool) == []


def carried_names(output: Path, pool: EncoderPool) -> list[str]:
    found = carried_columns(
        read_published_file(LocalStore(output), file_name(pool.space.name, "k")).columns
    )
    return found.names if found is not None else []


def test_partitions_with_other_types_are_not_loaded_together(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    for key, further in {
        "a": {"price": [1]},
        "b": {"price": [1.5]},
        "c": {"price": [2], "sku": ["s"]},
    }.items():
        table = pa.table({"id": ["1"], "text": ["one"], **further})
        finish(
            make_run(
                hash_pool, FrameCatalog({key: table}, Selection(carried=tuple(further))), tmp_path
            )
        )
    opened = open_embeddings(tmp_path)
    with pytest.raises(
        DataError, match="'b': its column 'price' has type double, and that of 'a' has type int64"
    ):
        opened.lazy()
    for table in (
        opened.dataset(["a", "c"]).to_table(),
        opened.lazy(["a", "c"]).collect().to_arrow(),
    ):
        assert table.select(["price", "sku"]).to_pylist() == [
            {"price": 1, "sku": None},
            {"price": 2, "sku": "s"},
        ]
    assert opened.lazy(["b"]).collect()["price"].to_list() == [1.5]


def test_other_value_in_the_file_is_found_by_verify(hash_pool: EncoderPool, tmp_path: Path) -> None:
    source = in_frames(tmp_path)
    run = completed(make_run(hash_pool, source, tmp_path))
    path = tmp_path / file_name(run.space.name, "small")

    def raise_price(table: pa.Table) -> pa.Table:
        prices = table["price"].to_pylist()
        return table.set_column(
            table.column_names.index("price"), "price", [[*prices[:5], 99.0, *prices[6:]]]
        )

    rewrite(path, raise_price)
    [found] = of_kind(verify(source, open_store(tmp_path), run.space), Violation)
    assert found.key == "small"
    assert found.kind == "columns"
    assert found.finding == "row 5: the file has the price 99.0 and the source 5.0."


def test_ledger_covers_carried_bytes(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"id": ["1", "2", "3"], "text": ["a"] * 3, "blob": ["x" * 2_000_000] * 3})
    source = FrameCatalog({"k": table}, Selection(carried=("blob",)))
    limit_bytes(monkeypatch, 5_000_000)
    run = make_run(hash_pool, source, tmp_path, Thresholds(1, 100))
    [receipt] = finish_receipts(run, "encoded")
    assert receipt.superbatch == 1, "three such rows are more than a SuperBatch"
    assert run.report.peak_resident_bytes > 4_000_000
    source = FrameCatalog({"k": table}, Selection(carried=("blob",)))
    limit_bytes(monkeypatch, 1_500_000)
    [failure] = failures(
        finish(make_run(hash_pool, source, tmp_path / "narrow", Thresholds(1, 100)))
    )
    assert "the row has 2,000,0" in failure.reason
    assert "Shorten its values, or raise" in failure.reason


def test_file_whose_types_are_not_those_that_it_states_is_invalid(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run = completed(make_run(hash_pool, in_frames(tmp_path), tmp_path))
    name = file_name(run.space.name, "small")
    rewrite(tmp_path / name, lambda table: table, carried_columns="sku: string, cost: double")
    with pytest.raises(
        InvalidFile, match="promise the carried columns 'sku: string, cost: double'; it has"
    ):
        read_published_file(LocalStore(tmp_path), name)


def test_nan_and_times_beyond_python_are_verified_and_found(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    further = {"p": pa.array([[float("nan"), 1.0]]), "far": pa.array([2**60], pa.timestamp("us"))}
    table = pa.table({"id": ["1"], "text": ["one"], **further})
    source = FrameCatalog({"k": table}, Selection(carried=("p", "far")))
    run = completed(make_run(hash_pool, source, tmp_path))
    assert not of_kind(verify(source, open_store(tmp_path), run.space), Violation)
    [[hit]] = search(open_store(tmp_path), hash_pool, ["one"], 1)
    assert "1152921504606846976" in hit.columns["far"], hit.columns
