"""Files whose source version moved: unchanged rows are republished, and keep their version."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from tests.engine.runs import finish, make_run, receipts
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, partition_of


@pytest.mark.parametrize("rows", [numbered_rows("a", 45), [], numbered_rows("a", 250)])
def test_equal_content_under_a_new_version_is_republished_and_not_encoded(
    hash_pool: EncoderPool, tmp_path: Path, rows: Rows
) -> None:
    [first] = receipts(finish(make_run(hash_pool, [partition_of("a", rows)], tmp_path)))
    before = assert_embedded(tmp_path, hash_pool.space.name, "a", rows)

    run = make_run(hash_pool, [partition_of("a", rows, version="v2")], tmp_path)
    [receipt] = receipts(finish(run))

    assert receipt.action == "republished"
    assert receipt.source_version == "v2"
    assert receipt.desired_version == first.desired_version
    assert receipt.etag != first.etag
    assert run.report.texts_encoded == 0
    assert run.report.partitions_republished == 1
    facts = assert_embedded(tmp_path, run.space.name, "a", rows)
    assert facts.source_version == "v2"
    assert facts.rows_version == before.rows_version


def test_rows_that_are_written_again_get_a_new_version(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    rows = numbered_rows("a", 3)
    finish(make_run(hash_pool, [partition_of("a", rows)], tmp_path))
    before = assert_embedded(tmp_path, hash_pool.space.name, "a", rows)

    finish(make_run(hash_pool, [partition_of("a", rows)], tmp_path, force=True))

    facts = assert_embedded(tmp_path, hash_pool.space.name, "a", rows)
    assert facts.rows_version != before.rows_version
