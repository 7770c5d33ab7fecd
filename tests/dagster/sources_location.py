"""A code location with the same catalog in every kind of source: `test_live_sources.py` serves it.

The environment says where each is: SOURCES_TABLES, several names and paths, SOURCES_FOLDERS, SOURCES_BUCKET and
SOURCES_FRAME; files go below SOURCES_OUTPUT.
`SURGE_…` variables are the settings that all of them share.
"""

import json
import os

import dagster as dg
import polars as pl

from surge_dagster import embedding_catalog

OUTPUT = os.environ["SOURCES_OUTPUT"]


@dg.asset(group_name="asset")
def products() -> pl.DataFrame:
    """The products of the shop, in no order."""
    return pl.read_parquet(os.environ["SOURCES_FRAME"])


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions.merge(
        dg.Definitions(assets=[products], executor=dg.in_process_executor),
        *(
            embedding_catalog(name=name, source=path, partition_by="category", output=f"{OUTPUT}/{name}")
            for name, path in json.loads(os.environ["SOURCES_TABLES"]).items()
        ),
        embedding_catalog(name="folders", source=os.environ["SOURCES_FOLDERS"], output=f"{OUTPUT}/folders"),
        embedding_catalog(name="bucket", source=os.environ["SOURCES_BUCKET"], output=f"{OUTPUT}/bucket"),
        embedding_catalog(name="asset", source=products, partition_by="category", output=f"{OUTPUT}/asset"),
    )
