"""A code location whose catalogs are assets: one with partitions, one without.

A test loads this file as Dagster does. The assets return the rows of `frames.parquet` in the folder
`UPSTREAM_ROOT`.
"""

import os
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl

from surge_dagster import embedding_catalog

ROOT = Path(os.environ["UPSTREAM_ROOT"])
CATEGORIES = dg.StaticPartitionsDefinition(["a", "b", "ß, 50%"])


@dg.asset(partitions_def=CATEGORIES)
def products(context: dg.AssetExecutionContext) -> pl.DataFrame:
    """A frame for each category."""
    found = pl.read_parquet(ROOT / "frames.parquet")
    return found.filter(pl.col("category") == context.partition_key)


@dg.asset
def table() -> pl.DataFrame:
    """All rows; those of a category do not stand together."""
    return pl.read_parquet(ROOT / "frames.parquet")


def catalog(name: str, source: dg.AssetsDefinition, **settings: Any) -> dg.Definitions:
    return embedding_catalog(
        name=name, source=source, output=str(ROOT / name), model="hash://16", **settings
    )


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions.merge(
        dg.Definitions(
            assets=[products, table],
            resources={"io_manager": dg.FilesystemIOManager(base_dir=str(ROOT / "values"))},
            executor=dg.in_process_executor,
        ),
        catalog("parts", products),
        catalog("whole", table, partition_by="category"),
    )
