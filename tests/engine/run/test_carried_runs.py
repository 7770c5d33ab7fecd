"""Further columns of a source reach the output beside their own rows, from every kind of source,
whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import DataError, MaxCostReached
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import file_name, read_published_file
from surge_dagster.engine.readers.loading import open_embeddings
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.run.report import Prices
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Selection, Source
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.tables.frames import FrameCatalog
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import (
    Output,
    failures,
    finish,
    limit_bytes,
    receipts,
)
from tests.small_catalogs import rewrite

SELECTION = Selection(carried=("sku", "price"))
NAMES = ["id", "text", "category", "sku", "price"]
ORDER = range(300)
TABLE = pa.Table.from_pylist(
    [
        {
            "id": f"i{row}",
            "text": f"text {row}",
            "category": "big" if row % 4 else "small",
            "sku": f"sku {row}",
            "price": row / 4 if row % 7 else None,
        }
        for row in ORDER
    ]
)
BIG = TABLE.filter(pc.field("category") == "big")
LITTLE = TABLE.filter(pc.field("category") == "small")
# from every kind of source
DIGESTS = {"cece46b7e1f35946f587f996667ccf6d", "022127d33c1b8da83eaa91b7674bf7a0"}
SPLIT = Thresholds(1, 60)  # "big" has 225 rows


def in_folders(folder: Path) -> Source:
    for key, table in (("big", BIG), ("small", LITTLE)):
        (folder / f"partition={key}").mkdir(parents=True)
        pq.write_table(table, folder / f"partition={key}/a.parquet")
    return open_source(folder, selection=SELECTION)


def in_table(folder: Path) -> Source:
    """The rows of both keys in turns, those of each in their order."""
    folder.mkdir()
    in_turns = sorted(ORDER, key=lambda row: row if row % 4 else row + 30)
    pq.write_table(TABLE.take(pa.array(in_turns)), folder / "t.parquet")
    return open_source(folder / "t.parquet", selection=SELECTION, partition_by=["category"])


def in_frames(_: Path) -> Source:
    return FrameCatalog({"big": BIG, "small": LITTLE}, SELECTION)


def assert_carried(output: Output, *expected: pa.Table) -> None:
    """Assert that an output has these rows of the catalog."""
    columns = ["id", "text", "partition", "sku", "price"]
    found = open_embeddings(output.root).dataset().to_table(columns=columns)
    assert found.rename_columns(NAMES).to_pylist() == pa.concat_tables(expected).to_pylist()


@pytest.mark.parametrize("made", [in_folders, in_table, in_frames])
def test_columns_are_beside_their_own_rows(output: Output, tmp_path: Path, made: Any) -> None:
    source = made(tmp_path / "in")
    assert len(receipts(output.events(source, SPLIT), "encoded")) == 2
    assert_carried(output, BIG, LITTLE)
    digests = {row.content_digest for row in receipts(output.events(source, SPLIT), "fresh")}
    assert digests == DIGESTS
    assert not output.violations(source)


def test_types_are_stored_searched_and_loaded_in_both_formats(output: Output) -> None:
    further = {
        "a:b c": pa.array([[1], None, []], pa.list_(pa.int64())),
        "made": pa.array([{"x": "y"}, None, {"x": None}]),
        "when": pa.array([0, None, 5], pa.timestamp("us", "UTC")),
        "is": pa.array([True, None, False]),
    }
    table = pa.table({"id": ["1", "2", "3"], "text": ["one", "two", "three"], **further})
    source = FrameCatalog({"k": table}, Selection(carried=tuple(further)))
    output.embed(source)
    opened = open_embeddings(output.root)
    names = ["partition", "id", "text", "truncated", *further, "embedding"]
    for loaded in (opened.dataset().to_table(), opened.lazy().collect().to_arrow()):
        assert loaded.column_names == names
        assert loaded.select([*further]).to_pydict() == pa.table(further).to_pydict()
    assert opened.dataset().schema.field("when").type == pa.timestamp("us", "UTC")
    [[hit]] = search(output.store, output.pool, ["one"], 1)
    assert hit.columns == pa.table(further).to_pylist()[0]
    assert output.check("k", [("1", "one"), ("2", "two"), ("3", "three")]).rows == 3


def cut_off(partition: Partition, at: int) -> Partition:
    """A partition whose storage stops to answer at a row."""

    def read() -> Iterator[RowBatch]:
        for batch in partition.read():
            yield batch.rows(0, at)
            raise OSError("the storage does not answer")

    return replace(partition, read=read)


def test_killed_run_goes_on_from_staged_rows_with_their_columns(output: Output) -> None:
    [big] = FrameCatalog({"big": BIG}, SELECTION)
    assert failures(output.events([cut_off(big, 130)], SPLIT))
    [receipt] = receipts(output.events([big], Thresholds(1, 100)), "encoded")
    assert receipt.texts_reused == 120
    assert_carried(output, BIG)


def test_changed_value_or_list_of_columns_makes_files_stale(output: Output) -> None:
    def action(table: pa.Table, *names: str, version: str) -> str:
        source = FrameCatalog({"k": table}, Selection(carried=names), versions={"k": version})
        [receipt] = receipts(output.events(source))
        return receipt.action

    table = pa.table({"id": ["1"], "text": ["one"], "price": [1.5], "sku": ["s"]})
    assert action(table, version="v1") == "encoded"
    assert action(table, "price", version="v1") == "encoded"
    assert action(table, "price", version="v1") == "fresh"
    assert action(table, "price", version="v2") == "republished"
    assert "price" in pq.read_schema(output.path("k")).names
    other = table.set_column(2, "price", pa.array([2.5]))
    assert action(other, "price", version="v3") == "encoded"
    assert action(other, "price", "sku", version="v3") == "encoded"
    assert action(other, version="v3") == "encoded"
    assert "price" not in pq.read_schema(output.path("k")).names


def test_partitions_with_other_types_are_not_loaded_together(output: Output) -> None:
    prices = {"a": {"price": [1]}, "b": {"price": [1.5]}, "c": {"price": [2], "sku": ["s"]}}
    for key, further in prices.items():
        table = pa.table({"id": ["1"], "text": ["one"], **further})
        output.events(FrameCatalog({key: table}, Selection(carried=tuple(further))))
    opened = open_embeddings(output.root)
    with pytest.raises(
        DataError, match="'b': its column 'price' has type double, and that of 'a' has type int64"
    ):
        opened.lazy()
    both = ["a", "c"]
    for table in (opened.dataset(both).to_table(), opened.lazy(both).collect().to_arrow()):
        assert table.select(["price", "sku"]).to_pylist() == [
            {"price": 1, "sku": None},
            {"price": 2, "sku": "s"},
        ]
    assert opened.lazy(["b"]).collect()["price"].to_list() == [1.5]


def test_other_value_in_the_file_is_found_by_verify(output: Output) -> None:
    source = in_frames(output.root)
    output.embed(source)

    def raise_price(table: pa.Table) -> pa.Table:
        prices = table["price"].to_pylist()
        prices[5] = 99.0
        return table.set_column(table.column_names.index("price"), "price", [prices])

    rewrite(output.path("small"), raise_price)
    [found] = output.violations(source)
    assert found.key == "small"
    assert found.kind == "columns"
    assert found.finding == "row 5: the file has the price 99.0 and the source 5.0."


def test_ledger_covers_carried_bytes(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"id": ["1", "2", "3"], "text": ["a"] * 3, "blob": ["x" * 2_000_000] * 3})
    source = FrameCatalog({"k": table}, Selection(carried=("blob",)))
    limit_bytes(monkeypatch, 5_000_000)
    run = output.run(source, Thresholds(1, 100))
    [receipt] = receipts(finish(run), "encoded")
    assert receipt.superbatch == 1, "three such rows are more than a SuperBatch"
    assert run.report.peak_resident_bytes > 4_000_000
    source = FrameCatalog({"k": table}, Selection(carried=("blob",)))
    limit_bytes(monkeypatch, 1_500_000)
    failure = output.failure(source, Thresholds(1, 100), force=True)
    assert "the row has 2,000,0" in failure.reason
    assert "Shorten its values, or raise" in failure.reason


def test_file_whose_types_are_not_those_that_it_states_is_invalid(output: Output) -> None:
    output.embed(in_frames(output.root))
    name = file_name(output.space, "small")
    rewrite(output.root / name, lambda table: table, carried_columns="sku: string, cost: double")
    with pytest.raises(
        InvalidFile, match="promise the carried columns 'sku: string, cost: double'; it has"
    ):
        read_published_file(output.store, name)


def test_nan_and_times_beyond_python_are_verified_and_found(output: Output) -> None:
    further = {"p": pa.array([[float("nan"), 1.0]]), "far": pa.array([2**60], pa.timestamp("us"))}
    table = pa.table({"id": ["1"], "text": ["one"], **further})
    source = FrameCatalog({"k": table}, Selection(carried=("p", "far")))
    output.embed(source)
    assert not output.violations(source)
    [[hit]] = search(output.store, output.pool, ["one"], 1)
    assert "1152921504606846976" in hit.columns["far"], hit.columns


def test_run_that_ended_inside_a_partition_goes_on_with_its_columns(
    output: Output, tmp_path: Path
) -> None:
    prices = Prices(per_million_tokens=1e6, max_cost=250)
    run = output.run(in_frames(tmp_path), Thresholds(300, 300), prices=prices)

    with pytest.raises(MaxCostReached):
        list(run)
    again = output.embed(in_frames(tmp_path))

    assert 0 < again.report.texts_encoded < len(TABLE)
    assert run.report.texts_encoded + again.report.texts_encoded == len(TABLE)
    assert_carried(output, BIG, LITTLE)
