"""Keys of a catalog on disk: each folder stands for one key, and a folder that does not is refused
by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import ROWS, only, refusal, rows_of
from tests.small_catalogs import partition_folder, write_catalog, write_partition, write_rows


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
