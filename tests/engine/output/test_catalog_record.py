"""An output whose files would be rows of its own source is refused, in every run, before anything
is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.config.catalog_settings import FRAMES, CatalogSettings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import SUFFIX
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.spaces import list_spaces, recorded_catalog
from surge_dagster.engine.store import open_store
from tests.engine.runs import Output, in_memory
from tests.small_catalogs import numbered_rows


def place(root: Path, below: str) -> str:
    return below if "://" in below else f"{root}/{below}"


@pytest.mark.parametrize(
    ("source", "output", "is_inside"),
    [
        ("shop", "shop", True),
        ("shop", "shop/out", True),
        ("shop", "link/out", True),
        ("shop/**/*.parquet", "shop/out", True),
        ("shop/*/*/*.arrow", "shop/out", False),
        ("shop", "shop-out", False),
        ("shop", "shop/_out", False),
        ("shop/{category}/*.csv", "shop", False),
        ("shop/{category}/*.parquet", "shop/out", False),
        ("bigquery://shop.catalog.products", "shop", False),
        ("memory://shop", "memory://shop/catalog/out", True),
        ("memory://shop/*/*/*.parquet", "memory://shop/out", True),
        ("memory://shop/catalog", "memory://shop/catalogs", False),
    ],
)
def test_output_is_refused_only_where_its_files_would_be_rows_of_the_source(
    tmp_path: Path, source: str, output: str, is_inside: bool
) -> None:
    (tmp_path / "shop" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to("shop")
    record, store = CatalogRecord(place(tmp_path, source)), open_store(place(tmp_path, output))
    if is_inside:
        with pytest.raises(ConfigError, match=r"the output .* lies inside the source"):
            record.require_apart(store)
    else:
        record.require_apart(store)


def test_run_with_an_output_inside_its_source_writes_nothing(
    output: Output,
) -> None:
    partitions = in_memory({"a": numbered_rows("a", 3)})
    with pytest.raises(ConfigError, match="lies inside the source"):
        output.run(partitions, catalog=CatalogRecord(str(output.root.parent)))
    assert not output.root.exists()


@pytest.mark.parametrize(
    "record",
    [
        CatalogRecord("/shop", settings={"partition_by": ["lang"]}),
        CatalogRecord("/shop"),
        CatalogRecord("/moved", "/shop", settings={"partition_by": ["lang"]}),
    ],
    ids=["other column", "unset", "moved"],
)
def test_catalog_in_other_partitions_is_refused(tmp_path: Path, record: CatalogRecord) -> None:
    recorded = CatalogRecord("/shop", settings={"partition_by": ["category"]})
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / f"shoes{SUFFIX}").touch()

    with pytest.raises(ConfigError, match=r"with partition_by \['category'\].*rows twice"):
        record.require_same(recorded, "space", open_store(tmp_path))


def test_catalog_without_a_file_may_be_divided_anew(output: Output) -> None:
    recorded = CatalogRecord("/shop", settings={"partition_by": ["category"]})
    corrected = CatalogRecord("/shop", settings={"partition_by": ["lang"]})
    refused = in_memory({"a": [("1", "one"), ("1", "two")]})
    output.failure(refused, catalog=recorded)

    output.embed(in_memory({"a": numbered_rows("a", 3)}), catalog=corrected)

    [space] = list_spaces(output.store)
    known = recorded_catalog(output.store, space)
    assert known is not None
    assert known.settings == corrected.settings


def test_frames_without_a_name_may_be_divided_in_several_ways() -> None:
    by_lang = CatalogSettings.model_validate({"partition_by": ["lang"]})

    assert by_lang.record(FRAMES).settings == {}
    named = by_lang.model_copy(update={"catalog_name": "shop"})
    assert named.record(FRAMES).settings == {"partition_by": ["lang"]}
