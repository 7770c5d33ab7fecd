"""Files of folders, patterns and single files: listed alike on a disk and in a bucket, each with
its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError, StoreUnavailable
from surge_dagster.engine.sources import open_files
from surge_dagster.engine.sources.listing import SourceFiles
from tests.engine.sources.shops import Shop
from tests.engine.store.object_server import BUCKET, ObjectServer

NAMES = [
    "Köln/b.parquet",
    "_SUCCESS",
    ".hidden/a.parquet",
    "_old/a.parquet",
    "a%20b/part-0.parquet",
    "a%20b/part-10.parquet",
    "a%20b/deep/part-2.parquet",
    "B.csv",
    "a b/ü%20.csv",
    "a=b&c/50%.csv",
    "a+b#/s*.csv",
    "notes.txt",
]
VISIBLE = sorted(
    (name for name in NAMES if name[0] not in "_." and name != "notes.txt"), key=str.encode
)


@pytest.fixture
def place(shop: Shop) -> Shop:
    """A folder or a prefix of a bucket with files."""
    for name in NAMES:
        shop.put(name, name.encode())
    return shop


def names(files: SourceFiles, scope: str = "") -> list[str]:
    return [file.relative for file in files.list(scope)]


def test_folder_lists_visible_files_of_known_formats_in_bytewise_order_with_size_and_content(
    place: Shop,
) -> None:
    found = place.files().list()
    assert [file.relative for file in found] == VISIBLE
    for file in found:
        with file.open() as opened:
            content = opened.read()
        assert content == file.relative.encode()
        assert (file.size, file.refusal) == (len(content), None)


def test_one_file_is_listed_by_its_own_name(place: Shop) -> None:
    [file] = place.files("/a%20b/part-0.parquet").list()
    assert (file.relative, file.size) == ("part-0.parquet", 20)
    with file.open() as opened:
        assert opened.read() == b"a%20b/part-0.parquet"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/*.csv", ["B.csv"]),
        ("/*/*.parquet", ["Köln/b.parquet", "a%20b/part-0.parquet", "a%20b/part-10.parquet"]),
        ("/a%20b/*.parquet", ["part-0.parquet", "part-10.parquet"]),
        ("/a%20b/**/*.parquet", ["deep/part-2.parquet", "part-0.parquet", "part-10.parquet"]),
        ("/{town}/b.*", ["Köln/b.parquet"]),
        ("/{town}-0.parquet", []),
    ],
)
def test_pattern_selects_files_below_its_first_wildcard(
    place: Shop, pattern: str, expected: list[str]
) -> None:
    assert sorted(names(place.files(pattern))) == sorted(expected)


def test_scope_is_one_folder_or_one_file_of_the_place(place: Shop) -> None:
    files = place.files()
    assert names(files, "a%20b/deep") == ["a%20b/deep/part-2.parquet"]
    assert names(files, "a%20b/part-0.parquet") == ["a%20b/part-0.parquet"]
    assert names(files, "a%20b/part") == names(files, "gone") == []


def test_changed_file_has_another_token_and_its_listed_version_is_not_opened(place: Shop) -> None:
    files = place.files("/B.csv")
    [before] = files.list()
    place.put("B.csv", b"other content")
    [after] = files.list()
    assert after.token != before.token
    with pytest.raises(FileNotFoundError):
        before.open()
    with after.open() as opened:
        assert opened.read() == b"other content"


@pytest.mark.parametrize("pattern", ["/{a}/{a}.parquet", "/{a b}.parquet", "/{}.parquet"])
def test_pattern_whose_names_cannot_be_used_is_refused(place: Shop, pattern: str) -> None:
    with pytest.raises(ConfigError, match="in braces"):
        place.files(pattern)


def test_local_path_that_exists_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "{odd} *"
    folder.mkdir()
    (folder / "a.csv").touch()
    assert names(open_files(folder)) == names(open_files(folder / "a.csv")) == ["a.csv"]


@pytest.mark.parametrize("missing", ["missing", "missing/*.csv"])
def test_missing_local_place_is_refused_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / missing, missing):
        with pytest.raises(
            ConfigError, match=rf"no catalog at '{tmp_path}/.*: there is no .* is mounted"
        ):
            open_files(given)


@pytest.mark.parametrize("key", ["shoes", "a b", "50%", "Köln", "a+b#", "s*"])
def test_pattern_gives_the_folder_and_the_beginning_of_names_of_a_key(
    place: Shop, key: str
) -> None:
    place.put("flat/x-0.csv", b"content")
    files = place.files("/flat/{category}-*.csv")

    assert files.pattern is not None
    assert files.pattern.names_in(f"{key}-1.csv") == ("", f"{key}-", {"category": key})


class TestBuckets:
    def open(self, server: ObjectServer, url: str) -> SourceFiles:
        return open_files(url, server.options)

    @pytest.mark.parametrize("name", ["cat/a//b.csv", "cat/a\x01b.csv"])
    def test_object_whose_name_no_client_can_use_is_named(
        self, object_server: ObjectServer, name: str
    ) -> None:
        object_server.put("cat/a.csv", b"x")
        object_server.put(name, b"x")

        with pytest.raises(StoreUnavailable) as refused:
            self.open(object_server, f"s3://{BUCKET}/cat").list()

        assert f"an empty or dotted part, or a control character: {name!r})" in str(refused.value)
        assert "Rename or remove that object" in str(refused.value)

    def test_whole_bucket_is_a_folder(self, object_server: ObjectServer) -> None:
        object_server.put("a/0.parquet", b"x")
        assert names(self.open(object_server, f"s3://{BUCKET}")) == ["a/0.parquet"]
