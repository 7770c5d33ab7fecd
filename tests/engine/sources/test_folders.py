"""Catalogs of any layout, on a disk and in a bucket: their keys, order and versions."""

from __future__ import annotations

import pytest

from surge_dagster.engine.sources.folders import FolderCatalog
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.keys import encode_key
from tests.engine.sources.reading import refusal, rows_of
from tests.engine.sources.shops import Shop
from tests.engine.sources.tables import contents
from tests.small_catalogs import Rows


def row(text: str) -> Rows:
    return [(text, text)]


class TestKeys:
    def test_folders_named_by_a_column_give_its_values_as_keys(self, shop: Shop) -> None:
        for name in (
            "category=shoes/1.parquet",
            "category=shoes/0.parquet",
            "category=garden%20tools/deep/0.parquet",
        ):
            shop.write(name, row(name))
        found = contents(shop.open())
        assert list(found) == ["garden tools", "shoes"]
        assert found["shoes"] == [
            *row("category=shoes/0.parquet"),
            *row("category=shoes/1.parquet"),
        ]

    def test_several_levels_make_one_key(self, shop: Shop) -> None:
        for name in (
            "lang=de/category=shoes",
            "lang=de/category=K%C3%B6ln",
            "lang=en/category=a%2Fb",
        ):
            shop.write(f"{name}/0.parquet", row(name))
        found = contents(shop.open())
        assert found == {
            "lang=de/category=K%C3%B6ln": row("lang=de/category=K%C3%B6ln"),
            "lang=de/category=shoes": row("lang=de/category=shoes"),
            "lang=en/category=a%2Fb": row("lang=en/category=a%2Fb"),
        }

    def test_one_file_per_partition_has_its_name_as_key(self, shop: Shop) -> None:
        shop.write("shoes.parquet", row("shoes"))
        shop.write("garden%20tools.parquet", row("tools"))
        found = contents(shop.open())
        assert found == {"garden tools": row("tools"), "shoes": row("shoes")}
        assert list(shop.partitions("/*.parquet")) == list(found)

    @pytest.mark.parametrize(
        ("pattern", "keys"),
        [
            ("/{shop}/{lang}-*.parquet", ["shop=a/lang=de", "shop=a/lang=en", "shop=b/lang=de"]),
            ("/{shop}/*.parquet", ["a", "b"]),
            ("/a/{name}.parquet", ["de-0", "de-1", "en-0"]),
            ("/**/{name}.parquet", ["de-0", "de-1", "en-0"]),
        ],
    )
    def test_names_of_a_pattern_give_the_key(
        self, shop: Shop, pattern: str, keys: list[str]
    ) -> None:
        for name in ("a/de-0", "a/de-1", "a/en-0", "b/de-0"):
            shop.write(f"{name}.parquet", row(name))
        found = shop.partitions(pattern)
        assert list(found) == keys
        rows = 0
        for partition in found.values():
            rows += len(rows_of(partition))
            assert partition.current_source_version() == partition.source_version
        assert rows == (3 if pattern.startswith("/a/") else 4)

    @pytest.mark.parametrize("column", ["category", "partition"])
    def test_other_formats_are_read_by_their_endings(self, shop: Shop, column: str) -> None:
        shop.write(f"{column}=a/0.parquet", row("a"))
        shop.put(f"{column}=a/1.csv", b"id,text\n1,one\n")
        (a,) = shop.partitions().values()
        assert rows_of(a) == [("a", "a"), ("1", "one")] and a.rows is None

    def test_long_key_is_read_from_the_files(self, shop: Shop) -> None:
        long = "k" * 300
        shop.write(f"category={encode_key(long)}/0.parquet", row("x"), key=long)
        shop.write(f"category={encode_key('other' * 100)}/0.parquet", row("x"))
        found = shop.partitions()
        assert rows_of(found[long]) == row("x")
        assert "does not declare the key" in str(refusal(found[encode_key("other" * 100)]))


class TestVersions:
    def test_version_changes_with_each_file_that_is_changed_added_or_removed(
        self, shop: Shop
    ) -> None:
        shop.write("lang=de/category=a/0.parquet", row("1"))
        shop.write("lang=de/category=b/0.parquet", row("1"))
        listed = shop.partitions()
        a, b = listed.values()
        seen = [a.source_version]
        for name, rows in [("0", row("22")), ("1", row("1")), ("deep/2", row("2"))]:
            shop.write(f"lang=de/category=a/{name}.parquet", rows)
            seen.append(a.current_source_version() or "")
            assert shop.partitions()[a.key].source_version == seen[-1]
        shop.remove("lang=de/category=a/deep/2.parquet")
        assert a.current_source_version() == seen[2]
        assert len(set(seen)) == 4
        assert b.current_source_version() == b.source_version
        shop.remove("lang=de/category=b/0.parquet")
        assert b.current_source_version() is None

    @pytest.mark.parametrize("pattern", ["/{name}-*.parquet", "/{name}/*.parquet"])
    def test_file_that_joins_a_partition_of_a_pattern_changes_its_version_alone(
        self, shop: Shop, pattern: str
    ) -> None:
        place = pattern.replace("{name}", "{}").replace("*", "{}").lstrip("/")
        for name in "ab":
            shop.write(place.format(name, 0), row(name))
        a, b = shop.partitions(pattern).values()
        shop.write(place.format("a", 1), row("more"))
        assert a.current_source_version() != a.source_version
        assert b.current_source_version() == b.source_version

    @pytest.mark.parametrize(
        ("pattern", "added"),
        [("/*/{name}-0.parquet", "y/b-0.parquet"), ("/x/{name}-*.parquet", "x/b-1.parquet")],
    )
    def test_folder_of_several_partitions_is_listed_again_after_a_while(
        self, shop: Shop, pattern: str, added: str
    ) -> None:
        for name in "ab":
            shop.write(f"x/{name}-0.parquet", row(name))
        now = 0.0
        a, b = FolderCatalog(shop.files(pattern), Selection(), clock=lambda: now)
        assert a.current_source_version() == a.source_version
        shop.write(added, row("new"))
        assert b.current_source_version() == b.source_version  # looked at a moment ago

        now = 60.0

        assert b.current_source_version() not in (None, b.source_version)
        assert a.current_source_version() == a.source_version

    def test_replaced_file_in_a_folder_of_several_partitions_is_seen_at_once(
        self, shop: Shop
    ) -> None:
        for name in "abc":
            shop.write(f"x/{name}.parquet", row(name))
        a, b, c = FolderCatalog(shop.files("/*/{name}.parquet"), Selection(), clock=lambda: 0.0)
        assert a.current_source_version() == a.source_version

        shop.write("x/b.parquet", row("other"))
        shop.remove("x/c.parquet")

        assert b.current_source_version() not in (None, b.source_version)
        assert c.current_source_version() is None

    def test_rows_and_bytes_are_known_without_reading(self, shop: Shop) -> None:
        rows = [(str(n), "x" * 100) for n in range(1000)]
        for number in range(2):
            shop.write(f"category=a/{number}.parquet", rows)
        a = shop.partitions()["a"]
        assert (a.rows, a.text_bytes) == (2000, pytest.approx(200_000, rel=0.2))
