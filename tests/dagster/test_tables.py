"""One table as a catalog in Dagster: its keys become partitions, in runs and in all ways to write
the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster import EmbeddingCatalog
from surge_dagster.config.settings import load_settings
from surge_dagster.resources import CatalogSource


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
