"""The columns that Dagster shows of an asset are those of its files."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster import changes
from tests.dagster.conftest import NAMES, Workbench
from tests.small_catalogs import partition_folder


def shown(bench: Workbench, asset: dg.AssetKey) -> list[str]:
    node = bench.definitions.resolve_asset_graph().get(asset)
    columns = node.metadata["dagster/column_schema"].columns
    return [column.name for column in columns]


def in_files(bench: Workbench, space: str) -> list[str]:
    [file] = Path(bench.output, space).glob("*.parquet")
    return pq.read_schema(file).names


@pytest.mark.parametrize("include_text", [True, False])
def test_columns_of_an_asset_are_those_of_its_files(bench: Workbench, include_text: bool) -> None:
    int8 = NAMES.derived("int8")
    bench.settings |= {"derived": [{"dtype": "int8"}], "include_text": include_text}
    bench.settings["columns"] = ["price"]
    path = partition_folder(bench.catalog, "a") / "part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"id": ["1"], "text": ["boots"], "price": [9.5]}), path)

    assert bench.refresh().success
    assert shown(bench, NAMES.embeddings) == in_files(bench, bench.space)

    derived = bench.run(NAMES.derive_job).materialized(int8)["a"].metadata["space"].value
    assert shown(bench, int8) == in_files(bench, str(derived))


def test_columns_of_a_table_are_those_of_the_change_feed(bench: Workbench) -> None:
    bench.settings["lancedb"] = {"uri": str(bench.root / "lance")}
    bench.write("a")

    assert bench.refresh().success

    columns = changes(bench.output, "anybody").columns
    assert columns is not None
    assert shown(bench, NAMES.lancedb) == columns.names
