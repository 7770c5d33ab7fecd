"""What parquet-testing's data/ and bad_data/ are about, built here: its files are in no package."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.sources import Selection, open_folders
from tests.engine.sources.reading import only, refusal, rows_of

ROWS = [(f"id-{row}", f"text {row % 7} ß\0") for row in range(3_000)]
TABLE = pa.table({"id": [row[0] for row in ROWS], "text": [row[1] for row in ROWS]})
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "k.parquet"
    pq.write_table(TABLE, path)
    return path.read_bytes()


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", None])
@pytest.mark.parametrize("pages", ["1.0", "2.0"])
def test_every_codec_and_encoding_is_read(
    tmp_path: Path, codec: str, encoding: str | None, pages: Any
) -> None:
    pq.write_table(
        TABLE,
        tmp_path / "k.parquet",
        compression=codec,  # pyright: ignore[reportArgumentType]
        use_dictionary=encoding is None,
        column_encoding=encoding,
        data_page_version=pages,
        data_page_size=4096,
        row_group_size=1_100,
    )

    assert rows_of(only(open_folders(tmp_path))) == ROWS


@pytest.mark.parametrize(
    "options",
    [{"version": "1.0"}, {"version": "2.4"}, {"write_page_index": True}, {"store_schema": False}],
    ids=str,
)
def test_every_version_of_the_format_is_read(tmp_path: Path, options: dict[str, Any]) -> None:
    pq.write_table(TABLE, tmp_path / "k.parquet", **options)

    assert rows_of(only(open_folders(tmp_path))) == ROWS


@pytest.mark.parametrize("texts", [[], [None], ["a", None], ["", "b"]])
def test_nulls_and_empty_files_are_read_as_they_are(
    tmp_path: Path, texts: list[str | None]
) -> None:
    ids = [str(row) for row in range(len(texts))]
    table = pa.table({"id": ids, "text": texts}, pa.schema([("id", "string"), ("text", "string")]))
    pq.write_table(table, tmp_path / "k.parquet")

    partition = only(open_folders(tmp_path, Selection(missing_text="empty")))

    assert rows_of(partition) == [(row, text or "") for row, text in zip(ids, texts, strict=True)]


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1", b"PAR1PAR1", b"PAR1\0\0\0\0PAR1", b"PARE" * 9, LFS, gzip.compress(b"PAR1" * 9)],
    ids=["empty", "magic", "twice", "no footer", "encrypted", "LFS pointer", "gzip"],
)
def test_what_is_no_parquet_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "k.parquet").write_bytes(content)

    assert "the file k.parquet" in str(refusal(only(open_folders(tmp_path))))


@pytest.mark.parametrize("eighth", range(1, 8))
@pytest.mark.parametrize("is_cut_at_the_end", [True, False])
def test_part_of_a_file_is_refused_by_name(
    tmp_path: Path, whole: bytes, eighth: int, is_cut_at_the_end: bool
) -> None:
    place = len(whole) * eighth // 8
    part = whole[:place] if is_cut_at_the_end else whole[place:]
    (tmp_path / "k.parquet").write_bytes(part)

    assert "the file k.parquet" in str(refusal(only(open_folders(tmp_path))))


@pytest.mark.parametrize("length", [1, 1_000_000, 2**31, 2**32 - 1])
def test_wrong_length_of_the_footer_is_refused_by_name(
    tmp_path: Path, whole: bytes, length: int
) -> None:
    changed = whole[:-8] + length.to_bytes(4, "little") + whole[-4:]
    (tmp_path / "k.parquet").write_bytes(changed)

    assert "the file k.parquet" in str(refusal(only(open_folders(tmp_path))))


def test_page_that_does_not_decompress_is_refused_by_name(tmp_path: Path, whole: bytes) -> None:
    changed = whole[:60] + b"\xff" * 600 + whole[660:]
    (tmp_path / "k.parquet").write_bytes(changed)

    assert "the file k.parquet cannot be read" in str(refusal(only(open_folders(tmp_path))))
