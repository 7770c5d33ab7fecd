"""A code location with the same catalog as a table, in a bucket and as an asset: `test_live_sources.py` serves it.

The environment says where each is: SOURCES_TABLE, SOURCES_BUCKET, SOURCES_FRAME; files go below SOURCES_OUTPUT.
`SURGE_…` variables are the settings that all of them share.
"""

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
        embedding_catalog(
            name="table", source=os.environ["SOURCES_TABLE"], partition_by="category", output=f"{OUTPUT}/table"
        ),
        embedding_catalog(name="bucket", source=os.environ["SOURCES_BUCKET"], output=f"{OUTPUT}/bucket"),
        embedding_catalog(name="asset", source=products, partition_by="category", output=f"{OUTPUT}/asset"),
    )
