"""Rows and keys of a catalog on disk: every supported type is read, a row that cannot be embedded
is refused by number, and a folder that stands for no key by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.partition import read_rows
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import ROWS, only, refusal, rows_of
from tests.small_catalogs import (
    partition_folder,
    texts_of,
    write_catalog,
    write_partition,
    write_rows,
)


class TestRefusedRows:
    @pytest.mark.parametrize(("column", "row"), [("text", ("4", None)), ("id", (None, "four"))])
    def test_null_is_named_with_its_row(
        self, tmp_path: Path, column: str, row: tuple[Any, Any]
    ) -> None:
        write_partition(tmp_path, "k", [*ROWS, row, ("5", "five")])
        found = refusal(only(open_source(tmp_path)))
        assert found.row == 3
        assert str(found).startswith(f"partition 'k', row 3: the {column} is null")

    def test_text_column_of_nothing_but_nulls_is_named_at_its_first_row(
        self, tmp_path: Path
    ) -> None:
        write_partition(tmp_path, "k", [("1", None), ("2", None)], text_type=pa.null())
        assert refusal(only(open_source(tmp_path))).row == 0

    def test_text_of_ten_megabytes_is_named_with_its_size_unless_it_is_allowed(
        self, tmp_path: Path
    ) -> None:
        rows = [*ROWS, ("4", "x" * 10_000_000)]
        write_partition(tmp_path, "k", rows)
        found = refusal(only(open_source(tmp_path)))
        assert found.row == 3
        assert "the text has 10,000,000 bytes; at most 4,194,304 are allowed" in str(found)
        assert (
            rows_of(only(open_source(tmp_path, selection=Selection(max_text_bytes=10_000_000))))
            == rows
        )

    @pytest.mark.parametrize("column", ["id", "text"])
    def test_bytes_that_are_not_utf8_are_named_with_their_row(
        self, tmp_path: Path, column: str
    ) -> None:
        good = pa.array(["a", "b", "c"])
        bad = pa.array([b"a", b"b", b"\xff\xfe"]).view(pa.string())
        path = partition_folder(tmp_path, "k") / "0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(
            pa.table(
                {"id": bad if column == "id" else good, "text": bad if column == "text" else good}
            ),
            path,
        )
        found = refusal(only(open_source(tmp_path)))
        assert found.row == 2
        assert f"the {column} is not valid UTF-8" in str(found)


class TestTypes:
    @pytest.mark.parametrize(
        ("kind", "values", "canonical"),
        [
            (pa.string(), ["1", "2", "3"], pa.string()),
            (pa.dictionary(pa.int32(), pa.string()), ["1", "2", "1"], pa.string()),
            (pa.int32(), [1, -2, 3], pa.int64()),
            (pa.uint64(), [1, 2, 2**63 - 1], pa.int64()),
            (pa.binary(), [b"\x00", b"\xff", b""], pa.binary()),
            (pa.binary(2), [b"\x00\x01", b"\xff\xff", b"ab"], pa.binary()),
        ],
    )
    def test_ids_of_every_supported_type_keep_their_values(
        self, tmp_path: Path, kind: pa.DataType, values: list[Any], canonical: pa.DataType
    ) -> None:
        write_partition(tmp_path, "k", [(value, "t") for value in values], id_type=kind)
        [batch] = only(open_source(tmp_path)).read()
        assert batch.ids.type == canonical
        assert batch.ids.to_pylist() == values

    @pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
    def test_texts_of_every_string_type_are_read(self, tmp_path: Path, kind: pa.DataType) -> None:
        write_partition(tmp_path, "k", ROWS, text_type=kind)
        [batch] = list(only(open_source(tmp_path)).read())
        assert batch.texts.type == pa.large_string()
        assert batch.texts.to_pylist() == texts_of(ROWS)

    @pytest.mark.parametrize(
        ("column", "row", "types"),
        [
            ("id", (1.0, "t"), {"id_type": pa.float64()}),
            ("text", ("1", 1), {"text_type": pa.int64()}),
        ],
    )
    def test_another_type_is_refused_by_name(
        self, tmp_path: Path, column: str, row: tuple[Any, Any], types: dict[str, pa.DataType]
    ) -> None:
        write_partition(tmp_path, "k", [row], **types)
        assert f"the {column} column has type" in str(refusal(only(open_source(tmp_path))))

    def test_files_whose_ids_differ_in_type_are_refused(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", ROWS)
        write_rows(folder / "1.parquet", [(1, "t")], id_type=pa.int64())
        reason = r"row 0 of partition=k/1.parquet: the column 'id' has type int64 from this row on"

        with pytest.raises(DataError, match=reason):
            list(read_rows(only(open_source(tmp_path))))

    def test_ids_of_another_type_are_refused_if_all_their_rows_are_skipped(
        self, tmp_path: Path
    ) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", ROWS)
        write_rows(folder / "1.parquet", [(1, None)], id_type=pa.int64())
        partition = only(open_source(tmp_path, selection=Selection(missing_text="skip")))

        with pytest.raises(DataError, match="the column 'id' has type int64 from this row on"):
            list(read_rows(partition))


@pytest.mark.parametrize("column", ["id", "text"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_column_whose_values_begin_outside_of_its_data_is_refused(
    column: str, kind: pa.DataType
) -> None:
    offsets = np.array([0, 1, 1 << 30, 3], np.int32 if pa.types.is_string(kind) else np.int64)
    damaged = pa.Array.from_buffers(kind, 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"abc")])
    whole = pa.array(["a", "b", "c"])
    columns = {"id": whole, "text": whole, column: damaged}
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    with pytest.raises(DataError, match=f"the {column} column is damaged"):
        list(checked_rows(Selection(), "k", [batch]))


class TestKeys:
    @pytest.mark.parametrize("folder", ["partition=", "partition=%FF"])
    def test_folder_with_invalid_key_is_refused_under_its_name_on_disk(
        self, tmp_path: Path, folder: str
    ) -> None:
        write_rows(tmp_path / folder / "0.parquet", ROWS)
        partition = only(open_source(tmp_path))
        assert partition.key in folder
        refusal(partition)

    def test_folder_whose_name_is_not_utf8_is_refused_under_a_name_that_can_be_written_anywhere(
        self, tmp_path: Path
    ) -> None:
        write_catalog(tmp_path, {"a": ROWS, "z": ROWS})
        write_rows(tmp_path / "k" / "0.parquet", ROWS).parent.rename(
            tmp_path / os.fsdecode(b"partition=caf\xe9")
        )
        first, bad, last = open_source(tmp_path)
        assert [first.key, bad.key, last.key] == ["a", "caf%E9", "z"]
        assert rows_of(first) == rows_of(last) == ROWS
        assert bad.current_source_version() == bad.source_version, "it did not change, it is wrong"
        message = str(refusal(bad))
        assert "partition name 'caf%E9' is not UTF-8. Rename it" in message
        assert bad.key.isascii() and message.isascii()

    @pytest.mark.parametrize(
        ("name", "shown"),
        [(b"caf\xe9.parquet", "caf%E9.parquet"), (b"caf\xe9/0.parquet", "caf%E9/0.parquet")],
    )
    def test_file_whose_name_is_not_utf8_is_refused_beside_others(
        self, tmp_path: Path, name: bytes, shown: str
    ) -> None:
        write_partition(tmp_path, "k", ROWS)
        path = partition_folder(tmp_path, "k") / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        write_rows(tmp_path / "0.parquet", ROWS).rename(path)
        partition = only(open_source(tmp_path))
        assert partition.current_source_version() == partition.source_version
        message = str(refusal(partition))
        assert f"partition=k/{shown} has a name that is not UTF-8" in message
        assert message.isascii()
