"""An output whose files would be rows of its own source is refused, in every run, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.store import open_store
from tests.engine.runs import in_memory, make_run
from tests.small_catalogs import numbered_rows


def place(root: Path, below: str) -> str:
    return below if "://" in below else f"{root}/{below}"


@pytest.mark.parametrize(
    ("source", "output", "settings"),
    [
        ("shop", "shop", {}),
        ("shop", "shop/out", {}),
        ("shop", "link/out", {}),
        ("tables", "tables/out", {"partition_by": ["lang"]}),
        ("shop/**/*.parquet", "shop/out", {}),
        ("shop/{category}/*.parquet", "shop", {}),
        ("shop/*/*/*.arrow", "shop/out", {}),
    ],
)
def test_output_where_the_source_has_its_files_is_refused(
    tmp_path: Path, source: str, output: str, settings: dict[str, Any]
) -> None:
    for folder in ("shop", "tables"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("shop")
    record = CatalogRecord(place(tmp_path, source), settings=settings)
    with pytest.raises(ConfigError, match=r"the output .* lies inside the source"):
        record.require_apart(open_store(place(tmp_path, output)))


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("shop", "shop-out"),
        ("shop/a", "shop"),
        ("shop", "shop/_out"),
        ("shop/*.parquet", "shop"),
        ("shop/{category}/*.csv", "shop"),
        ("shop/{category}/*.parquet", "shop/out"),
        ("s3://shop/catalog", "shop"),
        ("bigquery://shop.catalog.products", "shop"),
    ],
)
def test_output_beside_what_the_source_reads_is_accepted(tmp_path: Path, source: str, output: str) -> None:
    (tmp_path / "shop" / "a").mkdir(parents=True)
    CatalogRecord(place(tmp_path, source)).require_apart(open_store(place(tmp_path, output)))


@pytest.mark.parametrize(
    ("source", "output", "is_inside"),
    [
        ("memory://shop", "memory://shop/catalog/out", True),
        ("memory://shop/catalog", "memory://shop/catalog", True),
        ("memory://shop/*/*/*.parquet", "memory://shop/out", True),
        ("memory://shop/catalog", "memory://shop/catalogs", False),
        ("memory://shop/*.parquet", "memory://shop/out", False),
    ],
)
def test_outputs_in_buckets_are_compared_alike(source: str, output: str, is_inside: bool) -> None:
    record, store = CatalogRecord(source), open_store(output)
    if is_inside:
        with pytest.raises(ConfigError, match="lies inside the source"):
            record.require_apart(store)
    else:
        record.require_apart(store)


def test_run_with_an_output_inside_its_source_is_refused_before_anything_is_written(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    (tmp_path / "shop").mkdir()
    partitions = in_memory({"a": numbered_rows("a", 3)})
    with pytest.raises(ConfigError, match="lies inside the source"):
        make_run(hash_pool, partitions, tmp_path / "shop" / "out", catalog=CatalogRecord(f"{tmp_path}/shop"))
    assert list((tmp_path / "shop").iterdir()) == []
