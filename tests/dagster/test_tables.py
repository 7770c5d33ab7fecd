"""One table as a catalog in Dagster: its keys become partitions, in runs and in all ways to write
the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster import EmbeddingCatalog
from surge_dagster.config.settings import load_settings
from surge_dagster.resources import CatalogSource
from tests.dagster.conftest import Workbench
from tests.engine.sources.tables import by_key, shuffled_rows, write_csv
from tests.small_catalogs import assert_embedded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_refresh_embeds_the_keys_of_a_table_and_removes_what_it_grouped(
    bench: Workbench, cache: Path
) -> None:
    rows = shuffled_rows(60, 3)
    bench.catalog.mkdir()
    path = write_csv(bench.catalog / "products.csv", rows)
    bench.settings |= {"partition_by": "category"}
    ran = bench.refresh()
    assert ran.success
    assert set(ran.materialized()) == set(by_key(rows))
    for key, expected in by_key(rows).items():
        assert_embedded(bench.output, bench.space, key, expected)
    assert list(cache.glob("tables/*/index.json"))
    assert not list(cache.glob("tables/*/rows/*"))

    write_csv(path, [("new", "text", "key 1"), *rows])
    assert set(bench.refresh().materialized()) == {"key 1"}


@pytest.mark.parametrize("given", ["lang,category", "lang, category", ["lang", "category"]])
def test_columns_of_the_key_are_a_list_or_a_plain_string_everywhere(
    given: str | list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = ["lang", "category"]
    assert load_settings(partition_by=given).partition_by == expected
    assert CatalogSource(url="t.csv", partition_by=given).partition_by == expected  # pyright: ignore
    attributes = {"source": "t.csv", "output": "out", "partition_by": given}
    assert (
        EmbeddingCatalog.from_attributes_dict(attributes=attributes).settings.partition_by
        == expected
    )
    if isinstance(given, str):
        monkeypatch.setenv("SURGE_PARTITION_BY", given)
        assert load_settings().partition_by == expected
