"""Small catalogs for clusters of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from tests.cluster.local_cluster import CATALOG, MODEL, setup_in
from tests.engine.encoder.faulty_pools import no_leaks
from tests.small_catalogs import numbered_rows, partition_folder, write_catalog, write_rows

__all__ = ["no_leaks"]


@pytest.fixture
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(EncodingSpec(MODEL), devices="cpu") as pool:
        yield pool


@pytest.fixture
def setup(tmp_path: Path) -> RunSetup:
    """Of runs over `CATALOG`."""
    write_catalog(tmp_path / "catalog", CATALOG)
    return setup_in(tmp_path, divides=False)


@pytest.fixture
def giant(tmp_path: Path) -> RunSetup:
    """Of runs over a catalog with one large partition, which is divided into ranges."""
    for key, count in {"giant": 600, "a": 5, "b": 7}.items():
        path = partition_folder(tmp_path / "catalog", key) / "part-0.parquet"
        write_rows(path, numbered_rows(key, count, words=12), row_group_size=100)
    return setup_in(tmp_path)
