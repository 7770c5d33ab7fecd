"""The shop's assets after the embeddings: one per category, and one of the whole catalog."""

import dagster as dg
import numpy as np
import polars as pl

EMBEDDINGS = dg.AssetIn(key=["shop", "embeddings"])
CATEGORIES = dg.DynamicPartitionsDefinition(name="shop_catalog")


@dg.asset(
    ins={"embeddings": EMBEDDINGS},
    partitions_def=CATEGORIES,
    group_name="search",
    automation_condition=dg.AutomationCondition.eager(),
)
def duplicates(embeddings: pl.LazyFrame) -> pl.DataFrame:
    """Pairs of articles of a category whose vectors are equal."""
    rows = embeddings.select("id", "embedding").collect()
    vectors = np.stack(rows["embedding"].to_list())
    first, second = np.nonzero(np.triu(vectors @ vectors.T > 0.999, k=1))
    return pl.DataFrame({"sku": rows["id"][first], "same_as": rows["id"][second]})


@dg.asset(
    ins={"embeddings": EMBEDDINGS},
    group_name="search",
    automation_condition=dg.AutomationCondition.eager(),
)
def catalog_size(embeddings: pl.LazyFrame) -> dg.MaterializeResult:
    """How many articles have a vector."""
    rows = embeddings.select(pl.len()).collect().item()
    return dg.MaterializeResult(metadata={"dagster/row_count": rows})
