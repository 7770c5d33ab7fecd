"""A run does what its caller has decided, and does not decide again."""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output.freshness import Freshness
from tests.engine.runs import finish, finish_receipts, make_run
from tests.small_catalogs import numbered_rows, partition_of


def test_partition_that_its_caller_takes_for_missing_is_encoded(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    partitions = [partition_of(key, numbered_rows(key, 3)) for key in "ab"]
    finish(make_run(hash_pool, partitions, tmp_path))
    freshness = dict.fromkeys("ab", Freshness("missing"))

    run = make_run(hash_pool, partitions, tmp_path, freshness=freshness)
    assert [receipt.action for receipt in finish_receipts(run)] == ["encoded", "encoded"]
