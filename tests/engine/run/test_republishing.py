"""Files whose source version moved: unchanged rows are republished, and keep their version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import read_published_file
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore
from tests.engine.runs import (
    completed,
    finish,
    make_run,
    receipts,
)
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    partition_of,
)

MIB = 1024 * 1024
THRESHOLDS = Thresholds(b_min=1, b_max=1000)


def wide_rows(count: int, size: int) -> Rows:
    """Texts that hardly compress, so that a page takes twice its size."""
    letters = np.random.default_rng(count).integers(33, 127, (count, size), dtype=np.uint8)
    return [(f"id-{row}", letters[row].tobytes().decode("ascii")) for row in range(count)]


def test_file_with_damaged_footer_is_encoded_again(hash_pool: EncoderPool, tmp_path: Path) -> None:
    rows = wide_rows(3, 100)
    run = completed(make_run(hash_pool, [partition_of("wide", rows)], tmp_path))
    path = tmp_path / run.space.name / "wide.parquet"
    damaged = bytearray(path.read_bytes())
    footer = len(damaged) - 8 - int.from_bytes(damaged[-8:-4], "little")
    damaged[footer + 6 : footer + 12] = b"\xff" * 6  # in its schema
    path.write_bytes(damaged)
    with pytest.raises(InvalidFile, match="cannot be read because its footer is damaged"):
        read_published_file(LocalStore(tmp_path), f"{run.space.name}/wide.parquet")
    [receipt] = receipts(
        finish(make_run(hash_pool, [partition_of("wide", rows, version="v2")], tmp_path))
    )
    assert (receipt.action, receipt.source_version) == ("encoded", "v2")


def test_rows_version_is_kept_by_republishing_and_new_when_rows_are_written(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    rows = wide_rows(3, 100)

    def version_of(version: str, action: str, **options: Any) -> str:
        run = make_run(
            hash_pool, [partition_of("wide", rows, version=version)], tmp_path, **options
        )
        assert receipts(finish(run), action)
        return assert_embedded(tmp_path, run.space.name, "wide", rows).rows_version

    first = version_of("v1", "encoded")
    assert version_of("v2", "republished") == first
    again = version_of("v2", "encoded", force=True)
    assert len(first) == len(again) == 32 and first != again
