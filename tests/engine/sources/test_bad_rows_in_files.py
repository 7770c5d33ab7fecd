"""Bad rows in files of each format and in tables: their numbers and places, and the other rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources import json_files
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.tables.frames import FrameCatalog, FrameTable
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import only, refusal, rows_of

NO_ID = "the id is null; every row needs one"
NO_TEXT = "the text is null; every row needs one"
REPEATED = "the id is repeated; the first row that has it is kept"
NOT_UTF8 = "the text is not valid UTF-8"
LONG = "the text has 7 bytes; at most 6 are allowed"
SETTINGS: dict[str, Any] = {"bad_rows": "set_aside", "max_text_bytes": 6}

# One bad row of each kind; the rows 0 and 5 are good.
IDS = ["a", None, "b", "c", "d", "e", "a"]
TEXTS = [b"one", b"two", None, b"caf\xe9", b"too lon", b"six", b"seven"]
REASONS = {1: NO_ID, 2: NO_TEXT, 3: NOT_UTF8, 4: LONG, 6: REPEATED}
CSV = b"id,text\na,one\n\nx\nb,caf\xe9\nc,d,e\nd,too lon\ne,six\na,again\n"
JSON = rb"""{"id": "a", "text": "one"}

{"id": "b", "text": "two
{"id": "c", "text": "\ud800"}
{"text": "no id"}
["d", "three"]
{"id": "d", "text": "too lon"}
{"id": "e"}
{"id": "f", "text": "six"}
{"id": "a", "text": "again"}
"""


def table() -> pa.Table:
    return pa.table({"id": IDS, "text": pa.array(TEXTS, pa.binary()).view(pa.string())})


def write_arrow(path: Path) -> None:
    with pa.ipc.new_file(str(path), table().schema) as writer:
        writer.write_table(table())


def not_json(problem: str) -> str:
    return f"the line is not a JSON object ({problem})"


CSV_REASONS = {
    1: "expected 2 values, got 1",
    2: NOT_UTF8,
    3: "expected 2 values, got 3",
    4: LONG,
    6: REPEATED,
}
JSON_REASONS = {
    1: not_json("Invalid control character at at character 25"),
    2: NOT_UTF8,
    3: NO_ID,
    4: not_json("expected one JSON object per line"),
    5: LONG,
    6: NO_TEXT,
    8: REPEATED,
}
FORMATS: dict[str, tuple[Callable[[Path], Any], dict[int, str], list[tuple[str, str]]]] = {
    "parquet": (lambda path: pq.write_table(table(), path), REASONS, [("a", "one"), ("e", "six")]),
    "arrow": (write_arrow, REASONS, [("a", "one"), ("e", "six")]),
    "csv": (lambda path: path.write_bytes(CSV), CSV_REASONS, [("a", "one"), ("e", "six")]),
    "jsonl": (lambda path: path.write_bytes(JSON), JSON_REASONS, [("a", "one"), ("f", "six")]),
}
every_format = pytest.mark.parametrize("ending", FORMATS)


def opened(folder: Path, **settings: Any) -> Source:
    return open_source(folder, **(SETTINGS | settings))


def reasons_of(partition: Partition) -> dict[int, str]:
    return {row.row: row.reason for batch in partition.read() for row in batch.rejected}


def places_of(partition: Partition) -> list[str]:
    return [row.place for batch in partition.read() for row in batch.rejected]


def source_rows(partition: Partition) -> int:
    return sum(each.source_rows + each.skipped + len(each.rejected) for each in partition.read())


def by_key(source: Source) -> dict[str, Partition]:
    return {partition.key: partition for partition in source}


class TestFiles:
    @every_format
    def test_bad_rows_are_named_by_their_number(self, tmp_path: Path, ending: str) -> None:
        write, reasons, _ = FORMATS[ending]
        write(tmp_path / f"k.{ending}")

        assert reasons_of(only(opened(tmp_path))) == reasons

    @every_format
    def test_the_other_rows_come(self, tmp_path: Path, ending: str) -> None:
        write, reasons, rows = FORMATS[ending]
        write(tmp_path / f"k.{ending}")

        partition = only(opened(tmp_path))

        assert rows_of(partition) == rows
        assert source_rows(partition) == len(rows) + len(reasons)

    @every_format
    def test_partition_is_refused_unless_something_is_set(
        self, tmp_path: Path, ending: str
    ) -> None:
        write, _, _ = FORMATS[ending]
        write(tmp_path / f"k.{ending}")

        with pytest.raises(DataError):
            list(only(open_source(tmp_path)).read())

    @every_format
    def test_rows_of_a_second_file_are_counted_on(self, tmp_path: Path, ending: str) -> None:
        write, reasons, rows = FORMATS[ending]
        (tmp_path / "key=k").mkdir()
        write(tmp_path / "key=k" / f"0.{ending}")
        write(tmp_path / "key=k" / f"1.{ending}")
        of_file = len(rows) + len(reasons)

        partition = only(opened(tmp_path))
        second = {row: why for row, why in reasons_of(partition).items() if row >= of_file}

        assert second.items() >= {row + of_file: why for row, why in reasons.items()}.items()
        assert [second[of_file], second[2 * of_file - 1]] == [REPEATED, REPEATED]
        assert places_of(partition)[-1] == f"row {of_file - 1} of key=k/1.{ending}"

    def test_id_of_a_row_that_cannot_be_parsed_is_unknown(self, tmp_path: Path) -> None:
        (tmp_path / "k.csv").write_bytes(CSV)

        [batch] = [batch for batch in only(opened(tmp_path)).read() if batch.rejected]

        assert [row.id for row in batch.rejected] == [None, "b", None, "d", "a"]

    def test_missing_text_does_not_skip_rows_that_cannot_be_parsed(self, tmp_path: Path) -> None:
        (tmp_path / "k.csv").write_text("id,text\na,one\nb\nc,\n")

        [batch] = [each for each in only(opened(tmp_path, missing_text="skip")).read() if len(each)]

        assert [row.row for row in batch.rejected] == [1]
        assert batch.skipped == 1

    def test_lines_that_a_quote_has_joined_are_counted(self, tmp_path: Path) -> None:
        (tmp_path / "k.csv").write_text('id,text\na,one\nb,"two\nc,three\nd,",x\ne,five\n')

        partition = only(opened(tmp_path))

        assert rows_of(partition) == [("a", "one"), ("e", "five")]
        assert reasons_of(partition) == {1: "expected 2 values, got 3 in 3 lines"}

    def test_quotes_that_are_not_closed_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "k.csv").write_text('id,text\na,one\nb,"two\nc,three\n')

        assert "unexpected end of data" in refusal(only(opened(tmp_path))).reason

    def test_json_array_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "k.json").write_text('[{"id": 1, "text": "a"},\n{"id": 2, "text": "b"}]')

        assert "jq -c" in refusal(only(opened(tmp_path))).remedy

    def test_line_that_is_too_long_is_one_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(json_files, "_LONGEST_LINE", 40)
        rows = [{"id": "a", "text": "one"}, {"id": "b", "text": "x" * 100}, {"id": "c", "text": ""}]
        (tmp_path / "k.jsonl").write_text("\n".join(map(json.dumps, rows)))

        partition = only(opened(tmp_path))

        assert rows_of(partition) == [("a", "one"), ("c", "")]
        assert list(reasons_of(partition)) == [1]

    def test_file_without_one_good_line_is_set_aside(self, tmp_path: Path) -> None:
        (tmp_path / "key=k").mkdir()
        (tmp_path / "key=k" / "0.jsonl").write_text("{\n")
        (tmp_path / "key=k" / "1.jsonl").write_text('{"id": 7, "text": "one"}\n')

        partition = only(opened(tmp_path))

        assert rows_of(partition) == [(7, "one")]
        assert list(reasons_of(partition)) == [0]

    def test_row_of_a_file_without_texts_is_set_aside(self, tmp_path: Path) -> None:
        (tmp_path / "key=k").mkdir()
        (tmp_path / "key=k" / "0.jsonl").write_text('{"id": 7, "text": null}\n')
        (tmp_path / "key=k" / "1.jsonl").write_text('{"id": 8, "text": "one"}\n')

        assert rows_of(only(opened(tmp_path))) == [(8, "one")]

    def test_every_one_of_many_bad_lines_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "k.csv").write_text("id,text\na,one\n" + "b\n" * 100_000)

        partition = only(opened(tmp_path))

        assert len(reasons_of(partition)) == 100_000


class TestTables:
    ROWS: Sequence[tuple[Any, ...]] = [
        ("1", "a", "x"),
        ("2", "b", None),
        ("1", "c", "x"),
        ("1", "d", "y"),
        (None, "e", ""),
    ]
    REASON = "the row has no key, since 'key' is null, empty or not UTF-8"

    def frame(self) -> pl.DataFrame:
        return pl.DataFrame(self.ROWS, ["id", "text", "key"], orient="row")

    def source(self, kind: str, folder: Path) -> Source:
        if kind == "frame":
            return FrameTable(self.frame(), "key", bad_rows="set_aside")
        self.frame().write_parquet(folder / "t.parquet")
        return open_source(folder / "t.parquet", partition_by="key", bad_rows="set_aside")

    @pytest.mark.parametrize("kind", ["frame", "parquet"])
    def test_rows_without_a_key_are_a_partition_without_rows(
        self, tmp_path: Path, kind: str
    ) -> None:
        listed = by_key(self.source(kind, tmp_path))

        assert list(listed) == ["unassigned", "x", "y"]
        assert rows_of(listed["unassigned"]) == []
        assert reasons_of(listed["unassigned"]) == {0: self.REASON, 1: self.REASON}
        assert listed["unassigned"].rows == 0
        assert listed["unassigned"].source_rows == 2

    @pytest.mark.parametrize("kind", ["frame", "parquet"])
    def test_other_partitions_set_aside_their_own_rows(self, tmp_path: Path, kind: str) -> None:
        listed = by_key(self.source(kind, tmp_path))

        assert rows_of(listed["x"]) == [("1", "a")]
        assert rows_of(listed["y"]) == [("1", "d")]
        assert reasons_of(listed["x"]) == {1: REPEATED}

    def test_place_is_that_in_the_file_of_the_table(self, tmp_path: Path) -> None:
        listed = by_key(self.source("parquet", tmp_path))

        assert places_of(listed["unassigned"]) == ["row 1 of t.parquet", "row 4 of t.parquet"]

    def test_key_named_like_the_partition_stays_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("id,text,key\n1,a,unassigned\n2,b,\n")
        path = tmp_path / "t.csv"

        listed = by_key(open_source(path, partition_by="key", bad_rows="set_aside"))

        assert rows_of(listed["unassigned"]) == [("1", "a")]
        assert reasons_of(listed["__HIVE_DEFAULT_PARTITION__"]) == {0: self.REASON}

    def test_line_that_cannot_be_parsed_has_no_key(self, tmp_path: Path) -> None:
        (tmp_path / "0.csv").write_text("id,text,key\n1,a,x\n2,b\n3,c,x\n")
        (tmp_path / "1.jsonl").write_text('{"id": "4", "text": "d", "key": "x"}\n{"id":\n')
        self.frame().write_parquet(tmp_path / "2.parquet")

        listed = by_key(open_source(tmp_path, partition_by="key", bad_rows="set_aside"))

        assert rows_of(listed["x"]) == [("1", "a"), ("3", "c"), ("4", "d")]
        assert list(reasons_of(listed["unassigned"]).values()) == [
            "expected 3 values, got 2",
            not_json("Expecting value at character 8"),
            self.REASON,
            self.REASON,
        ]
        assert places_of(listed["unassigned"])[:2] == ["row 1 of 0.csv", "row 1 of 1.jsonl"]

    def test_column_named_reason_may_be_the_key(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("id,text,reason\n1,a,x\n2\n")
        path = tmp_path / "t.csv"

        listed = by_key(open_source(path, partition_by="reason", bad_rows="set_aside"))

        assert list(listed) == ["unassigned", "x"]

    def test_table_is_refused_unless_something_is_set(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("id,text,key\n1,a,x\n2,b\n")

        with pytest.raises(ConfigError, match="expected 3 values, got 2"):
            list(open_source(tmp_path / "t.csv", partition_by="key"))

    def test_listing_with_another_setting_reads_the_table_again(self, tmp_path: Path) -> None:
        self.source("parquet", tmp_path)
        path = tmp_path / "t.parquet"
        refused = by_key(open_source(path, partition_by="key"))

        aside = by_key(open_source(path, partition_by="key", bad_rows="set_aside"))

        assert refused["y"].source_version != aside["y"].source_version
        assert rows_of(aside["y"]) == rows_of(refused["y"])


class TestFrames:
    def test_bad_rows_of_a_frame_are_set_aside(self) -> None:
        frame = pl.DataFrame({"id": [1, 1, None, 2], "text": ["a", "b", "c", None]})

        partition = only(FrameCatalog({"k": frame}, bad_rows="set_aside"))

        assert rows_of(partition) == [(1, "a")]
        assert reasons_of(partition) == {1: REPEATED, 2: NO_ID, 3: NO_TEXT}
