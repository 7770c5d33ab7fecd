"""A catalog on disk: the same rows in the same order, streamed, with every fault found on the way in and named."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError, TransientError
from surge_dagster.engine.sources import ParquetCatalog, open_source, parquet_files
from surge_dagster.engine.sources.parquet_files import Footer
from surge_dagster.engine.sources.partition import Partition, RowBatch
from tests.small_catalogs import numbered_rows, partition_folder, write_catalog, write_partition, write_rows

ROWS = [("1", "one"), ("2", "zwei ß"), ("3", "")]


def only(catalog: ParquetCatalog) -> Partition:
    [partition] = list(catalog)
    return partition


def rows_of(partition: Partition) -> list[tuple[Any, Any]]:
    return [
        row for batch in partition.read() for row in zip(batch.ids.to_pylist(), batch.texts.to_pylist(), strict=True)
    ]


def refusal(partition: Partition) -> DataError:
    with pytest.raises(DataError) as refused:
        for _ in partition.read():
            pass
    assert refused.value.key == partition.key
    assert refused.value.remedy.endswith((".", ")."))
    return refused.value


class TestOrder:
    def test_partitions_come_in_bytewise_order_of_their_folders(self, tmp_path: Path) -> None:
        keys = ["b", "A", "a", "Köln", "0", "a/b", "..", 'Köln, "x" [1]']
        write_catalog(tmp_path, dict.fromkeys(keys, ROWS))
        found = [partition.key for partition in open_source(tmp_path)]
        assert sorted(found) == sorted(keys)
        assert found == [partition.key for partition in open_source(tmp_path)]
        assert found.index("A") < found.index("a")

    def test_files_of_a_partition_come_in_bytewise_order_of_their_relative_paths(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        for name in ["b.parquet", "a/z.parquet", "B.parquet", "a.parquet", "part-10.parquet", "part-2.parquet"]:
            write_rows(folder / name, [(name, name)])
        assert [row[0] for row in rows_of(only(open_source(tmp_path)))] == [
            "B.parquet",
            "a.parquet",
            "a/z.parquet",
            "b.parquet",
            "part-10.parquet",
            "part-2.parquet",
        ]

    def test_rows_keep_their_order_over_files_row_groups_and_batches(self, tmp_path: Path) -> None:
        rows = numbered_rows("k", 25_000)
        write_rows(partition_folder(tmp_path, "k") / "0.parquet", rows[:20_000], row_group_size=3_000)
        write_rows(partition_folder(tmp_path, "k") / "1.parquet", rows[20_000:])
        partition = only(open_source(tmp_path))
        assert partition.rows == 25_000
        assert rows_of(partition) == rows

    def test_hidden_files_and_folders_are_not_read(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", ROWS)
        for name in ["_tmp.parquet", ".x.parquet", "_old/0.parquet", ".git/0.parquet", "notes.txt"]:
            write_rows(folder / name, [("9", "nine")])
        (tmp_path / "_SUCCESS").touch()
        (tmp_path / ".partition=x").mkdir()
        assert rows_of(only(open_source(tmp_path))) == ROWS

    def test_a_partition_can_be_read_again(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", ROWS)
        partition = only(open_source(tmp_path))
        assert rows_of(partition) == rows_of(partition) == ROWS


class TestStreaming:
    def test_a_partition_is_never_whole_in_memory(self, tmp_path: Path) -> None:
        rows = [(str(n), f"{n:07d}" * 300) for n in range(20_000)]  # 42 MB in one row group
        write_partition(tmp_path, "k", rows, row_group_size=len(rows), use_dictionary=False)
        sizes = [batch.ids.nbytes + batch.texts.nbytes for batch in only(open_source(tmp_path)).read()]
        assert len(sizes) > 15
        assert max(sizes) < 3 * 1024 * 1024

    def test_short_rows_come_in_batches_of_a_bounded_number(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [(str(n), "x") for n in range(30_000)])
        assert max(len(batch) for batch in only(open_source(tmp_path)).read()) <= 8192

    @pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
    def test_a_text_that_a_dictionary_holds_once_is_not_written_out_for_thousands_of_rows(
        self, tmp_path: Path, kind: pa.DataType
    ) -> None:
        rows = [(str(n), "boilerplate " * 2_000) for n in range(6_000)]  # 144 MB, in a file of a hundred kilobytes
        path = write_partition(tmp_path, "k", rows, text_type=kind)
        assert path.stat().st_size < 200_000
        sizes = [batch.texts.nbytes for batch in only(open_source(tmp_path)).read()]
        assert max(sizes) < 7 * 1024 * 1024

    def test_long_texts_that_stand_together_are_not_read_thousands_at_a_time(self, tmp_path: Path) -> None:
        rows = [(str(n), f"{n:05d} " * (4_000 if 30_000 <= n < 31_000 else 1)) for n in range(60_000)]
        write_partition(tmp_path, "k", rows, use_dictionary=False)
        partition = only(open_source(tmp_path))
        assert max(batch.texts.nbytes for batch in partition.read()) < 7 * 1024 * 1024

    def test_batches_are_worth_the_steps_to_come_beside_columns_that_are_not_read(self, tmp_path: Path) -> None:
        path = write_partition(tmp_path, "k", numbered_rows("k", 2_000))
        table = pq.read_table(path).append_column("image", [[bytes(20_000)] * 2_000])
        pq.write_table(table, path, use_dictionary=False)
        assert [len(batch) for batch in only(open_source(tmp_path)).read()] == [2_000]

    def test_a_reader_that_is_dropped_early_closes_its_file(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", numbered_rows("k", 20_000))
        reading = iter(only(open_source(tmp_path)).read())
        next(reading)
        reading.close()  # pyright: ignore[reportAttributeAccessIssue]
        targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]  # noqa: PTH115, PTH208
        assert not [target for target in targets if target.startswith(str(tmp_path))]


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")  # the one of the listing itself is gone


class TestVersions:
    def test_a_declared_version_is_the_source_version(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", ROWS, version="torch 2.13.0")
        partition = only(open_source(tmp_path))
        assert partition.source_version == partition.current_source_version() == "torch 2.13.0"

    @pytest.mark.parametrize("length", [250, 251, 6_000])
    @pytest.mark.parametrize("last", "ab\0\n")
    def test_a_declared_version_of_any_length_is_one_that_databases_keep(
        self, tmp_path: Path, length: int, last: str
    ) -> None:
        declared = "v" * (length - 1) + last
        write_partition(tmp_path, "k", ROWS, version=declared)
        write_partition(tmp_path, "other", ROWS, version="v" * (length - 1) + "c")
        partition, other = open_source(tmp_path)
        version = partition.source_version
        assert version == partition.current_source_version() != other.source_version
        assert (version == declared) is (length == 250 and last.isprintable())
        assert version.isprintable() and len(version) <= 250

    def test_without_a_declared_version_size_and_mtime_are(self, tmp_path: Path) -> None:
        path = write_partition(tmp_path, "k", ROWS, version=None)
        partition = only(open_source(tmp_path))
        assert partition.source_version == f"{path.stat().st_size}-{path.stat().st_mtime_ns}"
        os.utime(path, ns=(1, 1))
        assert partition.current_source_version() == f"{path.stat().st_size}-1" != partition.source_version

    def test_with_several_files_a_change_of_any_one_changes_the_version(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", ROWS, version="a")
        write_rows(folder / "1.parquet", ROWS, version="b")
        partition = only(open_source(tmp_path))
        seen = {partition.source_version}
        write_rows(folder / "1.parquet", ROWS, version="c")
        seen.add(partition.current_source_version() or "")
        write_rows(folder / "2.parquet", ROWS, version="d")
        seen.add(partition.current_source_version() or "")
        (folder / "0.parquet").unlink()
        seen.add(partition.current_source_version() or "")
        assert len(seen) == 4

    @pytest.mark.parametrize("files", [1, 2])
    def test_columns_of_other_names_are_part_of_the_version(self, tmp_path: Path, files: int) -> None:
        for number in range(files):
            write_rows(partition_folder(tmp_path, "k") / f"{number}.parquet", ROWS, version="v1")
        plain = only(open_source(tmp_path, id_column="id", text_column="text")).source_version
        for id_column, text_column, named in [
            ("sku", "text", "?id_column=sku"),
            ("id", "Größe & Preis", "?text_column=Gr%C3%B6%C3%9Fe+%26+Preis"),
            ("sku", "title", "?id_column=sku&text_column=title"),
        ]:
            partition = only(open_source(tmp_path, id_column=id_column, text_column=text_column))
            assert partition.source_version == partition.current_source_version() == plain + named

    def test_partition_removed_from_the_source_has_no_version(self, tmp_path: Path) -> None:
        path = write_partition(tmp_path, "k", ROWS)
        partition = only(open_source(tmp_path))
        path.unlink()
        path.parent.rmdir()
        assert partition.current_source_version() is None

    def test_rows_and_bytes_are_known_without_reading(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [(str(n), "x" * 100) for n in range(1000)], use_dictionary=False)
        partition = only(open_source(tmp_path))
        assert partition.rows == 1000
        assert partition.text_bytes == pytest.approx(100_000, rel=0.2)


class TestCatalogsThatCannotBeUsed:
    def test_a_missing_folder_is_refused_with_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no catalog at .*missing.* catalog demo --out"):
            open_source(tmp_path / "missing")

    def test_an_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"is empty: expected folders named partition=<key>.*found none"):
            list(open_source(tmp_path))

    def test_loose_files_are_named(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "a.parquet", ROWS)
        write_rows(tmp_path / "b.parquet", ROWS)
        with pytest.raises(ConfigError, match=r"found 2 Parquet file\(s\) outside such folders"):
            list(open_source(tmp_path))

    @pytest.mark.parametrize("url", ["gs://bucket/catalog", "s3://bucket", "https://example.com/x"])
    def test_storage_that_is_not_supported_is_refused_in_words(self, url: str) -> None:
        with pytest.raises(ConfigError, match="expected a local path or a file:// URL"):
            open_source(url)

    @pytest.mark.parametrize("scheme", ["", "file://"])
    def test_a_path_that_is_not_utf8_is_refused(self, tmp_path: Path, scheme: str) -> None:
        with pytest.raises(ConfigError, match=r"caf%E9': the path is not UTF-8\. Rename it"):
            open_source(f"{scheme}{tmp_path}/" + os.fsdecode(b"caf\xe9"))

    def test_a_file_url_works(self, tmp_path: Path) -> None:
        write_partition(tmp_path / "a catalog", "k", ROWS)
        assert rows_of(only(open_source(f"file://{tmp_path}/a%20catalog"))) == ROWS


class TestRefusedRows:
    @pytest.mark.parametrize(("column", "row"), [("text", ("4", None)), ("id", (None, "four"))])
    def test_a_null_is_named_with_its_row(self, tmp_path: Path, column: str, row: tuple[Any, Any]) -> None:
        write_partition(tmp_path, "k", [*ROWS, row, ("5", "five")])
        found = refusal(only(open_source(tmp_path)))
        assert found.row == 3
        assert str(found).startswith(f"partition 'k', row 3: the {column} is null")

    def test_the_row_counts_from_the_start_of_the_partition(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", numbered_rows("k", 10_000))
        write_rows(folder / "1.parquet", [*numbered_rows("k", 9_000), ("x", None)], row_group_size=500)
        assert refusal(only(open_source(tmp_path))).row == 19_000

    def test_a_text_column_of_nothing_but_nulls_is_named_at_its_first_row(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [("1", None), ("2", None)], text_type=pa.null())
        assert refusal(only(open_source(tmp_path))).row == 0

    def test_a_text_of_ten_megabytes_is_named_with_its_size(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [*ROWS, ("4", "x" * 10_000_000)])
        found = refusal(only(open_source(tmp_path)))
        assert found.row == 3
        assert "the text has 10,000,000 bytes; at most 4,194,304 are allowed" in str(found)

    def test_a_text_of_ten_megabytes_passes_where_that_is_allowed(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [("1", "x" * 10_000_000)])
        [(_, text)] = rows_of(only(open_source(tmp_path, max_text_bytes=10_000_000)))
        assert len(text) == 10_000_000

    @pytest.mark.parametrize("column", ["id", "text"])
    def test_bytes_that_are_not_utf8_are_named_with_their_row(self, tmp_path: Path, column: str) -> None:
        good = pa.array(["a", "b", "c"])
        bad = pa.array([b"a", b"b", b"\xff\xfe"]).view(pa.string())
        path = partition_folder(tmp_path, "k") / "0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(
            pa.table({"id": bad if column == "id" else good, "text": bad if column == "text" else good}), path
        )
        found = refusal(only(open_source(tmp_path)))
        assert found.row == 2
        assert f"the {column} is not valid UTF-8" in str(found)


class TestTypes:
    @pytest.mark.parametrize(
        ("kind", "values", "canonical"),
        [
            (pa.string(), ["1", "2", "3"], pa.string()),
            (pa.large_string(), ["1", "2", "3"], pa.string()),
            (pa.dictionary(pa.int32(), pa.string()), ["1", "2", "1"], pa.string()),
            (pa.int64(), [1, -2, 2**62], pa.int64()),
            (pa.int32(), [1, -2, 3], pa.int64()),
            (pa.uint8(), [1, 2, 255], pa.int64()),
            (pa.uint64(), [1, 2, 2**63 - 1], pa.int64()),
            (pa.binary(), [b"\x00", b"\xff", b""], pa.binary()),
            (pa.large_binary(), [b"\x00", b"\xff", b""], pa.binary()),
            (pa.binary(2), [b"\x00\x01", b"\xff\xff", b"ab"], pa.binary()),
        ],
    )
    def test_ids_of_every_supported_type_keep_their_values(
        self, tmp_path: Path, kind: pa.DataType, values: list[Any], canonical: pa.DataType
    ) -> None:
        write_partition(tmp_path, "k", [(value, "t") for value in values], id_type=kind)
        batches = list(only(open_source(tmp_path)).read())
        assert {batch.ids.type for batch in batches} == {canonical}
        assert [value for batch in batches for value in batch.ids.to_pylist()] == values

    @pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
    def test_texts_of_every_string_type_are_read(self, tmp_path: Path, kind: pa.DataType) -> None:
        write_partition(tmp_path, "k", ROWS, text_type=kind)
        [batch] = list(only(open_source(tmp_path)).read())
        assert batch.texts.type == pa.large_string()
        assert batch.texts.to_pylist() == [row[1] for row in ROWS]

    def test_an_id_beyond_int64_is_refused(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [(2**63, "t")], id_type=pa.uint64())
        assert "does not fit in int64" in str(refusal(only(open_source(tmp_path))))

    @pytest.mark.parametrize(
        ("column", "types"),
        [("id", {"id_type": pa.float64()}), ("text", {"text_type": pa.int64()})],
    )
    def test_another_type_is_refused_by_name(self, tmp_path: Path, column: str, types: dict[str, pa.DataType]) -> None:
        write_partition(tmp_path, "k", [(1, 1)], **{"id_type": pa.int64(), "text_type": pa.string(), **types}) if (
            column == "text"
        ) else write_partition(tmp_path, "k", [(1.0, "t")], **types)
        assert f"the {column} column has type" in str(refusal(only(open_source(tmp_path))))

    def test_files_whose_ids_differ_in_type_are_refused(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", ROWS)
        write_rows(folder / "1.parquet", [(1, "t")], id_type=pa.int64())
        assert "ids are string in 0.parquet but int64 in 1.parquet" in str(refusal(only(open_source(tmp_path))))


class TestColumns:
    def test_column_names_are_free(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", ROWS, columns=("sku", "title"))
        assert rows_of(only(open_source(tmp_path, id_column="sku", text_column="title"))) == ROWS

    def test_one_column_can_be_both(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", ROWS)
        partition = only(open_source(tmp_path, id_column="text"))
        assert rows_of(partition) == [(row[1], row[1]) for row in ROWS]

    def test_a_missing_column_is_named_beside_those_there_are(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", ROWS, columns=("sku", "title"))
        message = str(refusal(only(open_source(tmp_path, id_column="sku"))))
        assert "has no column 'text'; its columns are 'sku', 'title'" in message
        assert "Name the right ones with id_column and text_column." in message

    def test_two_columns_of_one_name_are_refused(self, tmp_path: Path) -> None:
        path = partition_folder(tmp_path, "k") / "0.parquet"
        path.parent.mkdir(parents=True)
        column = pa.array(["x"])
        pq.write_table(pa.Table.from_arrays([column] * 3, names=["id", "text", "text"]), path)
        assert "has two columns 'text'" in str(refusal(only(open_source(tmp_path))))


class TestFilesThatCannotBeRead:
    def test_a_file_that_is_not_parquet(self, tmp_path: Path) -> None:
        path = partition_folder(tmp_path, "k") / "0.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"not parquet at all, but long enough to be looked at")
        assert "0.parquet cannot be read as Parquet" in str(refusal(only(open_source(tmp_path))))

    @pytest.mark.parametrize("left", [0, 3, 100, -1])
    def test_a_truncated_file(self, tmp_path: Path, left: int) -> None:
        path = write_partition(tmp_path, "k", numbered_rows("k", 500))
        path.write_bytes(path.read_bytes()[:left])
        assert "cannot be read as Parquet" in str(refusal(only(open_source(tmp_path))))

    def test_a_flipped_bit_in_a_page_with_a_checksum(self, tmp_path: Path) -> None:
        rows = [(f"{n}", f"text {n}") for n in range(2000)]
        options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        path = write_partition(tmp_path, "k", rows, **options)
        content = bytearray(path.read_bytes())
        content[content.index(b"text 1234")] ^= 1
        path.write_bytes(content)
        assert "cannot be read as Parquet" in str(refusal(only(open_source(tmp_path))))

    @pytest.mark.parametrize("part", ["pages", "footer"])
    def test_a_damaged_file_never_ends_the_process_and_damaged_pages_never_give_wrong_rows(
        self, tmp_path: Path, part: str
    ) -> None:
        rows = [(f"{n}", f"text {n}") for n in range(300)]
        path = write_partition(tmp_path, "k", rows, write_page_checksum=True)
        good = path.read_bytes()
        footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        places = range(footer) if part == "pages" else range(footer, len(good))
        chance = random.Random(7)
        refused = 0
        for _ in range(150):
            damaged = bytearray(good)
            damaged[chance.choice(places)] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            try:
                found = rows_of(only(open_source(tmp_path)))
                assert part == "footer" or found == rows
            except SurgeError:
                refused += 1
        assert refused > 50

    def test_file_removed_during_reading_is_a_transient_failure(self, tmp_path: Path) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "0.parquet", numbered_rows("k", 10))
        gone = write_rows(folder / "1.parquet", numbered_rows("k", 10))
        reading = iter(only(open_source(tmp_path)).read())
        next(reading)
        gone.unlink()
        with pytest.raises(TransientError, match=r"1\.parquet was removed while the partition was read"):
            next(reading)

    def test_damaged_partition_hides_no_other_one(self, tmp_path: Path) -> None:
        write_catalog(tmp_path, {"a": ROWS, "z": ROWS})
        bad = partition_folder(tmp_path, "m") / "0.parquet"
        bad.parent.mkdir()
        bad.write_bytes(b"nonsense")
        assert [partition.key for partition in open_source(tmp_path)] == ["a", "m", "z"]


def refuse_calls(monkeypatch: pytest.MonkeyPatch, call: str, path: Path, code: int) -> None:
    """Let a call raise the system's error for one path."""
    module, _, name = call.rpartition(".")
    [owner] = [known for known in (os, pq, pa) if known.__name__ == module]
    original = getattr(owner, name)

    def refuse(target: Any, *args: Any, **options: Any) -> Any:
        if str(target) == str(path):
            raise OSError(code, os.strerror(code))
        return original(target, *args, **options)

    monkeypatch.setattr(owner, name, refuse)


class TestWhatTheSystemDoesNotGive:
    """A disk, a mount or a missing right: nothing is known of the content, so nothing is refused for it."""

    @pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
    def test_system_error_is_transient(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        path = write_partition(tmp_path, "k", ROWS)
        partition = only(open_source(tmp_path))
        with monkeypatch.context() as patched:
            refuse_calls(patched, "pyarrow.OSFile", path, code)
            with pytest.raises(
                TransientError, match=rf"partition 'k': .*{os.strerror(code)}\. .*[Rr]un again"
            ) as failed:
                list(partition.read())
            assert failed.value.key == "k"
            if code == errno.EACCES:
                assert "Give whoever runs this the right to read it" in str(failed.value)
        assert rows_of(partition) == ROWS

    @pytest.mark.parametrize("call", ["os.scandir", "os.stat", "pyarrow.OSFile"])
    @pytest.mark.parametrize("key", ["k", "x" * 300])
    def test_system_error_during_a_listing_hides_no_other_partition(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, key: str
    ) -> None:
        write_catalog(tmp_path, {"a": ROWS, key: ROWS, "z": ROWS})
        folder = partition_folder(tmp_path, key)
        with monkeypatch.context() as patched:
            refuse_calls(patched, call, folder if call == "os.scandir" else folder / "part-0.parquet", errno.EIO)
            first, unseen, last = open_source(tmp_path)
            with pytest.raises(TransientError, match="Input/output error"):
                unseen.current_source_version()
        assert rows_of(first) == rows_of(last) == ROWS
        assert unseen.key == folder.name.removeprefix("partition=")
        assert unseen.current_source_version() == "v1" != unseen.source_version, "it is nobody's newer one"
        with pytest.raises(TransientError, match=r"Input/output error\. Run again when its storage answers\."):
            list(unseen.read())
        assert [partition.key for partition in open_source(tmp_path)] == ["a", key, "z"]

    def test_link_to_itself_is_a_transient_failure(self, tmp_path: Path) -> None:
        path = write_partition(tmp_path, "k", ROWS)
        (path.parent / "1.parquet").symlink_to("1.parquet")
        with pytest.raises(TransientError, match=r"1\.parquet could not be read: Too many levels of symbolic links"):
            list(only(open_source(tmp_path)).read())


class TestNoRows:
    @pytest.mark.parametrize("kind", [pa.string(), pa.int64()])
    def test_a_partition_without_rows_gives_one_empty_batch_that_knows_its_types(
        self, tmp_path: Path, kind: pa.DataType
    ) -> None:
        write_partition(tmp_path, "k", [], id_type=kind)
        partition = only(open_source(tmp_path))
        [batch] = list(partition.read())
        assert partition.rows == len(batch) == 0
        assert (batch.ids.type, batch.texts.type) == (kind, pa.large_string())

    def test_pipe_with_the_name_of_a_file_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(write_partition(tmp_path, "k", ROWS).with_name("pipe.parquet"))
        assert rows_of(only(open_source(tmp_path))) == ROWS

    def test_a_folder_without_files_is_refused(self, tmp_path: Path) -> None:
        partition_folder(tmp_path, "k").mkdir()
        partition = only(open_source(tmp_path))
        assert "holds no .parquet file" in str(refusal(partition))
        assert partition.current_source_version() == partition.source_version, "it did not change, it is wrong"


class TestKeys:
    @pytest.mark.parametrize("key", ["a/b", "..", 'Köln, "x" [1]', "x" * 300, "~", " "])
    def test_awkward_keys_come_back_from_their_folders(self, tmp_path: Path, key: str) -> None:
        write_partition(tmp_path, key, ROWS)
        partition = only(open_source(tmp_path))
        assert partition.key == key
        assert rows_of(partition) == ROWS

    def test_upper_and_lower_case_are_two_partitions(self, tmp_path: Path) -> None:
        write_catalog(tmp_path, {"A": [("1", "upper")], "a": [("1", "lower")]})
        assert {p.key: rows_of(p) for p in open_source(tmp_path)} == {"A": [("1", "upper")], "a": [("1", "lower")]}

    def test_folders_that_another_writer_escaped_less_are_read(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "partition=Köln x.y" / "0.parquet", ROWS)
        assert only(open_source(tmp_path)).key == "Köln x.y"

    def test_two_folders_for_one_key_are_refused_together(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "partition=a b" / "0.parquet", ROWS)
        write_rows(tmp_path / "partition=a%20b" / "0.parquet", ROWS)
        message = str(refusal(only(open_source(tmp_path))))
        assert "the folders partition=a b, partition=a%20b all stand for this key" in message

    def test_a_file_that_belongs_to_another_partition_is_refused(self, tmp_path: Path) -> None:
        write_rows(partition_folder(tmp_path, "k") / "0.parquet", ROWS, key="other")
        message = str(refusal(only(open_source(tmp_path))))
        assert "0.parquet declares that it belongs to partition 'other'" in message
        assert "lies in the folder partition=k" in message

    def test_a_long_key_that_no_file_declares_is_refused_under_its_folders_name(self, tmp_path: Path) -> None:
        path = write_rows(partition_folder(tmp_path, "x" * 300) / "0.parquet", ROWS)
        partition = only(open_source(tmp_path))
        assert partition.key == path.parent.name.removeprefix("partition=")
        assert "is a hash and 0.parquet does not declare the key" in str(refusal(partition))

    def test_a_long_key_that_is_declared_wrongly_is_refused(self, tmp_path: Path) -> None:
        write_rows(partition_folder(tmp_path, "x" * 300) / "0.parquet", ROWS, key="y" * 300)
        assert "declares that it belongs to partition 'yyy" in str(refusal(only(open_source(tmp_path))))

    def test_a_long_key_whose_files_are_hidden_for_a_moment_is_never_another_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_rows(partition_folder(tmp_path, "x" * 300) / "0.parquet", ROWS, key="x" * 300)
        catalog, honest, fails = open_source(tmp_path), parquet_files._footer, iter([True])

        def hidden_once(path: str) -> Footer:
            if next(fails, False):
                raise OSError(errno.EMFILE, "Too many open files")
            return honest(path)

        monkeypatch.setattr(parquet_files, "_footer", hidden_once)
        hidden = only(catalog)
        with pytest.raises(TransientError, match="could not be read: Too many open files"):
            rows_of(hidden)
        for _ in range(2):
            seen = only(catalog)
            assert seen.key == "x" * 300 and seen.source_version != hidden.source_version and rows_of(seen) == ROWS

    @pytest.mark.parametrize("folder", ["partition=", "partition=%FF"])
    def test_a_folder_whose_name_is_no_key_is_refused_under_the_name_on_disk(self, tmp_path: Path, folder: str) -> None:
        write_rows(tmp_path / folder / "0.parquet", ROWS)
        partition = only(open_source(tmp_path))
        assert partition.key in folder
        refusal(partition)

    def test_a_folder_whose_name_is_not_utf8_is_refused_under_a_name_that_can_be_written_anywhere(
        self, tmp_path: Path
    ) -> None:
        write_catalog(tmp_path, {"a": ROWS, "z": ROWS})
        write_rows(tmp_path / "k" / "0.parquet", ROWS).parent.rename(tmp_path / os.fsdecode(b"partition=caf\xe9"))
        first, bad, last = open_source(tmp_path)
        assert [first.key, bad.key, last.key] == ["a", "caf%E9", "z"]
        assert rows_of(first) == rows_of(last) == ROWS
        assert bad.current_source_version() == bad.source_version, "it did not change, it is wrong"
        message = str(refusal(bad))
        assert "partition name 'caf%E9' is not UTF-8. Rename the folder" in message
        assert bad.key.isascii() and message.isascii()

    @pytest.mark.parametrize(
        ("name", "shown"), [(b"caf\xe9.parquet", "caf%E9.parquet"), (b"caf\xe9/0.parquet", "caf%E9/0.parquet")]
    )
    def test_a_file_whose_name_is_not_utf8_is_refused_beside_others(
        self, tmp_path: Path, name: bytes, shown: str
    ) -> None:
        write_partition(tmp_path, "k", ROWS)
        path = partition_folder(tmp_path, "k") / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        write_rows(tmp_path / "0.parquet", ROWS).rename(path)
        partition = only(open_source(tmp_path))
        assert partition.current_source_version() == partition.source_version
        message = str(refusal(partition))
        assert f"the file name {shown} is not UTF-8. Rename the file." in message
        assert message.isascii()


def test_batches_carry_what_the_engine_expects(tmp_path: Path) -> None:
    write_partition(tmp_path, "k", ROWS)
    [batch] = list(only(open_source(tmp_path)).read())
    assert isinstance(batch, RowBatch)
    assert batch.texts.type == pa.large_string()
    assert batch.ids.null_count == batch.texts.null_count == 0
