"""Files whose source version moved: unchanged rows are republished, and keep their version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from tests.engine.runs import finish_receipts, make_run
from tests.small_catalogs import assert_embedded, numbered_rows, partition_of

ROWS = numbered_rows("a", 3)


def rows_version(pool: EncoderPool, output: Path, version: str, action: str, **options: Any) -> str:
    """The version of the rows after a run that does this."""
    run = make_run(pool, [partition_of("a", ROWS, version=version)], output, **options)
    assert finish_receipts(run, action)
    return assert_embedded(output, run.space.name, "a", ROWS).rows_version


def test_republished_file_keeps_the_version_of_its_rows(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    first = rows_version(hash_pool, tmp_path, "v1", "encoded")
    assert rows_version(hash_pool, tmp_path, "v2", "republished") == first


def test_rows_that_are_written_again_get_a_new_version(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    first = rows_version(hash_pool, tmp_path, "v1", "encoded")
    again = rows_version(hash_pool, tmp_path, "v1", "encoded", force=True)
    assert len(first) == len(again) == 32
    assert first != again
