"""The UI shows on `source_partitions` where the catalog is."""

from __future__ import annotations

from typing import Any

import pytest

from surge_dagster import embedding_catalog
from surge_dagster.orchestration.names import CatalogNames


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"source": "/t.csv.gz", "partition_by": "lang,kind"}, "`/t.csv.gz`."),
        ({"source": "s3://shop/{kind}.jsonl"}, "`s3://shop/{kind}.jsonl`."),
        ({"source": "/data/catalog"}, "The catalog in `/data/catalog`."),
        ({"source": "bigquery://p.d.t", "partition_by": "k"}, "bigquery://p.d.t"),
        ({"source": "asset://a", "partition_by": "k"}, "The asset `a`, through"),
    ],
)
def test_source_partitions_show_their_source(settings: dict[str, Any], said: str) -> None:
    graph = embedding_catalog(**settings, output="/out").resolve_asset_graph()

    node = graph.get(CatalogNames().source_partitions)

    assert said in (node.description or "")


def test_source_partitions_name_the_columns_of_their_keys() -> None:
    made = embedding_catalog(source="/t.csv", partition_by="lang,kind", output="/out")

    node = made.resolve_asset_graph().get(CatalogNames().source_partitions)

    assert " The values of `lang` and `kind` are its partitions." in (node.description or "")
