"""Documents in chunks in Dagster: sources show documents, embeddings show chunks."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from surge_dagster import embedding_catalog
from tests.dagster.conftest import NAMES, Workbench, values_of
from tests.engine.chunks.documents import prose

LONG = prose(Random(1), 30)


@pytest.fixture
def documents(bench: Workbench, demo_folder: Path) -> Workbench:
    """A workbench with one long and one short document, in chunks of at most 64 tokens."""
    bench.settings |= {"model": str(demo_folder), "chunks": {"tokens": 64}}
    bench.write("a", [("long", LONG), ("short", "A hat.")])
    return bench


def test_source_counts_documents_and_embeddings_count_chunks(documents: Workbench) -> None:
    ran = documents.refresh()

    source = values_of(ran.materialized(NAMES.source_partitions)["a"])
    embedded = values_of(ran.materialized()["a"])
    assert ran.success
    assert source["dagster/partition_row_count"] == 2
    assert embedded["dagster/partition_row_count"] > 4
    assert embedded["truncated"] == 0
    assert embedded["space_title"] == "all-MiniLM-L6-v2, 384 float32, chunks of 64 tokens"


def test_rows_are_compared_with_the_documents_of_the_source(documents: Workbench) -> None:
    first = documents.refresh()
    again = documents.refresh()

    checks = [ran.checks()["row_counts_match"] for ran in (first, again)]
    assert [check.passed for check in checks] == [True, True]
    assert again.metrics()["texts_encoded"] == 0


def test_catalog_check_compares_chunks_with_their_documents(documents: Workbench) -> None:
    documents.refresh()

    ran = documents.run("catalog_check")

    assert ran.success
    assert [name for name, check in ran.checks().items() if not check.passed] == []


def test_columns_of_chunks_are_shown() -> None:
    made = embedding_catalog(source="/t", output="/out", chunks={"tokens": 64})
    node = made.resolve_asset_graph().get(NAMES.embeddings)

    names = [column.name for column in node.metadata["dagster/column_schema"].columns]

    assert names[4:8] == ["document_id", "chunk", "start", "end"]
