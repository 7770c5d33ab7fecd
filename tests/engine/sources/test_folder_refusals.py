"""Catalogs of any layout: what is refused by name, and what the disk does not give, hides no other
partition."""

from __future__ import annotations

import pytest

from surge_dagster.engine.errors import ConfigError
from tests.engine.sources.reading import ROWS, refusal, rows_of
from tests.engine.sources.shops import Shop


class TestRefusals:
    def test_keys_that_collide_are_refused_by_name_and_hide_no_other(self, shop: Shop) -> None:
        for name in ("category=a b/0", "category=a%20b/0", "category=c/0"):
            shop.write(f"{name}.parquet")
        found = shop.partitions()
        assert "category=a b, category=a%20b all stand for this key" in str(refusal(found["a b"]))
        assert rows_of(found["c"]) == ROWS

    def test_file_names_that_collide_are_refused(self, shop: Shop) -> None:
        for name in ("a b.parquet", "a%20b.parquet", "c.parquet", "c.pq"):
            shop.write(name)
        found = shop.partitions()
        assert "a b.parquet, a%20b.parquet all stand for this key" in str(refusal(found["a b"]))
        assert "c.parquet, c.pq all stand for this key" in str(refusal(found["c"]))

    def test_file_outside_the_usual_folders_is_refused_by_name(self, shop: Shop) -> None:
        for name in ("lang=de/category=a/0", "lang=de/category=b/0", "lang=de/0", "loose"):
            shop.write(f"{name}.parquet")
        found = shop.partitions()
        assert [rows_of(found[f"lang=de/category={name}"]) for name in "ab"] == [ROWS, ROWS]
        assert "is in folders lang=…, and the others of this source in lang=…/category=…" in str(
            refusal(found["lang=de/0.parquet"])
        )
        assert "is in folders without a column's name" in str(refusal(found["loose.parquet"]))

    def test_file_of_another_partition_is_refused(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet", key="b")
        assert "declares that it belongs to partition 'b'" in str(refusal(shop.partitions()["a"]))

    def test_damaged_file_hides_no_other_partition(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet")
        shop.put("category=b/0.parquet", b"PAR1 this is none")
        found = shop.partitions()
        assert rows_of(found["a"]) == ROWS
        assert "0.parquet" in str(refusal(found["b"])) and found["b"].rows is None

    def test_folders_without_column_names_are_refused_with_a_pattern_that_works(
        self, shop: Shop
    ) -> None:
        shop.write("shoes/0.parquet")
        with pytest.raises(ConfigError, match="If each folder is a partition, give ") as refused:
            list(shop.open())
        assert f"'{shop.url}/{{name}}/*.parquet' as source" in str(refused.value)
        assert f"`surge-dagster embed {shop.url} OUTPUT --partition-by COLUMN`" in str(
            refused.value
        )
        assert list(shop.partitions("/{name}/*.parquet")) == ["shoes"]

    def test_single_file_is_refused_with_the_partition_by_command(self, shop: Shop) -> None:
        shop.write("products.parquet")
        with pytest.raises(ConfigError, match=r"is one file.*--partition-by COLUMN") as refused:
            list(shop.open("/products.parquet"))
        assert "catalog demo" not in str(refused.value)
