"""A listing that keeps footers never shows a source version that is not there any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.sources import FolderCatalog, Source
from surge_dagster.engine.support.footer_memory import forget_all
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.tables import versions
from tests.small_catalogs import (
    numbered_rows,
    write_catalog,
)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Each test begins like a new process."""
    forget_all()
    yield
    forget_all()


@pytest.fixture
def catalog(tmp_path: Path) -> FolderCatalog:
    """Three partitions of equal size, listed once."""
    root = write_catalog(tmp_path / "catalog", {key: numbered_rows(key, 3) for key in "abc"})
    source = open_source(root)
    assert isinstance(source, FolderCatalog)
    assert versions(source) == dict.fromkeys("abc", "v1")
    return source


def footers_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many footers a listing reads."""
    read: list[Path] = []
    honest = pq.read_metadata

    def counted(path: Path) -> pq.FileMetaData:
        read.append(path)
        return honest(path)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "read_metadata", counted)
        list(source)
    return len(read)


def test_footer_of_unchanged_file_is_read_once(
    catalog: FolderCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [(part.key, part.source_version, part.rows, part.text_bytes) for part in catalog]
    assert footers_read(catalog, monkeypatch) == 0
    forget_all()
    assert [
        (part.key, part.source_version, part.rows, part.text_bytes) for part in catalog
    ] == before
