"""A catalog on disk: its order, its versions, streaming in bounded memory, and folders that are no
catalog."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.parquet_files import rows_per_read
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.sources.selection import DEFAULT_MAX_TEXT_BYTES
from surge_dagster.engine.tables.opening import open_source
from tests.engine.encoder.faulty_pools import open_descriptors
from tests.engine.sources.reading import ROWS, only, partitions_of, refusal, rows_of
from tests.small_catalogs import (
    ids_of,
    numbered_rows,
    partition_folder,
    texts_of,
    write_catalog,
    write_partition,
    write_rows,
)


class TestOrder:
    def test_rows_keep_their_order_over_files_row_groups_and_batches(self, tmp_path: Path) -> None:
        rows = numbered_rows("k", 25_000)
        write_rows(
            partition_folder(tmp_path, "k") / "0.parquet", rows[:20_000], row_group_size=3_000
        )
        write_rows(partition_folder(tmp_path, "k") / "1.parquet", rows[20_000:])
        partition = only(open_source(tmp_path))
        assert partition.rows == 25_000
        assert rows_of(partition) == rows

    @pytest.mark.parametrize("empty", ["0.parquet", "2.parquet"])
    @pytest.mark.parametrize("column", ["id", "text"])
    def test_file_without_rows_states_no_type(
        self, tmp_path: Path, empty: str, column: str
    ) -> None:
        folder = partition_folder(tmp_path, "k")
        write_rows(folder / "1.parquet", [("1", "a")])
        types = {"id": pa.string(), "text": pa.string(), column: pa.float64()}
        schema = pa.schema(types)
        pq.write_table(schema.empty_table(), folder / empty)

        assert rows_of(only(open_source(tmp_path))) == [("1", "a")]


class TestStreaming:
    def test_short_rows_come_in_few_batches_of_a_bounded_number(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", [(str(n), "x") for n in range(30_000)], row_group_size=500)
        sizes = [*map(len, only(open_source(tmp_path)).read())]
        assert max(sizes) <= 8192 and len(sizes) <= 5

    @pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
    def test_rows_that_share_the_longest_text_there_may_be_are_read_few_at_a_time(
        self, tmp_path: Path, kind: pa.DataType
    ) -> None:
        texts = [
            *["x" * DEFAULT_MAX_TEXT_BYTES] * 60,
            *(f"{number:07d}" * 80 for number in range(2_000)),
        ]
        rows = [(str(number), text) for number, text in enumerate(texts)]
        write_partition(tmp_path, "k", rows, text_type=kind, compression="zstd")
        largest, most_held = sizes(only(open_source(tmp_path)))
        assert largest < 2 * DEFAULT_MAX_TEXT_BYTES
        assert most_held < 64 * 1024 * 1024

    def test_rows_of_distinct_texts_are_read_thousands_at_a_time(self, tmp_path: Path) -> None:
        path = str(
            write_partition(
                tmp_path, "k", [(str(number), f"{number:07d}" * 80) for number in range(20_000)]
            )
        )
        with pa.OSFile(path) as source, pq.ParquetFile(source) as reader:
            assert rows_per_read(reader, source, ["id", "text"], 0) > 3_000

    def test_pages_are_looked_at_only_if_they_have_dictionaries(self, tmp_path: Path) -> None:
        rows = [(str(number), f"{number:07d}" * 80) for number in range(20_000)]
        plain = write_partition(tmp_path, "plain", rows, use_dictionary=False)
        shared = write_partition(tmp_path, "shared", rows)

        assert bytes_read_to_choose_rows(plain) == 0
        assert bytes_read_to_choose_rows(shared) > 0

    def test_long_texts_that_stand_together_are_not_read_thousands_at_a_time(
        self, tmp_path: Path
    ) -> None:
        rows = [
            (str(n), f"{n:05d} " * (4_000 if 30_000 <= n < 31_000 else 1)) for n in range(60_000)
        ]
        write_partition(tmp_path, "k", rows, use_dictionary=False)
        partition = only(open_source(tmp_path))
        largest, most_held = sizes(partition)
        assert largest < 7 * 1024 * 1024
        assert most_held < partition.page_bytes

    def test_reader_that_is_dropped_early_closes_its_file(self, tmp_path: Path) -> None:
        write_partition(tmp_path, "k", numbered_rows("k", 20_000))
        reading = iter(only(open_source(tmp_path)).read())
        next(reading)
        reading.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert str(tmp_path) not in str(open_descriptors())


def bytes_read_to_choose_rows(path: Path) -> int:
    """Bytes that are read of a file to choose how many rows are read at once."""
    with CountedFile(path) as counted, pq.ParquetFile(path) as reader:
        rows_per_read(reader, pa.PythonFile(counted, "r"), ["id", "text"], 0)
        return counted.bytes_read


class CountedFile(io.FileIO):
    """A file that counts the bytes that are read of it."""

    bytes_read = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.bytes_read += len(content)
        return content


def sizes(partition: Partition) -> tuple[int, int]:
    """Bytes of the largest batch of texts of a partition, and the most that Arrow held beside each
    batch."""
    before, largest, most_held = pa.total_allocated_bytes(), 0, 0
    for batch in partition.read():
        largest = max(largest, batch.texts.nbytes)
        most_held = max(most_held, pa.total_allocated_bytes() - before)
    return largest, most_held


class TestVersions:
    @pytest.mark.parametrize("length", [250, 251, 6_000])
    @pytest.mark.parametrize("last", "ab\0\n")
    def test_declared_version_of_any_length_is_one_that_databases_keep(
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

    def test_without_a_declared_version_size_and_mtime_are_the_version(
        self, tmp_path: Path
    ) -> None:
        path = write_partition(tmp_path, "k", ROWS, version=None)
        partition = only(open_source(tmp_path))
        assert partition.source_version == f"{path.stat().st_size}-{path.stat().st_mtime_ns}"
        os.utime(path, ns=(1, 1))
        assert (
            partition.current_source_version()
            == f"{path.stat().st_size}-1"
            != partition.source_version
        )


class TestCatalogsThatCannotBeUsed:
    def test_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError,
            match=r"is empty. Expected files .* in folders named by a column",
        ):
            list(open_source(tmp_path))

    @pytest.mark.parametrize("url", ["https://example.com/x", "ftp://bucket/catalog"])
    def test_unsupported_storage_is_refused(self, url: str) -> None:
        with pytest.raises(
            ConfigError, match="expected a local path or a file:// URL, or a bucket"
        ):
            open_source(url)

    def test_file_url_works(self, tmp_path: Path) -> None:
        write_partition(tmp_path / "a catalog", "k", ROWS)
        assert rows_of(only(open_source(f"file://{tmp_path}/a%20catalog"))) == ROWS


@pytest.mark.parametrize(("id_column", "text_column"), [("sku", "title"), ("title", "title")])
def test_id_and_text_columns_of_other_names_are_read_and_may_be_one(
    tmp_path: Path, id_column: str, text_column: str
) -> None:
    write_partition(tmp_path, "k", ROWS, columns=("sku", "title"))
    partition = only(open_source(tmp_path, selection=Selection(id_column, text_column)))
    columns = {"sku": ids_of(ROWS), "title": texts_of(ROWS)}
    assert rows_of(partition) == list(zip(columns[id_column], columns[text_column], strict=True))


class TestFilesThatCannotBeRead:
    def test_flipped_bit_in_a_page_with_a_checksum_refuses_its_partition(
        self, tmp_path: Path
    ) -> None:
        rows = numbered_rows("text", 2000)
        options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        path = write_partition(tmp_path, "k", rows, **options)
        content = bytearray(path.read_bytes())
        content[content.index(b"text/1234")] ^= 1
        path.write_bytes(content)
        assert "partition=k/part-0.parquet cannot be read" in str(
            refusal(only(open_source(tmp_path)))
        )

    @pytest.mark.parametrize("part", ["pages", "footer"])
    def test_damaged_file_never_ends_the_process_and_damaged_pages_never_give_wrong_rows(
        self, tmp_path: Path, part: str
    ) -> None:
        rows = numbered_rows("text", 300)
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


class TestEntriesThatAreNotOpened:
    """Whatever stands in a partition's folder, listing and reading end, and only this partition is
    refused."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        write_rows(tmp_path / "outside" / "0.parquet", ROWS)
        return write_catalog(tmp_path / "catalog", {"a": ROWS, "m": ROWS, "z": ROWS})

    @pytest.mark.parametrize("name", ["x.parquet", "nested/x.parquet"])
    def test_only_regular_files_are_opened(self, root: Path, name: str) -> None:
        pipe = partition_folder(root, "m") / name
        pipe.parent.mkdir(exist_ok=True)
        os.mkfifo(pipe)

        refused = self.only_refused(root)

        assert "is a pipe, a socket or a device, not a regular file" in str(refusal(refused))
        assert refused.current_source_version() == refused.source_version

    @pytest.mark.parametrize(
        ("link", "target"),
        [
            ("partition=m/x.parquet", "x.parquet"),
            ("partition=m/x.parquet", "../../outside/0.parquet"),
            ("partition=m/x.parquet", "_pipe"),
            ("partition=m/x", "../../outside"),
            ("partition=n", "../outside"),
            ("partition=n", "."),
            ("partition=n", "_old"),
            ("partition=n", "removed"),
        ],
    )
    def test_link_that_is_not_followed_refuses_its_partition(
        self, root: Path, link: str, target: str
    ) -> None:
        write_rows(root / "_old" / "0.parquet", ROWS)
        os.mkfifo(partition_folder(root, "m") / "_pipe")
        (root / link).symlink_to(target)

        refused = self.only_refused(root)

        assert f"{link} is a link, and only links to files of the source" in str(refusal(refused))
        assert refused.current_source_version() == refused.source_version

    def test_links_to_files_of_the_catalog_are_read(self, root: Path, tmp_path: Path) -> None:
        (partition_folder(root, "m") / "1.parquet").symlink_to("part-0.parquet")
        (root / "latest").symlink_to("partition=z")
        (tmp_path / "alias").symlink_to("catalog")
        [_, m, _] = open_source(tmp_path / "alias")
        assert len(rows_of(m)) == 2 * len(ROWS)

    @staticmethod
    def only_refused(root: Path) -> Partition:
        """Return the partition that is not one of the three that were written whole."""
        found = partitions_of(open_source(root))
        refused = found.pop("n", None) or found.pop("m")
        for partition in found.values():
            assert rows_of(partition) == ROWS
        return refused
