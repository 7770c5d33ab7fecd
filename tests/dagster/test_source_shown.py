"""The UI shows on `source_partitions` where the catalog is and what it is made of."""

from __future__ import annotations

from typing import Any

import pytest

from surge_dagster import embedding_catalog
from surge_dagster.orchestration.names import CatalogNames


@pytest.mark.parametrize(
    ("settings", "kinds", "said"),
    [
        (
            {"source": "/data/products.csv.gz", "partition_by": "lang,category"},
            {"csv"},
            "`/data/products.csv.gz`. The",
        ),
        (
            {"source": "s3://shop/{category}.jsonl"},
            {"json"},
            "`s3://shop/{category}.jsonl`. `id` identifies a row",
        ),
        ({"source": "/data/catalog"}, set(), "The catalog in `/data/catalog`."),
        (
            {"source": "bigquery://p", "query": "SELECT 1", "partition_by": "k"},
            {"bigquery"},
            "the project `p` of Big",
        ),
        (
            {"source": "asset://products", "partition_by": "k"},
            set(),
            "The asset `products`, through its IO manager.",
        ),
    ],
    ids=lambda value: value.get("source") if isinstance(value, dict) else "",
)
def test_source_partitions_show_their_source(
    settings: dict[str, Any], kinds: set[str], said: str
) -> None:
    graph = embedding_catalog(**settings, output="/out").resolve_asset_graph()
    node = graph.get(CatalogNames().source_partitions)
    assert node.kinds == kinds and said in (node.description or "")
    by = [name for name in ("lang", "category", "k") if name in settings.get("partition_by", "")]
    columns = " and ".join(f"`{name}`" for name in by)
    assert (f" The values of {columns} are its partitions." in (node.description or "")) is bool(by)
