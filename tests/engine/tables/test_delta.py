"""Delta tables as sources: rows of the newest version; what is read wrongly is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.tables.frames import FrameCatalog, FrameTable
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import refusal
from tests.engine.sources.tables import contents, versions
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.extras import require

# Importing the package takes seconds, so that the functions below do it.
require("delta", "deltalake")

ROWS = pa.table({"category": ["a", "b", "a"], "id": ["1", "2", "3"], "text": ["x", "y", "z"]})


def write(folder: Path, rows: pa.Table = ROWS, **options: Any) -> str:
    from deltalake import write_deltalake

    write_deltalake(str(folder), rows, **options)
    return str(folder)


def delta_table(folder: str) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(folder)


@pytest.fixture
def table(tmp_path: Path) -> str:
    return write(tmp_path / "shop", partition_by=["category"])


def test_table_is_divided_by_its_partition_columns(table: str) -> None:
    assert contents(open_source(table)) == {"a": [("1", "x"), ("3", "z")], "b": [("2", "y")]}


def test_table_is_divided_by_the_columns_that_are_named(table: str) -> None:
    assert list(contents(open_source(table, partition_by="id"))) == ["1", "2", "3"]


def test_deleted_and_overwritten_rows_are_not_read(table: str) -> None:
    delta_table(table).delete("id = '1'")
    write(Path(table), pa.table({"category": ["b"], "id": ["4"], "text": ["new"]}), mode="append")
    delta_table(table).update(predicate="id = '2'", new_values={"text": "newer"})

    found = {key: sorted(rows) for key, rows in contents(open_source(table)).items()}

    assert found == {"a": [("3", "z")], "b": [("2", "newer"), ("4", "new")]}


def test_version_of_a_partition_changes_with_its_rows_only(table: str) -> None:
    before = versions(open_source(table))
    delta_table(table).delete("id = '2'")
    assert versions(open_source(table)) == {"a": before["a"]}


def test_rows_keep_their_order_after_a_checkpoint(tmp_path: Path) -> None:
    table = str(tmp_path / "shop")
    for number in range(12):
        row = {"category": ["a"], "id": [str(number)], "text": ["x"]}
        write(tmp_path / "shop", pa.table(row), mode="append")
    before = versions(open_source(table, partition_by="category"))
    delta_table(table).create_checkpoint()
    assert versions(open_source(table, partition_by="category")) == before


def test_table_that_changes_after_it_was_listed_is_transient(table: str) -> None:
    list(open_source(table))  # so that the next listing reads nothing
    [first, _] = open_source(table)
    write(Path(table), mode="overwrite")
    with pytest.raises(TransientError, match="changed after it was listed"):
        list(first.read())


def test_table_without_partition_columns_needs_the_setting(tmp_path: Path) -> None:
    table = write(tmp_path / "shop")
    with pytest.raises(ConfigError, match=r"has no partition columns.*--partition-by COLUMN"):
        open_source(table)


def test_missing_package_is_named_with_its_install_command(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"pip install 'surge-dagster\[delta\]'"):
        open_source(table)


def test_table_in_a_bucket_is_read(table: str, object_server: ObjectServer) -> None:
    for path in Path(table).rglob("*"):
        if path.is_file():
            object_server.put(f"cat/shop/{path.relative_to(table)}", path.read_bytes())

    source = open_source(f"s3://{BUCKET}/cat/shop", storage_options=object_server.options)

    assert contents(source) == contents(open_source(table))


def edit_log(table: str, action: str, **changes: Any) -> None:
    log = Path(table, "_delta_log", f"{0:020}.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line.get(action, {}).update(changes)
    log.write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def mapped(table: str) -> str:
    """The table as Spark's log states it after the column of texts was renamed."""
    fields: list[dict[str, Any]] = []
    for number, (name, physical) in enumerate((("category",) * 2, ("id",) * 2, ("text", "old"))):
        mapping = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical}
        fields.append({"name": name, "type": "string", "nullable": True, "metadata": mapping})
    schema = json.dumps({"type": "struct", "fields": fields})
    mode = {"delta.columnMapping.mode": "name"}
    edit_log(table, "metaData", schemaString=schema, configuration=mode)
    edit_log(table, "protocol", minReaderVersion=2)
    return table


def test_table_with_column_mapping_is_refused(mapped: str) -> None:
    with pytest.raises(ConfigError, match=r"has column mapping.*CREATE TABLE"):
        list(open_source(mapped, partition_by="id", missing_text="skip"))


def test_table_with_deletion_vectors_is_refused(table: str) -> None:
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    edit_log(table, "protocol", minReaderVersion=3, minWriterVersion=7, **features)
    with pytest.raises(ConfigError, match=r"cannot be read.*deletionVectors.*CREATE TABLE"):
        list(open_source(table))


def test_frame_with_column_mapping_is_refused(mapped: str) -> None:
    with pytest.raises(ConfigError, match="has column mapping"):
        FrameTable(delta_table(mapped), "id")
    [one] = FrameCatalog({"a": delta_table(mapped)})
    assert "has column mapping" in str(refusal(one))


@pytest.mark.parametrize(
    ("marker", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"),
        ("metadata/00001-f1.gz.metadata.json", "Iceberg"),
    ],
)
@pytest.mark.parametrize("source", ["", "/**/*.parquet", "/{lang}/*/*.parquet"])
def test_table_inside_of_a_source_is_refused_by_name(
    tmp_path: Path, marker: str, kind: str, source: str
) -> None:
    for name in ("data/0.parquet", marker):
        path = tmp_path / "de" / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(ConfigError, match=f"has a table of {kind} in 'de/shop'"):
        list(open_source(f"{tmp_path}{source}"))


@pytest.mark.parametrize("marker", [".hoodie/hoodie.properties", "metadata/v1.metadata.json"])
def test_folder_of_a_table_that_cannot_be_read_is_refused(tmp_path: Path, marker: str) -> None:
    (tmp_path / marker).parent.mkdir()
    (tmp_path / marker).touch()
    with pytest.raises(ConfigError, match=r"has a table of (Hudi|Iceberg) in '\.'"):
        list(open_source(tmp_path))


@pytest.mark.parametrize("part", ["category=a", "category=*/*.parquet"])
def test_part_of_a_table_is_refused(table: str, part: str) -> None:
    with pytest.raises(ConfigError, match=r"lies in the Delta table|has a table of Delta"):
        list(open_source(f"{table}/{part}"))


@pytest.mark.parametrize(
    ("marker", "kind"),
    [(".hoodie/hoodie.properties", "Hudi"), ("metadata/00001-f1.metadata.json", "Iceberg")],
)
@pytest.mark.parametrize("part", ["data", "data/*.parquet", "data/0.parquet"])
def test_part_of_a_table_that_cannot_be_read_is_refused(
    tmp_path: Path, marker: str, kind: str, part: str
) -> None:
    for name in ("data/0.parquet", marker):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()

    with pytest.raises(ConfigError, match=rf"lies in the {kind} table .*query's result or a copy"):
        open_source(tmp_path / part, partition_by="id")


@pytest.mark.parametrize(
    ("marker", "kind"), [("_delta_log/0.json", "Delta"), (".hoodie/hoodie.properties", "Hudi")]
)
def test_table_inside_of_a_bucket_is_refused(
    object_server: ObjectServer, marker: str, kind: str
) -> None:
    object_server.put(f"cat/shop/{marker}", b"")
    object_server.put("cat/shop/0.parquet", b"")
    with pytest.raises(ConfigError, match=f"has a table of {kind} in 'shop'"):
        list(open_source(f"s3://{BUCKET}/cat", storage_options=object_server.options))
