"""What every format promises, format by format, and how a file that cannot be read is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources import Selection, csv_files, json_files
from surge_dagster.engine.sources.formats import READERS, batches, is_source_file
from tests.engine.sources.reading import source_file

COLUMNS = ("id", "text", "category")
ROWS = [
    ("007", 'said "so", twice\nand left', "shoes"),
    ("2", "", "garden tools"),
    ("3", "zwei ß 😀", "shoes"),
    ("4", '5" pipe', "a;b"),
]


def arrow_writer(new: Callable[..., Any]) -> Callable[[Path, pa.Table], None]:
    def write(path: Path, table: pa.Table) -> None:
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=10_000)

    return write


def write_text(path: Path, text: str) -> None:
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with pa.output_stream(str(path), compression=codec) as stream:
        stream.write(text.encode())


def write_json(path: Path, table: pa.Table) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in table.to_pylist()]
    write_text(path, "".join(f"{line}\n" for line in lines))


def write_csv(path: Path, table: pa.Table) -> None:
    rows = [tuple(map(str, row.values())) for row in table.to_pylist()]
    delimiter = "\t" if "tsv" in path.name else ","
    write_text(path, csv_text(rows, delimiter, table.schema.names))


# One line per format: a new format is one more.
WRITERS: dict[str, Callable[[Path, pa.Table], Any]] = {
    "parquet": lambda path, table: pq.write_table(table, path),
    "arrow": arrow_writer(pa.ipc.new_file),
    "arrows": arrow_writer(pa.ipc.new_stream),
    "csv": write_csv,
    "tsv": write_csv,
    "jsonl": write_json,
    "json": write_json,
}
PACKED = ["csv.gz", "csv.zst", "jsonl.gz", "ndjson.zst"]
TYPED = ["parquet", "arrow", "arrows", "jsonl"]  # with types, and fields inside of columns
every_format = pytest.mark.parametrize("ending", [*WRITERS, *PACKED])


def csv_text(
    rows: Sequence[tuple[str, ...]], delimiter: str = ",", header: Sequence[str] = COLUMNS
) -> str:
    quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row] for row in rows]
    return "".join(f"{delimiter.join(row)}\n" for row in [list(header), *quoted])


def rows_in(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> list[tuple[Any, ...]]:
    read = list(batches(source_file(path), columns, **options))
    assert {tuple(batch.schema.names) for batch in read} == {tuple(columns)}
    return [row for batch in read for row in zip(*batch.to_pydict().values(), strict=True)]


def write(path: Path, rows: Sequence[tuple[Any, ...]]) -> Path:
    """Write rows in the format of the name, with a column that nobody reads."""
    columns = [[row[place] for row in rows] for place in range(len(COLUMNS))]
    table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
    table = table.add_column(1, "other", pa.array(range(len(rows))))
    kind = path.name.split(".")[1].replace("ndjson", "jsonl")
    WRITERS[kind](path, table)
    return path


def refused(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        rows_in(path, columns, **options)
    assert path.name in str(caught.value)
    return str(caught.value)


class TestEveryFormat:
    @every_format
    def test_rows_are_given_in_their_order(self, tmp_path: Path, ending: str) -> None:
        path = write(tmp_path / f"products.{ending}", ROWS)

        assert rows_in(path) == ROWS
        assert rows_in(path, ["category", "id"]) == [(row[2], row[0]) for row in ROWS]

    @every_format
    def test_file_without_rows_gives_an_empty_batch(self, tmp_path: Path, ending: str) -> None:
        path = write(tmp_path / f"p.{ending}", [])

        [batch] = batches(source_file(path), COLUMNS)

        assert len(batch) == 0
        assert batch.schema.names == list(COLUMNS)

    @every_format
    def test_missing_column_is_named_with_those_of_the_file(
        self, tmp_path: Path, ending: str
    ) -> None:
        message = refused(write(tmp_path / f"p.{ending}", ROWS), ["id", "title"])

        assert "has no column 'title'; its columns are" in message
        assert "'category'" in message
        assert "the settings id, text, columns and partition_by" in message

    @pytest.mark.parametrize("ending", ["parquet", "arrow", "arrows", *PACKED])
    @pytest.mark.parametrize("is_half", [True, False])
    def test_truncated_file_is_refused(self, tmp_path: Path, ending: str, is_half: bool) -> None:
        rows = [(str(row), f"text {row * 7919}", "k") for row in range(20_000)]
        path = write(tmp_path / f"p.{ending}", rows)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2 if is_half else -4])

        assert "gain" in refused(path)

    @pytest.mark.parametrize("ending", TYPED)
    @pytest.mark.parametrize("rows", [0, 3, 20_000])
    def test_name_with_dots_is_a_column_or_else_a_field(
        self, tmp_path: Path, ending: str, rows: int
    ) -> None:
        meta = pa.struct({"n": pa.int64()})
        doc = pa.struct({"title": pa.string(), "meta": meta, "unread": pa.list_(pa.int64())})
        values: list[Any] = [
            {"title": f"t{row}", "meta": {"n": row}, "unread": [row]} for row in range(rows)
        ]
        values[1:2] = [None] * (rows > 1)
        columns = {"doc": pa.array(values, doc), "doc.body": pa.array(["b"] * rows, pa.string())}
        WRITERS[ending](tmp_path / f"p.{ending}", pa.table(columns))

        found = rows_in(tmp_path / f"p.{ending}", ["doc.meta.n", "doc.title", "doc.body"])

        assert [row[:2] for row in found] == [
            (each["meta"]["n"], each["title"]) if each else (None, None) for each in values
        ]
        assert {row[2] for row in found} <= {"b"}

    @every_format
    def test_file_that_expands_a_thousandfold_is_read_in_small_batches(
        self, tmp_path: Path, ending: str
    ) -> None:
        path = tmp_path / f"p.{ending}"
        shared = pa.DictionaryArray.from_arrays(
            pa.array([0] * 1_000, pa.uint32()), pa.array(["a" * 100_000], pa.string_view())
        )
        if "arrow" not in ending:
            shared = shared.cast(pa.dictionary(pa.int32(), pa.string())).dictionary_decode()
        table = pa.table({"id": pa.array(range(1_000)), "text": shared})
        kind = ending.split(".")[0].replace("ndjson", "jsonl")
        WRITERS[kind](path, table)
        del table, shared

        before = pa.total_allocated_bytes()
        most = 0
        rows = 0
        for batch in batches(source_file(path), ["id", "text"]):
            most = max(most, pa.total_allocated_bytes() - before)
            rows += len(batch)

        assert rows == 1_000
        assert most < 64 * 1024 * 1024

    def test_endings_name_the_formats(self) -> None:
        assert {f".{ending}" for ending in [*WRITERS, *PACKED]} <= READERS.keys()
        for ending in READERS:
            assert is_source_file(f"x/p{ending.upper()}")
        for name in ("csv", "p.txt", "p.gz", "p.parquet.gz", "p.csv.bz2", "p.csv~"):
            assert not is_source_file(name)

    def test_file_of_one_partition_refuses_that_partition(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.parquet", ROWS)
        path.write_bytes(path.read_bytes()[:-9])

        with pytest.raises(DataError, match=r"partition 'shoes': the file p\.parquet cannot be"):
            rows_in(path, key="shoes")

    @pytest.mark.parametrize("ending", ["csv", "jsonl"])
    def test_row_longer_than_a_block_is_read(self, tmp_path: Path, ending: str) -> None:
        rows = [("1", "a", "k"), ("2", "long\n" * 1_500_000, "k"), ("3", "b", "k")]

        assert rows_in(write(tmp_path / f"p.{ending}", rows)) == rows

    @pytest.mark.parametrize("ending", ["csv", "jsonl"])
    def test_text_that_looks_like_a_date_is_a_string(self, tmp_path: Path, ending: str) -> None:
        rows = [(str(row), "2024-01-01" if row < 50_000 else "word", "k") for row in range(60_000)]

        assert rows_in(write(tmp_path / f"p.{ending}", rows)) == rows

    @pytest.mark.parametrize(("ending", "remedy"), [("csv", "Set encoding to"), ("jsonl", "iconv")])
    @pytest.mark.parametrize("mark_bytes", [0, 2])
    def test_utf16_is_refused_with_what_helps(
        self, tmp_path: Path, ending: str, remedy: str, mark_bytes: int
    ) -> None:
        path = write(tmp_path / f"p.{ending}", ROWS)
        path.write_bytes(path.read_text().encode("utf-16")[mark_bytes:])

        message = refused(path)

        assert "UTF-16" in message
        assert remedy in message


class TestCsv:
    @pytest.mark.parametrize("delimiter", [";", "\t", "|"])
    def test_delimiter_is_found_in_the_header(self, tmp_path: Path, delimiter: str) -> None:
        (tmp_path / "p.csv").write_text("\ufeff" + csv_text(ROWS, delimiter))

        assert rows_in(tmp_path / "p.csv") == ROWS

    @pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "shift_jis"])
    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_file_is_read_in_its_encoding(
        self,
        tmp_path: Path,
        encoding: str,
        pack: Callable[[bytes], bytes],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(csv_files, "BLOCK_BYTES", 4096)
        # of which a byte is "|" or a backslash
        word = "表示|ソ" if encoding == "shift_jis" else "größer"
        rows = [(str(row), f'{word} "{row}"\n{word}', "k") for row in range(500)]
        path = tmp_path / ("p.csv" if pack is bytes else "p.csv.gz")
        path.write_bytes(pack(csv_text(rows).encode(encoding)))

        assert rows_in(path, encoding=encoding) == rows

    @pytest.mark.parametrize(
        ("content", "encoding", "reason"),
        [
            ("id,größe\n1,a\n".encode("cp1252"), "utf-8", "has a header that is not UTF-8 text"),
            (b"id,text\n1,\x81\n", "cp1252", "is not text in cp1252"),
            ("id,text\n1,a\n".encode("utf-16")[:-1], "utf-16", "is not text in utf-16"),
        ],
    )
    def test_file_in_another_encoding_is_refused_with_the_setting(
        self, tmp_path: Path, content: bytes, encoding: str, reason: str
    ) -> None:
        (tmp_path / "p.csv").write_bytes(content)
        columns = ["id", "größe"] if encoding == "utf-8" else ["id"]

        message = refused(tmp_path / "p.csv", columns, encoding=encoding)

        assert reason in message
        assert "Set encoding to" in message

    @pytest.mark.parametrize(
        ("text", "rows"), [("id,text", []), ("id,text\r1,a\r2,b\r", [("1", "a"), ("2", "b")])]
    )
    def test_header_only_and_carriage_returns_are_read(
        self, tmp_path: Path, text: str, rows: list[Any]
    ) -> None:
        (tmp_path / "p.csv").write_bytes(text.encode())

        assert rows_in(tmp_path / "p.csv", ["id", "text"]) == rows

    @pytest.mark.parametrize("block_bytes", [1, 100])
    def test_batches_have_every_row_with_its_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
    ) -> None:
        monkeypatch.setattr(csv_files, "BLOCK_BYTES", block_bytes)
        rows = [*ROWS, ("5", "\r\n,a", '""'), ("6", "\n", "\n\n"), ("\ufeff7", "Z\0Z", "k")]
        path = tmp_path / "p.csv"
        path.write_bytes(csv_text(rows).encode().replace(b"Z", b"\xc3"))  # which is not UTF-8

        read = [batch.column(0) for batch in batches(source_file(path), ["text"])]

        texts = [value.as_py() for column in read for value in column.cast(pa.binary())]
        assert texts == [row[1].encode().replace(b"Z", b"\xc3") for row in rows]
        assert rows_in(path, ["id"]) == [(row[0],) for row in rows]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "is empty"),
            ("id,text\n1,a\n\n2\n", "row 1 (expected 2 values, got 1)"),
            ('id,text\n1,"a\n2,b\n', "row 0 (unexpected end of data). Close its quotes"),
            ('id,text\n1,"a ""b"" c"\n2,"a "b" c"\n', "row 1 (',' expected after '\"')"),
            ('id,text\n1,a\n2,"say \\"hi\\", now"\n', "row 1 (',' expected after '\"')"),
            ("id,text,id\n1,a,2\n", "two columns 'id'"),
            (f"id,text\n1,a\n2,{'x' * 9_000_000}\n", "row 1 (a line of more than 8,388,608"),
            (f'id,text\n1,a\n2,"{"x,y" * 3_000_000}', "row 1 (a line of more than 8,388,608"),
        ],
    )
    def test_file_out_of_form_is_refused(self, tmp_path: Path, text: str, reason: str) -> None:
        (tmp_path / "p.csv").write_text(text)

        assert reason in refused(tmp_path / "p.csv", ["id", "text"])

    @pytest.mark.parametrize(
        ("written", "text"),
        [
            (r'"say \"hi\", now\\"', 'say "hi", now\\'),
            (r'"\"\\\""', r'"\"'),
            (r'"\""""', '""'),
            (r'"twice ""quoted"""', 'twice "quoted"'),
            (r"C:\temp\\new", r"C:\temp\\new"),
            (r"5\" pipe", r"5\" pipe"),
            (r'"\d+\,"', r"\d+\,"),
            (r"\N", r"\N"),
            ('"a\\\n\\"b,\\\r\nc"', 'a\\\n"b,\\\r\nc'),
        ],
    )
    def test_escape_counts_only_within_quotes_before_a_quote_or_itself(
        self, tmp_path: Path, written: str, text: str
    ) -> None:
        content = f'id,"the \\"text\\"",C:\\t\n1,{written},"2"\n{written},a,""\n'
        (tmp_path / "p.csv").write_bytes(content.encode())

        read = rows_in(tmp_path / "p.csv", ["id", 'the "text"', r"C:\t"], escape="\\")

        assert read == [("1", text, "2"), (text, "a", "")]

    @pytest.mark.parametrize("escape", ["", "ab", '"', ",", "\n"])
    def test_escape_that_a_file_cannot_have_is_refused(self, escape: str) -> None:
        with pytest.raises(ConfigError, match="expected one character, such as a backslash"):
            Selection(escape=escape)


class TestJsonLines:
    def test_columns_have_the_types_of_their_values(self, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text(
            '\ufeff{"a": null, "unread": [[1]], "b": 1, "c": 20}\n\n'
            '{"a": true, "b": 1, "c": 19.5, "dü": null}'
        )

        assert rows_in(tmp_path / "p.jsonl", ["a", "b", "c", "dü"]) == [
            (None, 1, 20.0, None),
            (True, 1, 19.5, None),
        ]

    @pytest.mark.parametrize("absent", ["", ', "price": null'])
    def test_field_without_a_value_in_the_first_blocks_is_null_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
    ) -> None:
        monkeypatch.setattr(json_files, "BLOCK_BYTES", 10)
        lines = [f'{{"id": {row}{absent}}}\n' for row in range(3)]
        (tmp_path / "p.jsonl").write_text("".join(lines) + '{"id": 3, "price": 2.5}\n{"id": 4}')

        read = list(batches(source_file(tmp_path / "p.jsonl"), ["id", "price"]))

        assert {batch.schema.field("price").type for batch in read} == {pa.float64()}
        prices = [price for batch in read for price in batch.column("price").to_pylist()]
        assert prices == [None, None, None, 2.5, None]

    @pytest.mark.parametrize(
        ("columns", "is_refused"),
        [
            (["doc.a.b", "doc.c.d"], False),
            (["doc", "doc.a.b"], True),
            (["doc.c.d", "doc.c"], True),
        ],
    )
    def test_objects_are_refused_with_their_own_fields(
        self, tmp_path: Path, columns: list[str], is_refused: bool
    ) -> None:
        (tmp_path / "p.jsonl").write_text('{"doc": {"a": {"b": 1}}, "doc.c": {"d": 2}}')

        if is_refused:
            assert "name the needed fields" in refused(tmp_path / "p.jsonl", columns)
        else:
            assert rows_in(tmp_path / "p.jsonl", columns) == [(1, 2)]

    @pytest.mark.parametrize("late", ['"x9"', "1.5"])
    def test_type_that_changes_in_a_later_block_is_named_with_its_row(
        self, tmp_path: Path, late: str
    ) -> None:
        lines = [f'{{"id": {row}, "text": "t"}}\n' for row in range(100_000)]
        lines[90_000] = f'{{"id": {late}, "text": "t"}}\n'
        (tmp_path / "p.jsonl").write_text("".join(lines))

        message = refused(tmp_path / "p.jsonl", ["id", "text"])

        assert "all ids in quotes" in message
        assert "cannot be read at row 90,000: the column 'id' is int64" in message

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('[{"id": "1"}]', "row 0 (expected one JSON object per line). Convert it, for"),
            ('{"id": 1, "text": "a"}\nnull\n', "row 1 (expected one JSON object per line)"),
            ('{"id": 1, "deep": {"text": "x"}}', "'id', 'deep', 'deep.text'"),
            ('{"id": 1, "word": "text"}', "has no column 'text'"),
            (f'{{"id": 1}}\n{{"text": {"[" * 200_000}}}', "row 1 (maximum recursion depth"),
            ('{"id": "1", "text": "a"}\n{"id": "2", "te', "row 1 (Unterminated string"),
            ('{"id": 1}\n{"id":\n2}\n', "row 1 (Expecting value"),
            ('{"id": 1}\n{"id": 2} {"id": 3}\n', "row 1 (Extra data"),
            ('{"id": 1}\n{"id": 2, "unread": NaN}\n', "row 1 (NaN is no JSON"),
            ('{"id": "1", "text": ["a"]}\n', "row 0: the column 'text' is string"),
            ('{"id": 1, "text": "a"}\n{"id": 2}\n{"id": "x3", "text": "c"}\n', "row 2: the column"),
            ('{"id": 1, "text": "x"}\n\n{"id": 18446744073709551615}\n', "row 1: the column 'id'"),
        ],
    )
    def test_file_out_of_form_is_refused(self, tmp_path: Path, text: str, reason: str) -> None:
        (tmp_path / "p.jsonl").write_text(text)

        assert reason in refused(tmp_path / "p.jsonl", ["id", "text"])
