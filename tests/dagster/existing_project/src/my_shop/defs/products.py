"""The shop's own asset, which stood here before the embeddings."""

import dagster as dg
import polars as pl

CATEGORIES = dg.StaticPartitionsDefinition(["boots", "garden tools"])


@dg.asset(partitions_def=CATEGORIES, group_name="warehouse")
def products(context: dg.AssetExecutionContext) -> pl.DataFrame:
    """The articles of a category, with a title and a description."""
    category = context.partition_key
    rows = {
        "sku": [f"{category} {number}" for number in range(4)],
        "title": [f"{category}, model {number % 3}" for number in range(4)],
        "description": ["Made to last."] * 4,
    }
    return pl.DataFrame(rows)
