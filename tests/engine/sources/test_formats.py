"""Files of every format give the same rows, and a file that cannot be read is refused by name with
a remedy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources import formats
from surge_dagster.engine.sources.endings import is_source_file
from surge_dagster.engine.sources.formats import batches
from surge_dagster.engine.sources.listing import SourceFile

COLUMNS = ("id", "text", "category")
ROWS = [
    ("007", 'said "so", twice\nand left', "shoes"),
    ("2", "", "garden tools"),
    ("3", "zwei ß 😀", "shoes"),
    ("4", '5" pipe', "a;b"),
]
ENDINGS = [
    "parquet",
    "arrow",
    "arrows",
    "csv",
    "csv.gz",
    "csv.zst",
    "tsv",
    "jsonl",
    "jsonl.gz",
    "ndjson.zst",
    "json",
]


def source_file(path: Path) -> SourceFile:
    return SourceFile(path.name, path.stat().st_size, "v1", partial(pa.OSFile, str(path)))


def rows_in(path: Path, columns: Sequence[str] = COLUMNS) -> list[tuple[Any, ...]]:
    read = list(batches(source_file(path), columns))
    assert all(tuple(batch.schema.names) == tuple(columns) for batch in read)
    return [
        row
        for batch in read
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]


def csv_text(
    rows: list[tuple[str, ...]], delimiter: str = ",", header: tuple[str, ...] = COLUMNS
) -> str:
    quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row] for row in rows]
    return "".join(f"{delimiter.join(row)}\n" for row in [list(header), *quoted])


def write(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    """Write rows of (id, text, category) in the format that the name says, with a column that
    nobody reads."""
    table = pa.table({name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)})
    table = table.add_column(1, "other", pa.array(range(len(rows))))
    name, codec = path.name, {"gz": "gzip", "zst": "zstd"}.get(path.suffix[1:])
    if name.endswith("parquet"):
        pq.write_table(table, path)
    elif name.endswith((".arrow", ".arrows")):
        new = pa.ipc.new_stream if name.endswith("s") else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    else:
        if "csv" in name or "tsv" in name:
            text = csv_text(rows, "\t" if "tsv" in name else ",")
        else:
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in table.to_pylist())
        content = text.encode()
        if codec:
            with pa.CompressedOutputStream(str(path), codec) as stream:
                stream.write(content)
        else:
            path.write_bytes(content)
    return path


def refused(path: Path, columns: Any = COLUMNS) -> str:
    with pytest.raises(ConfigError) as caught:
        rows_in(path, columns)
    assert path.name in str(caught.value)
    return str(caught.value)


class TestRows:
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_every_format_gives_the_rows_in_their_order(self, tmp_path: Path, ending: str) -> None:
        path = write(tmp_path / f"products.{ending}", ROWS)
        assert rows_in(path) == ROWS
        assert rows_in(path, ["category", "id"]) == [(row[2], row[0]) for row in ROWS]

    @pytest.mark.parametrize("ending", ["parquet", "arrow", "arrows", "jsonl", "csv"])
    def test_file_without_rows_gives_an_empty_batch(self, tmp_path: Path, ending: str) -> None:
        path = write(tmp_path / f"p.{ending}", [])
        assert [
            (len(batch), batch.schema.names) for batch in batches(source_file(path), COLUMNS)
        ] == [(0, list(COLUMNS))]

    @pytest.mark.parametrize("delimiter", [";", "\t", "|"])
    def test_delimiter_of_a_csv_file_is_found_in_its_header(
        self, tmp_path: Path, delimiter: str
    ) -> None:
        (tmp_path / "p.csv").write_text("\ufeff" + csv_text(ROWS, delimiter))
        assert rows_in(tmp_path / "p.csv") == ROWS

    def test_rows_longer_than_a_block_are_read(self, tmp_path: Path) -> None:
        rows = [("1", "a", "k"), ("2", "long\n" * 1_500_000, "k"), ("3", "b", "k")]
        assert rows_in(write(tmp_path / "p.csv", rows)) == rows
        assert rows_in(write(tmp_path / "p.jsonl", rows)) == rows

    def test_texts_that_look_like_dates_stay_strings_in_every_block(self, tmp_path: Path) -> None:
        rows = [
            (str(row), "2024-01-01" if row < 50_000 else "a word", "k") for row in range(60_000)
        ]
        assert rows_in(write(tmp_path / "p.jsonl", rows)) == rows
        assert rows_in(write(tmp_path / "p.csv", rows)) == rows

    def test_columns_of_json_lines_have_the_types_of_their_values(self, tmp_path: Path) -> None:
        deep = "[" * 5_000 + "]" * 5_000
        lines = [
            f'{{"a": null, "unread": {deep}, "b": 1, "c": 2}}\n',
            '{"a": true, "b": 1, "c": 0.5, "dü": null}\n',
        ]
        (tmp_path / "p.jsonl").write_text("".join(lines))
        assert rows_in(tmp_path / "p.jsonl", ["a", "b", "c", "dü"]) == [
            (None, 1, 2.0, None),
            (True, 1, 0.5, None),
        ]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"id": 18446744073709551615, "b": "x"}', "couldn't parse:18446744073709551615"),
            ('{"id": 1, "deep": {"b": "x"}}', "has no column 'b'"),
            ('{"id": 1, "word": "b"}', "has no column 'b'"),
            ('{"id": 1, "unread": "\xff"}', "has no column 'b'"),
            (
                f'{{"id": 1}}\n{{"b": {"[" * 5_000}{"]" * 5_000}}}',
                "), and no other of its first rows has 'b'.",
            ),
        ],
    )
    def test_integer_too_large_and_columns_that_json_lines_do_not_have_are_refused(
        self, tmp_path: Path, line: str, reason: str
    ) -> None:
        (tmp_path / "p.jsonl").write_text(f"{line}\n", "latin-1")
        assert reason in refused(tmp_path / "p.jsonl", ["id", "b"])

    def test_objects_of_json_lines_are_refused_beside_their_fields(self, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"doc": {"a": {"b": 1}}, "doc.c": {"d": 2}}')
        assert rows_in(tmp_path / "p.jsonl", ["doc.a.b", "doc.c.d"]) == [(1, 2)]
        for columns in (["doc", "doc.a.b"], ["doc.a.b", "doc.a", "doc.c.d"], ["doc.c.d", "doc.c"]):
            assert "which are not read as a whole. Name the needed fields" in refused(
                tmp_path / "p.jsonl", columns
            )

    @pytest.mark.parametrize(
        "line",
        [
            b'{"unread": "caf\xe9", "doc": {"title": "a"}}\n{"doc": {"title": "b"}}',
            b'{"doc": {"title": "a"}} {"doc": {"title": "b"}}',
            b'{"doc":\n{"title": "a"}}\r\n{"doc": {"title": "b"}}',
            b'{"unread": %s, "doc": {"title": "a"}}\n{"doc": {"title": "b"}}' % (b"9" * 5_000),
            b'\xef\xbb\xbf{"doc": {"title": "a"}}\n\n{"doc": {"title": "b"}}',
        ],
        ids=["not UTF-8", "two in a line", "over two lines", "long integer", "mark"],
    )
    def test_fields_of_every_object_that_is_read_are_found(
        self, tmp_path: Path, line: bytes
    ) -> None:
        (tmp_path / "p.jsonl").write_bytes(line)
        assert rows_in(tmp_path / "p.jsonl", ["doc.title"]) == [("a",), ("b",)]

    @pytest.mark.parametrize("before", [b"", b"\n ", b"\xef\xbb\xbf"])
    def test_json_lines_that_begin_with_null_have_a_row_of_nulls(
        self, tmp_path: Path, before: bytes
    ) -> None:
        (tmp_path / "p.jsonl").write_bytes(before + b'null\n{"id": 1}\nnull\n')
        assert rows_in(tmp_path / "p.jsonl", ["id"]) == [(None,), (1,), (None,)]

    @pytest.mark.parametrize("ending", ["parquet", "arrow", "arrows", "jsonl"])
    @pytest.mark.parametrize("rows", [0, 3, 20_000])
    def test_names_with_dots_are_columns_or_else_fields_inside_of_them(
        self, tmp_path: Path, ending: str, rows: int
    ) -> None:
        doc: list[Any] = [
            {"title": f"t{row}" * (row % 3), "meta": {"n": row}, "unread": [row]}
            for row in range(rows)
        ]
        doc[1:2] = [None] * (rows > 1)
        path, table = (
            tmp_path / f"p.{ending}",
            {"doc": doc, "id": range(rows), "doc.body": ["b"] * rows},
        )
        kind = pa.struct(
            {
                "title": pa.string(),
                "meta": pa.struct({"n": pa.int64()}),
                "unread": pa.list_(pa.int64()),
            }
        )
        kinds = pa.schema({"doc": kind, "id": pa.int64(), "doc.body": pa.string()})
        if ending == "jsonl":
            lines = (
                dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)
            )
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        elif ending == "parquet":
            pq.write_table(pa.table(table, schema=kinds), path)
        else:
            new = pa.ipc.new_stream if ending == "arrows" else pa.ipc.new_file
            with new(str(path), kinds) as writer:
                writer.write_table(pa.table(table, schema=kinds))
        expected = [
            (*((each["meta"]["n"], each["title"]) if each else (None, None)), row, "b")
            for row, each in enumerate(doc)
        ]
        assert rows_in(path, ["doc.meta.n", "doc.title", "id", "doc.body"]) == expected
        if rows:
            message = refused(path, ["doc.titel"])
            assert (
                "has no column 'doc.titel'; its columns are 'doc', 'id', 'doc.body', 'doc.title', 'doc.m"
                in message
            )

    @pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "shift_jis"])
    @pytest.mark.parametrize("ending", ["csv", "csv.gz"])
    def test_csv_files_are_read_in_their_encoding(
        self, tmp_path: Path, ending: str, encoding: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(formats, "_BLOCK_BYTES", 4096)
        # of which a byte is "|" or a backslash
        word = "表示|ソ" if encoding == "shift_jis" else "größer"
        rows = [(str(row), f'{word} "{row}"\n{word}', "k") for row in range(500)]
        content = csv_text(rows).encode(encoding)
        (tmp_path / f"p.{ending}").write_bytes(
            gzip.compress(content) if ending.endswith("gz") else content
        )
        read = list(batches(source_file(tmp_path / f"p.{ending}"), COLUMNS, encoding=encoding))
        assert [
            row for batch in read for row in zip(*batch.to_pydict().values(), strict=True)
        ] == rows

    def test_last_row_without_a_newline_counts_among_the_first_values(self, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"a": 20}\n{"a": 19.5}')
        assert rows_in(tmp_path / "p.jsonl", ["a"]) == [(20.0,), (19.5,)]

    @pytest.mark.parametrize(
        ("text", "rows"), [("id,text", []), ("id,text\r1,a\r2,b\r", [("1", "a"), ("2", "b")])]
    )
    def test_header_alone_and_carriage_returns_are_read(
        self, tmp_path: Path, text: str, rows: list[Any]
    ) -> None:
        (tmp_path / "p.csv").write_bytes(text.encode())
        assert rows_in(tmp_path / "p.csv", ["id", "text"]) == rows

    @pytest.mark.parametrize("block_bytes", range(1, 24))
    def test_rows_of_a_csv_file_are_the_same_wherever_its_blocks_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
    ) -> None:
        monkeypatch.setattr(formats, "_BLOCK_BYTES", block_bytes)
        rows = [*ROWS, ("\ufeff5", "\r\n,a", '""'), ("6", "\n", "\n\n"), ("\ufeff7", "Z\nZ", "k")]
        content = (
            csv_text(rows)
            .encode()
            .replace(b'"2"', b"2")
            .replace(b'"\xef\xbb\xbf7"', b"\xef\xbb\xbf7")
        )
        (tmp_path / "p.csv").write_bytes(content.replace(b"Z", b"\xc3"))  # which is no UTF-8
        read = [batch.column(0) for batch in batches(source_file(tmp_path / "p.csv"), ["text"])]
        texts = [value.as_py() for column in read for value in column.cast(pa.binary())]
        assert texts == [row[1].encode().replace(b"Z", b"\xc3") for row in rows]
        assert rows_in(tmp_path / "p.csv", ["id"]) == [(row[0],) for row in rows]
        (tmp_path / "p.csv").write_bytes(content + b"8,a\n")
        assert f"row {len(rows)}: Expected 3 columns, got 2" in refused(tmp_path / "p.csv", ["id"])

    def test_endings_say_which_files_are_read(self) -> None:
        assert all(is_source_file(f"x/p.{ending}") for ending in [*ENDINGS, "CSV", "feather", "pq"])
        assert not any(
            map(is_source_file, ["csv", "p.txt", "p.gz", "p.parquet.gz", "p.csv.bz2", "p.csv~"])
        )


class TestRefusedFiles:
    @pytest.mark.parametrize(
        "ending", ["parquet", "arrow", "arrows", "csv.gz", "jsonl.gz", "jsonl.zst", "csv.zst"]
    )
    def test_truncated_file_is_refused(self, tmp_path: Path, ending: str) -> None:
        path = write(
            tmp_path / f"p.{ending}",
            [(str(row), f"text {row * 7919}", "k") for row in range(20_000)],
        )
        whole = path.read_bytes()
        for size in (len(whole) // 2, len(whole) - 4):
            path.write_bytes(whole[:size])
            assert "gain" in refused(path), size

    @pytest.mark.parametrize(("ending", "remedy"), [("csv", "Set encoding to"), ("jsonl", "iconv")])
    def test_utf16_is_refused_with_what_helps(
        self, tmp_path: Path, ending: str, remedy: str
    ) -> None:
        path = write(tmp_path / f"p.{ending}", ROWS)
        path.write_bytes(path.read_text().encode("utf-16"))
        assert "UTF-16" in refused(path)
        path.write_bytes(path.read_bytes()[2:])
        assert remedy in refused(path)

    def test_csv_file_in_another_encoding_than_was_said_is_refused_with_the_setting(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "p.csv"
        path.write_bytes("id,größe\n1,a\n".encode("cp1252"))
        assert rows_in(path, ["id"]) == [("1",)]
        assert "has a header that is not UTF-8 text. Set encoding to" in refused(
            path, ["id", "größe"]
        )
        path.write_bytes(b"id,text\n1,\x81\n")  # which cp1252 does not have
        with pytest.raises(
            ConfigError, match=r"p.csv is not text in cp1252 .*0x81.* Set encoding to that"
        ):
            list(batches(source_file(path), ["id"], encoding="cp1252"))
        path.write_bytes("id,text\n1,a\n".encode("utf-16")[:-1])
        with pytest.raises(ConfigError, match="is not text in utf-16"):
            list(batches(source_file(path), ["id"], encoding="utf-16"))

    @pytest.mark.parametrize("ending", ["parquet", "arrow", "csv", "jsonl"])
    def test_missing_column_is_named_beside_those_that_are_there(
        self, tmp_path: Path, ending: str
    ) -> None:
        message = refused(write(tmp_path / f"p.{ending}", ROWS), ["id", "title"])
        assert (
            "has no column 'title'" in message
            and "the settings id, text, columns and partition_by" in message
        )
        assert "'category'" in message

    def test_column_that_comes_twice_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "p.csv").write_text("id,text,id\n1,a,2\n")
        assert "two columns 'id'" in refused(tmp_path / "p.csv", ["id", "text"])

    @pytest.mark.parametrize("late", ['"x9"', "1.5"])
    def test_type_that_changes_in_a_later_block_is_named_with_its_row(
        self, tmp_path: Path, late: str
    ) -> None:
        lines = [f'{{"id": {row}, "text": "t"}}\n' for row in range(100_000)]
        lines[90_000] = f'{{"id": {late}, "text": "t"}}\n'
        (tmp_path / "p.jsonl").write_text("".join(lines))
        message = refused(tmp_path / "p.jsonl", ["id", "text"])
        assert "all ids in quotes" in message
        assert "cannot be read at row 90,000 (" in message

    def test_quote_that_is_never_closed_is_named_with_its_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(formats, "_BLOCK_BYTES", 4096)
        rows = [f'{row},"a\nb"\n' for row in range(1, 5_001)]
        (tmp_path / "p.csv").write_text("id,text\n" + "".join(rows) + '5001,"open\n5002,c\n')
        message = refused(tmp_path / "p.csv", ["id", "text"])
        assert """where it says '5001,"open""" in message
        assert "in row 5,000. Close the quote" in message

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "is empty"),
            (
                "id,text\n1,a\n2\n",
                "Expected 2 columns, got 1: 2). Give that row as many values as the header has",
            ),
            ('id,text\n1,"a\n2,b\n', "a quote that is never closed"),
            ('id,text\n1,"a\n2,b', "a quote that is never closed"),
        ],
    )
    def test_csv_file_out_of_form_is_refused(self, tmp_path: Path, text: str, reason: str) -> None:
        (tmp_path / "p.csv").write_text(text)
        assert reason in refused(tmp_path / "p.csv", ["id", "text"])

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('[{"id": "1"}]', "JSON array"),
            ('{"id": "1", "text": "a"}\n{"id": "2", "te', "row 1"),
            (
                '{"id": "1", "text": ["a"]}\n',
                "row 0 (JSON parse error: Column(/text) changed from string to array)",
            ),
            (f'{{"id": "1", "text": {"[" * 5_000}{"]" * 5_000}}}\n', "row 0"),
            (
                '{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n{"id": "x3", "text": "c"}\n',
                "row 2",
            ),
            (
                '{"id": 1}\n\n{"id": 2}\n{"id": 9223372036854775808, "text": "c"}\n{"id": 4}\n',
                "row 2 (Failed",
            ),
            ('{"id": "1", "text": "a"}\n{"id": "2", "text": "b"}}\n', "row 1 ("),
        ],
    )
    def test_json_file_out_of_form_is_refused(self, tmp_path: Path, text: str, reason: str) -> None:
        (tmp_path / "p.jsonl").write_text(text)
        assert reason in refused(tmp_path / "p.jsonl", ["id", "text"])

    def test_file_of_one_partition_refuses_that_partition(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.parquet", ROWS)
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(
            DataError, match=r"partition 'shoes': the file p\.parquet cannot be read"
        ):
            list(batches(source_file(path), COLUMNS, key="shoes"))


class TestMemory:
    """A file that expands a thousandfold is read in batches; each batch is small and is freed
    before the next."""

    @pytest.mark.parametrize(
        "ending", ["csv.gz", "csv.zst", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "arrows"]
    )
    def test_file_that_expands_a_thousandfold_is_read_in_small_batches(
        self, tmp_path: Path, ending: str
    ) -> None:
        path, text = tmp_path / f"p.{ending}", "a" * 100_000
        if ending == "parquet":  # one value, stored once
            pq.write_table(pa.table({"id": pa.array(range(1_000)), "text": [text] * 1_000}), path)
        elif "arrow" in ending:  # with a dictionary of views, as polars writes it
            shared = pa.DictionaryArray.from_arrays(
                pa.array([0] * 1_000, pa.uint32()), pa.array([text], pa.string_view())
            )
            table = pa.table({"id": pa.array(range(1_000)), "text": shared})
            with (pa.ipc.new_file if ending == "arrow" else pa.ipc.new_stream)(
                path, table.schema
            ) as writer:
                writer.write_table(table)
        else:
            line = f'{{"id": 1, "text": "{text}"}}\n' if "json" in ending else f"1,{text}\n"
            content = ("" if "json" in ending else "id,text\n") + line * 1_000
            with pa.CompressedOutputStream(
                str(path), {"gz": "gzip", "zst": "zstd"}[ending[-3:].strip(".")]
            ) as stream:
                stream.write(content.encode())
        assert path.stat().st_size * 500 < 100_000_000
        before, most, rows = pa.total_allocated_bytes(), 0, 0
        for batch in batches(source_file(path), ["id", "text"]):
            most, rows = max(most, pa.total_allocated_bytes() - before), rows + len(batch)
        assert rows == 1_000
        assert most < 64 * 1024 * 1024
