"""A listing that remembers must never show a source version that is not there any more."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import ParquetCatalog, footers, open_source
from tests.small_catalogs import numbered_rows, partition_folder, write_catalog, write_partition, write_rows


@pytest.fixture
def catalog(tmp_path: Path) -> ParquetCatalog:
    """Three partitions of equal size, listed once."""
    root = write_catalog(tmp_path / "catalog", {key: numbered_rows(key, 3) for key in "abc"})
    source = open_source(root)
    assert versions(source) == dict.fromkeys("abc", "v1")
    return source


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every file count as one that changed long ago: the time of a status change cannot be set."""
    monkeypatch.setattr(footers, "_SETTLED_NS", -(10**18))


def versions(source: ParquetCatalog) -> dict[str, str]:
    return {partition.key: partition.source_version for partition in source}


def footers_read(source: ParquetCatalog, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many footers a listing reads."""
    read: list[Path] = []
    honest = pq.read_metadata

    def counted(path: Path) -> pq.FileMetaData:
        read.append(path)
        return honest(path)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "read_metadata", counted)
        list(source)
    return len(read)


@pytest.mark.usefixtures("settled")
def test_a_footer_is_read_once(catalog: ParquetCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    list(catalog)
    before = [(part.key, part.source_version, part.rows, part.text_bytes) for part in catalog]
    assert footers_read(catalog, monkeypatch) == 0
    footers._known.clear()
    assert [(part.key, part.source_version, part.rows, part.text_bytes) for part in catalog] == before


def test_files_that_changed_a_moment_ago_are_read_again(
    catalog: ParquetCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [footers_read(catalog, monkeypatch) for _ in range(2)] == [3, 3]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("how", ["in place", "renamed over it"])
def test_another_file_of_the_same_size_and_time_is_another(catalog: ParquetCatalog, how: str) -> None:
    list(catalog)
    path = partition_folder(catalog.root, "b") / "part-0.parquet"
    old = path.stat()
    if how == "in place":
        write_partition(catalog.root, "b", numbered_rows("b", 3), version="v2")
    else:
        aside = write_rows(path.with_name("_aside"), numbered_rows("b", 3), key="b", version="v2")
        aside.replace(path)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    assert versions(catalog) == {"a": "v1", "b": "v2", "c": "v1"}


@pytest.mark.usefixtures("settled")
def test_files_that_come_and_go_are_seen_in_folders_and_in_folders_of_folders(catalog: ParquetCatalog) -> None:
    folder = partition_folder(catalog.root, "b")
    (folder / "empty").mkdir()
    list(catalog)
    before = versions(catalog)
    extra = write_rows(folder / "empty" / "part-1.parquet", [("x", "text")], key="b", version="v1")
    with_extra = versions(catalog)
    assert with_extra["b"] != before["b"]
    beside = write_rows(folder / "part-2.parquet", [("y", "text")], key="b", version="v1")
    assert versions(catalog)["b"] not in (before["b"], with_extra["b"])
    beside.unlink()
    assert versions(catalog) == with_extra
    extra.unlink()
    assert versions(catalog) == before


@pytest.mark.usefixtures("settled")
def test_no_more_is_kept_than_the_catalog_has(catalog: ParquetCatalog) -> None:
    list(catalog)
    folder = partition_folder(catalog.root, "b")
    (folder / "part-0.parquet").unlink()
    folder.rmdir()
    assert versions(catalog) == {"a": "v1", "c": "v1"}
    kept = [folder for made in footers._made.values() for folder in made if folder.startswith(str(catalog.root))]
    assert len(kept) == 2
    assert not [path for path in footers._known[str(catalog.root)] if path.startswith(str(folder))]


@pytest.mark.usefixtures("settled")
def test_the_look_before_a_file_is_published_remembers_nothing(
    catalog: ParquetCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(catalog)
    [a, *_] = list(catalog)
    monkeypatch.setattr(footers.KnownFooters, "get", lambda *_: pytest.fail("asked for what was remembered"))
    assert a.current_source_version() == "v1"


@pytest.mark.usefixtures("settled")
def test_a_partition_is_put_together_again_only_when_it_has_changed(catalog: ParquetCatalog) -> None:
    first = {partition.key: partition for partition in catalog}
    assert [partition is first[partition.key] for partition in catalog] == [True, True, True]
    write_partition(catalog.root, "b", numbered_rows("b", 4), version="v2")
    write_partition(catalog.root, "d", numbered_rows("d", 1))
    again = {partition.key: partition for partition in catalog}
    assert [key for key, partition in again.items() if first.get(key) is not partition] == ["b", "d"]
    assert (again["b"].source_version, again["b"].rows) == ("v2", 4)
    assert sum(len(batch) for batch in again["b"].read()) == 4


@pytest.mark.usefixtures("settled")
def test_a_catalog_that_is_read_in_another_way_has_partitions_of_its_own(catalog: ParquetCatalog) -> None:
    list(catalog)
    strict = open_source(catalog.root, max_text_bytes=1)
    [a, *_] = strict
    with pytest.raises(DataError, match="at most 1 are allowed"):
        list(a.read())
    titled = open_source(catalog.root, text_column="title")
    for _ in range(2):
        assert versions(titled) == dict.fromkeys("abc", "v1?text_column=title")
        assert versions(catalog) == dict.fromkeys("abc", "v1")


@pytest.mark.usefixtures("settled")
def test_two_folders_of_one_key_are_found_though_each_was_known_alone(catalog: ParquetCatalog) -> None:
    write_partition(catalog.root, "x y", numbered_rows("x y", 1))
    list(catalog)
    twin = catalog.root / "partition=x y"
    write_rows(twin / "part-0.parquet", numbered_rows("x y", 1), key="x y", version="v1")
    [both] = [partition for partition in catalog if partition.key == "x y"]
    with pytest.raises(DataError, match="all stand for this key"):
        list(both.read())


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", ["fuse.gcsfuse", "ext4"])
def test_what_comes_and_goes_is_seen_where_folders_keep_their_times(
    catalog: ParquetCatalog, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A mounted bucket need not give a folder another time; partitions are seen on any filesystem, files on such."""
    monkeypatch.setattr(footers, "_filesystem_of", lambda _: kind)
    kept: dict[str, os.stat_result] = {}
    monkeypatch.setattr(footers, "_look", lambda folder: kept.setdefault(folder, Path(folder).stat()))
    before = versions(catalog)
    write_partition(catalog.root, "d", numbered_rows("d", 3))
    assert versions(catalog).keys() == set("abcd")
    if kind != "ext4":
        write_rows(partition_folder(catalog.root, "b") / "part-2.parquet", [("y", "text")], key="b", version="v2")
        assert versions(catalog)["b"] != before["b"]


def test_the_filesystem_of_a_folder_is_that_of_the_innermost_mount() -> None:
    assert footers._filesystem_of("/proc/self") == "proc"
    assert footers._filesystem_of("/dev/shm") == "tmpfs"
