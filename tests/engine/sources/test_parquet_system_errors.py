"""Disks and mounts that do not return a file: the partition fails as transient, and no other one is
hidden."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import ROWS, only, rows_of
from tests.engine.sources.tables import versions
from tests.small_catalogs import partition_folder, write_catalog, write_partition, write_rows


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


class TestSystemErrors:
    """A disk, a mount or a missing right: nothing is known of the content, so nothing is refused
    for it."""

    @pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
    def test_system_error_is_transient(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
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
                assert "Give the user that runs this the right to read it" in str(failed.value)
        assert rows_of(partition) == ROWS

    def test_footer_that_cannot_be_read_hides_no_other_partition(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_catalog(tmp_path, {"a": ROWS, "k": ROWS, "z": ROWS})
        folder = partition_folder(tmp_path, "k")

        with monkeypatch.context() as patched:
            refuse_calls(patched, "pyarrow.OSFile", folder / "part-0.parquet", errno.EIO)
            first, unseen, last = open_source(tmp_path)
            with pytest.raises(TransientError, match=r"Input/output error\. Run again"):
                list(unseen.read())

        assert rows_of(first) == rows_of(last) == ROWS
        assert rows_of(unseen) == ROWS
        assert unseen.current_source_version() == "v1"
        assert versions(open_source(tmp_path)) == dict.fromkeys("akz", "v1")

    def test_folder_that_cannot_be_listed_ends_the_listing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is known of its partitions: they must not count as removed."""
        write_catalog(tmp_path, {"a": ROWS, "k": ROWS})
        refuse_calls(monkeypatch, "os.scandir", partition_folder(tmp_path, "k"), errno.EIO)
        with pytest.raises(ConfigError, match=r"cannot list .*Input/output error\. Make it read"):
            list(open_source(tmp_path))

    @pytest.mark.parametrize("is_removed", [False, True])
    def test_file_replaced_or_removed_before_it_is_read_is_a_transient_error(
        self, tmp_path: Path, is_removed: bool
    ) -> None:
        path = write_rows(tmp_path / "a.parquet", ROWS)
        (a,) = open_source(tmp_path)
        path.unlink() if is_removed else write_rows(path, [*ROWS, ("9", "nine")])
        with pytest.raises(
            TransientError,
            match=r"partition 'a': .*was replaced or removed while it was read\. Run again",
        ):
            list(a.read())
