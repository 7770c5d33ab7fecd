"""A catalog with a bad row of each kind in each partition, from the source's files to `verify`."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output.rejected import list_name
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.runs import failures, finish, make_run, of_kind, receipts
from tests.engine.sources.test_bad_rows_in_files import FORMATS, SETTINGS
from tests.small_catalogs import assert_embedded

KEYS = [f"p{number}" for number in range(10)]


@pytest.fixture(params=FORMATS)
def ending(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(tmp_path: Path, ending: str) -> Source:
    """One file for each partition, in one of the formats."""
    folder = tmp_path / "catalog"
    folder.mkdir()
    write, _, _ = FORMATS[ending]
    for key in KEYS:
        write(folder / f"{key}.{ending}")
    return open_source(f"{folder}/{{key}}.{ending}", **SETTINGS)


def test_every_partition_is_published_and_each_bad_row_is_listed(
    hash_pool: EncoderPool, tmp_path: Path, source: Source, ending: str
) -> None:
    _, reasons, rows = FORMATS[ending]

    run = make_run(hash_pool, source, tmp_path / "out", bad_rows="set_aside")
    events = finish(run)

    assert failures(events) == []
    for key in KEYS:
        assert_embedded(tmp_path / "out", run.space.name, key, rows)
        table = pq.read_table(tmp_path / "out" / list_name(run.space.name, key))
        found = dict(zip(table["row"].to_pylist(), table["reason"].to_pylist(), strict=True))
        assert found == reasons


def test_output_with_rows_set_aside_is_verified_and_stays_fresh(
    hash_pool: EncoderPool, tmp_path: Path, source: Source
) -> None:
    store = open_store(tmp_path / "out")
    first = make_run(hash_pool, source, store, bad_rows="set_aside")
    finish(first)

    found = list(verify(source, store, first.space, pool=hash_pool, reencode=None))
    second = receipts(finish(make_run(hash_pool, source, store, bad_rows="set_aside")))

    assert of_kind(found, Violation) == []
    assert {receipt.action for receipt in second} == {"fresh"}
