"""Runs record which rows change, for whole partitions and for those that are written from several
segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.changes import changes
from tests.engine.feeds import Applied, hand_over, rows_of
from tests.engine.runs import completed, make_run
from tests.small_catalogs import Rows, numbered_rows, partition_of


def embed(
    pool: EncoderPool, output: Path, catalog: dict[str, Rows], version: str, **options: Any
) -> None:
    partitions = (partition_of(key, rows, version=version) for key, rows in catalog.items())
    run = completed(make_run(pool, partitions, output, **options))
    assert not run.failed


def test_consumer_gets_the_changed_rows_of_whole_and_split_partitions(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    catalog: dict[str, Rows] = {
        "small": numbered_rows("small", 20),
        "split": numbered_rows("split", 350),
    }
    target: Applied = {}
    embed(hash_pool, tmp_path, catalog, "v1")
    assert not (tmp_path / ".changes").exists()
    assert len(hand_over(changes(tmp_path, "shop"), target)) == 372 and target == rows_of(catalog)

    for number, key in enumerate(catalog):
        rows = list(catalog[key])
        rows[3] = (rows[3][0], f"edited {key}")
        rows.insert(5, ("new", f"added {key}"))
        del rows[-1 - number]
        catalog[key] = rows
    embed(hash_pool, tmp_path, catalog, "v2")
    came = hand_over(changes(tmp_path, "shop"), target)
    assert target == rows_of(catalog)
    assert sorted(came) == [
        ("delete", "small", "id-19"),
        ("delete", "split", "id-348"),
        ("put", "small", "id-3"),
        ("put", "small", "new"),
        ("put", "split", "id-3"),
        ("put", "split", "new"),
    ]
    embed(hash_pool, tmp_path, catalog, "v3")  # the same rows
    assert list(changes(tmp_path, "shop")) == []
