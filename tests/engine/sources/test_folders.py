"""Catalogs of any layout, on a disk and in a bucket: their keys, order, versions and what is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.sources import Selection, Source, open_source
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.support.keys import encode_key
from tests.engine.sources.reading import ROWS, refusal, rows_of
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import Rows, write_rows


class Shop:
    """A folder, or a prefix of a bucket, that tests fill with files of rows."""

    def __init__(self, folder: Path, server: ObjectServer | None) -> None:
        self._folder = folder
        self._server = server
        self.url = str(folder) if server is None else f"s3://{BUCKET}/shop"
        self.options = server and StorageOptions(endpoint=server.url, access_key_id="a", secret_access_key="b")

    def write(self, name: str, rows: Rows = ROWS, **options: Any) -> None:
        path = write_rows(self._folder / name, rows, **options)
        if self._server is not None:
            self._server.put(f"shop/{name}", path.read_bytes())

    def open(self, below: str = "") -> Source:
        return open_source(self.url + below, storage_options=self.options)

    def partitions(self, below: str = "") -> dict[str, Partition]:
        return {partition.key: partition for partition in self.open(below)}

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()
        if self._server is not None:
            self._server.delete(f"shop/{name}")


@pytest.fixture(params=["disk", "bucket"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(tmp_path, request.getfixturevalue("object_server") if request.param == "bucket" else None)


def row(text: str) -> Rows:
    return [(text, text)]


class TestKeys:
    def test_folders_named_by_a_column_give_its_values_as_keys(self, shop: Shop) -> None:
        for name in ("category=shoes/1.parquet", "category=shoes/0.parquet", "category=garden%20tools/deep/0.parquet"):
            shop.write(name, row(name))
        found = {key: rows_of(partition) for key, partition in shop.partitions().items()}
        assert list(found) == ["garden tools", "shoes"]
        assert found["shoes"] == [*row("category=shoes/0.parquet"), *row("category=shoes/1.parquet")]

    def test_several_levels_make_one_key(self, shop: Shop) -> None:
        for name in ("lang=de/category=shoes", "lang=de/category=K%C3%B6ln", "lang=en/category=a%2Fb"):
            shop.write(f"{name}/0.parquet", row(name))
        found = {key: rows_of(partition) for key, partition in shop.partitions().items()}
        assert found == {
            "lang=de/category=K%C3%B6ln": row("lang=de/category=K%C3%B6ln"),
            "lang=de/category=shoes": row("lang=de/category=shoes"),
            "lang=en/category=a%2Fb": row("lang=en/category=a%2Fb"),
        }

    def test_one_file_per_partition_has_its_name_as_key(self, shop: Shop) -> None:
        shop.write("shoes.parquet", row("shoes"))
        shop.write("garden%20tools.parquet", row("tools"))
        found = shop.partitions()
        assert {key: rows_of(partition) for key, partition in found.items()} == {
            "garden tools": row("tools"),
            "shoes": row("shoes"),
        }
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
    def test_names_of_a_pattern_give_the_key(self, shop: Shop, pattern: str, keys: list[str]) -> None:
        for name in ("a/de-0", "a/de-1", "a/en-0", "b/de-0"):
            shop.write(f"{name}.parquet", row(name))
        found = shop.partitions(pattern)
        assert list(found) == keys
        expected = 3 if pattern.startswith("/a/") else 4
        assert sum(len(rows_of(partition)) for partition in found.values()) == expected
        assert all(partition.current_source_version() == partition.source_version for partition in found.values())

    def test_other_formats_are_read_by_their_endings(self, shop: Shop, tmp_path: Path) -> None:
        table = pa.table({"id": ["1"], "text": ["one"]})
        pacsv.write_csv(table, tmp_path / "x.csv")
        shop.write("category=a/0.parquet", row("a"))
        if shop.options is None:
            (tmp_path / "x.csv").rename(tmp_path / "category=a" / "1.csv")
        else:
            assert shop._server is not None
            shop._server.put("shop/category=a/1.csv", (tmp_path / "x.csv").read_bytes())
        (a,) = shop.partitions().values()
        assert rows_of(a) == [("a", "a"), ("1", "one")] and a.rows is None

    def test_long_key_is_read_from_the_files(self, shop: Shop) -> None:
        long = "k" * 300
        shop.write(f"category={encode_key(long)}/0.parquet", row("x"), key=long)
        shop.write(f"category={encode_key('other' * 100)}/0.parquet", row("x"))
        found = shop.partitions()
        assert rows_of(found[long]) == row("x")
        assert "does not declare the key" in str(refusal(found[encode_key("other" * 100)]))

    def test_other_columns_are_read_and_named_in_the_version(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet", version="v1")
        source = open_source(shop.url, selection=Selection(text="id"), storage_options=shop.options)
        (a,) = source
        assert a.source_version == "v1?text_column=id" and rows_of(a) == [(key, key) for key, _ in ROWS]


class TestVersions:
    def test_version_changes_with_each_file_that_is_changed_added_or_removed(self, shop: Shop) -> None:
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
    def test_file_that_joins_a_partition_of_a_pattern_changes_its_version_alone(self, shop: Shop, pattern: str) -> None:
        place = pattern.replace("{name}", "{}").replace("*", "{}").lstrip("/")
        for name in "ab":
            shop.write(place.format(name, 0), row(name))
        a, b = shop.partitions(pattern).values()
        shop.write(place.format("a", 1), row("more"))
        assert a.current_source_version() != a.source_version
        assert b.current_source_version() == b.source_version

    def test_declared_version_counts(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet", version="v 7")
        assert shop.partitions()["a"].source_version == "v 7"

    def test_rows_are_known_without_reading(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet")
        shop.write("category=a/1.parquet")
        assert shop.partitions()["a"].rows == 2 * len(ROWS)


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
        assert "lies in folders lang=…, and the others of this source in lang=…/category=…" in str(
            refusal(found["lang=de/0.parquet"])
        )
        assert "lies in folders none of them" in str(refusal(found["loose.parquet"]))

    def test_name_that_does_not_decode_is_refused(self, shop: Shop) -> None:
        shop.write("category=%FF/0.parquet")
        assert "does not decode" in str(refusal(shop.partitions()["%FF"]))

    def test_file_of_another_partition_is_refused(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet", key="b")
        assert "declares that it belongs to partition 'b'" in str(refusal(shop.partitions()["a"]))

    def test_damaged_file_hides_no_other_partition(self, shop: Shop) -> None:
        shop.write("category=a/0.parquet")
        damaged = b"PAR1 this is none"
        if shop._server is None:
            (shop._folder / "category=b").mkdir()
            (shop._folder / "category=b" / "0.parquet").write_bytes(damaged)
        else:
            shop._server.put("shop/category=b/0.parquet", damaged)
        found = shop.partitions()
        assert rows_of(found["a"]) == ROWS
        assert "0.parquet" in str(refusal(found["b"])) and found["b"].rows is None

    def test_folders_that_say_nothing_get_the_pattern_that_works(self, shop: Shop) -> None:
        shop.write("shoes/0.parquet")
        with pytest.raises(ConfigError, match="If each folder is a partition, give ") as refused:
            list(shop.open())
        assert f"'{shop.url}/{{name}}/*.parquet' as source" in str(refused.value)
        assert f"`surge-dagster embed {shop.url} OUTPUT --partition-by COLUMN`" in str(refused.value)
        assert list(shop.partitions("/{name}/*.parquet")) == ["shoes"]

    def test_one_file_gets_the_command_that_works(self, shop: Shop) -> None:
        shop.write("products.parquet")
        with pytest.raises(ConfigError, match=r"is one file.*--partition-by COLUMN") as refused:
            list(shop.open("/products.parquet"))
        assert "catalog demo" not in str(refused.value)

    def test_pattern_without_files_is_refused(self, shop: Shop) -> None:
        shop.write("a.parquet")
        with pytest.raises(ConfigError, match="is empty"):
            list(shop.open("/*.csv"))


class TestDisks:
    def test_unreadable_folder_is_its_partitions_own_transient_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("lang=de/category=a/0.parquet", "lang=de/category=b/0.parquet", "lang=en/category=c/0.parquet"):
            write_rows(tmp_path / name, ROWS)
        honest = os.scandir

        def refuse(suffix: str) -> None:
            def scan(path: str) -> object:
                if str(path).endswith(suffix):
                    raise OSError(5, "Input/output error")
                return honest(path)

            monkeypatch.setattr(os, "scandir", scan)

        refuse("category=a")
        a, b, c = open_source(tmp_path)
        with pytest.raises(TransientError, match=r"partition 'lang=de/category=a'.*Input/output error"):
            list(a.read())
        assert rows_of(b) == rows_of(c) == ROWS
        refuse("lang=de")  # nothing is known of its partitions: they must not count as removed
        with pytest.raises(ConfigError, match="its folder lang=de/ could not be read"):
            list(open_source(tmp_path))

    def test_file_replaced_during_reading_is_a_transient_error(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "a.parquet", ROWS)
        (a,) = open_source(tmp_path)
        write_rows(tmp_path / "a.parquet", [*ROWS, ("9", "nine")])
        with pytest.raises(TransientError, match=r"partition 'a'.*Run again"):
            list(a.read())

    def test_link_and_pipe_are_refused_in_their_own_partitions(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "out" / "0.parquet", ROWS)
        root = tmp_path / "shop"
        write_rows(root / "category=a" / "0.parquet", ROWS)
        (root / "category=b").symlink_to(tmp_path / "out")
        (root / "category=c").mkdir()
        os.mkfifo(root / "category=c" / "0.parquet")
        found = {partition.key: partition for partition in open_source(root)}
        assert rows_of(found["a"]) == ROWS
        assert "is a link out of the catalog" in str(refusal(found["b"]))
        assert "is a pipe, a socket or a device" in str(refusal(found["c"]))
        with pytest.raises(DataError):
            list(found["b"].read())
