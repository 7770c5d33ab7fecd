"""Ranges of the rows of a partition: the rows that a reading of all has there, without those in
front of them."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Partition, PartitionRange, read_rows
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import only, rows_in
from tests.engine.sources.shops import Shop
from tests.engine.sources.tables import shuffled_rows, table_of, write_csv
from tests.engine.store.object_server import ObjectServer
from tests.small_catalogs import Rows, ids_of, numbered_rows, write_rows

ROWS = numbered_rows("k", 100)
FILES = (0, 33, 33, 80, 100)  # the second one is empty


def catalog_of(
    folder: Path, rows: Rows = ROWS, selection: Selection | None = None, **options: Any
) -> Partition:
    """A partition of four files of row groups of ten rows."""
    for number, (start, stop) in enumerate(pairwise(FILES)):
        name = folder / "category=k" / f"part-{number}.parquet"
        write_rows(name, rows[start:stop], row_group_size=10, **options)
    return only(open_source(folder, selection=selection))


def read_ids(partition: Partition, start: int, stop: int) -> list[str]:
    rows = PartitionRange(partition.key, partition.source_version, start, stop)
    return ids_of(rows_in(read_rows(partition, rows)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(borders=st.sets(st.integers(0, 100), min_size=2, max_size=2), is_categorical=st.booleans())
def test_range_has_the_rows_that_a_reading_of_all_has_there(
    tmp_path_factory: pytest.TempPathFactory, borders: set[int], is_categorical: bool
) -> None:
    start, stop = sorted(borders)
    partition = catalog_of(tmp_path_factory.mktemp("any"), use_dictionary=is_categorical)
    assert read_ids(partition, start, stop) == ids_of(ROWS[start:stop])


def test_row_groups_in_front_of_a_range_and_behind_it_are_not_read(tmp_path: Path) -> None:
    partition = catalog_of(tmp_path, use_dictionary=False)
    path = tmp_path / "category=k" / "part-2.parquet"
    content, footer = bytearray(path.read_bytes()), pq.read_metadata(path)
    for group in (0, 3):  # rows 33 to 43 and 63 to 73
        place = footer.row_group(group).column(1).data_page_offset + 20
        content[place] ^= 1
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert read_ids(partition, 43, 63) == ids_of(ROWS[43:63])
    for rows in ((42, 43), (43, 64)):
        with pytest.raises(DataError, match=r"part-2.parquet cannot be read"):
            read_ids(partition, *rows)


def test_refused_row_of_a_range_is_named_by_its_place_in_the_partition(tmp_path: Path) -> None:
    partition = catalog_of(tmp_path, [*ROWS[:50], ("id-50", None), *ROWS[51:]])
    with pytest.raises(
        DataError, match=r"row 17 of category=k/part-2.parquet: the text is null"
    ) as refused:
        read_ids(partition, 45, 90)
    assert refused.value.row == 50
    assert read_ids(partition, 51, 90) == ids_of(ROWS[51:90])


@pytest.mark.parametrize("kind", ["skip", "set aside", "csv", "table"])
def test_sources_that_cannot_read_rows_alone_say_so(tmp_path: Path, kind: str) -> None:
    if kind == "skip":
        partition = catalog_of(tmp_path, selection=Selection(missing_text="skip"))
    elif kind == "set aside":
        partition = catalog_of(tmp_path, selection=Selection(bad_rows="set_aside"))
    elif kind == "csv":
        path = write_csv(tmp_path / "k.csv", [(*row, "") for row in ROWS])
        partition = only(open_source(path.parent))
    else:
        table = shuffled_rows(300, 3)
        partition = next(iter(table_of(write_csv(tmp_path / "t.csv", table))))
    assert partition.read_range is None


def test_range_of_a_file_in_a_bucket_is_requested_alone(
    tmp_path: Path, object_server: ObjectServer
) -> None:
    shop = Shop(tmp_path, object_server)
    rows = [(f"id-{row}", f"{row:04} " * 20_000) for row in range(100)]
    shop.write("category=k/part-0.parquet", rows, row_group_size=10)
    partition, requests = shop.partitions()["k"], list[int]()
    for borders in ((20, 30), (0, 100)):
        object_server.log.clear()
        assert read_ids(partition, *borders) == ids_of(rows[slice(*borders)])
        requests.append(len(object_server.log))
    assert 3 * requests[0] < requests[1], "a megabyte of ten"
