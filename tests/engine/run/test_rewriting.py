"""A republished file takes no more memory than is booked for it, and keeps its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import read_published_file
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import StoredObject
from tests.engine.runs import (
    completed,
    failures,
    finish,
    limit_bytes,
    make_run,
    receipts,
    smallest_run_limit,
)
from tests.small_catalogs import (
    FailingStore,
    Rows,
    assert_embedded,
    partition_of,
    read_embedded,
    rewrite,
)

MIB = 1024 * 1024
THRESHOLDS = Thresholds(b_min=1, b_max=1000)


def wide_rows(count: int, size: int) -> Rows:
    """Texts that hardly compress, so that a page takes twice its size."""
    letters = np.random.default_rng(count).integers(33, 127, (count, size), dtype=np.uint8)
    return [(f"id-{row}", letters[row].tobytes().decode("ascii")) for row in range(count)]


def embed(
    pool: EncoderPool, output: Path, rows: Rows, version: str, **options: Any
) -> EmbeddingRun:
    """A run over the one partition."""
    partition = partition_of("wide", rows, version=version, batch_rows=1)
    return make_run(pool, [partition], output, THRESHOLDS, **options)


def test_ledger_covers_the_memory_of_republishing(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes(monkeypatch, 64 * MIB)
    rows = wide_rows(40, MIB)
    finish(embed(hash_pool, tmp_path, rows, "v1"))
    run = embed(hash_pool, tmp_path, rows, "v2")
    before = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(before)
    pa.set_memory_pool(watched)
    try:
        [receipt] = receipts(finish(run), "republished")
    finally:
        pa.set_memory_pool(before)
    assert watched.max_memory() > 40 * MIB, "a page of the file holds all of its texts"
    assert watched.max_memory() < run.report.peak_resident_bytes
    assert receipt.source_version == "v2"
    assert_embedded(tmp_path, run.space.name, "wide", rows)
    with OutputFile(pa.OSFile(str(tmp_path / f"{run.space.name}/wide.parquet"))) as file:
        assert file.reading_bytes(MIB) < 16 * MIB, "republishing the new file takes less"


def test_file_that_does_not_fit_the_memory_is_encoded_again_instead_of_republished(
    hash_pool: EncoderPool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = wide_rows(20, MIB)
    limit_bytes(monkeypatch, 64 * MIB)
    finish(embed(hash_pool, tmp_path, rows, "v1"))
    limit_bytes(monkeypatch, 2 * MIB)
    least = smallest_run_limit(hash_pool, tmp_path, THRESHOLDS)
    run = embed(hash_pool, tmp_path, rows, "v2", memory_limit_bytes=least)
    [receipt] = receipts(finish(run), "encoded")
    assert "partition 'wide' is encoded again: reading it takes" in caplog.text
    assert receipt.source_version == "v2"
    assert_embedded(tmp_path, run.space.name, "wide", rows)


def test_file_that_cannot_be_read_now_is_left_as_it_is(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    rows = wide_rows(60, 5_000)
    finish(make_run(hash_pool, [partition_of("wide", rows)], tmp_path))
    again = partition_of("wide", rows, version="v2")
    run = make_run(hash_pool, [again], FailingStore(tmp_path, "wide"))
    [failure] = failures(finish(run))
    assert (
        failure.transient
        and "Input/output error. Run again when its storage answers." in failure.reason
    )
    assert read_embedded(tmp_path, run.space.name, "wide").facts.source_version == "v1"


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


class RacingStore(LocalStore):
    """A disk on which another run replaces a file between this run's listing and its reading."""

    def __init__(self, root: Path, **facts: str) -> None:
        super().__init__(root)
        self._facts = facts

    def open(self, name: str, listed: StoredObject | None = None) -> pa.NativeFile:
        if name.endswith("/wide.parquet"):
            rewrite(self.root / name, lambda table: table, **self._facts)
        return super().open(name, listed)


def test_republished_file_keeps_the_facts_of_the_file_that_was_read(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    rows = wide_rows(3, 100)
    finish(embed(hash_pool, tmp_path, rows, "v1"))
    partition = partition_of("wide", rows, version="v2")
    run = make_run(hash_pool, [partition], RacingStore(tmp_path, precision="bf16"))
    [receipt] = receipts(finish(run), "republished")
    assert (receipt.source_version, receipt.rows) == ("v2", 3)
    facts = assert_embedded(tmp_path, run.space.name, "wide", rows)
    assert (facts.precision, facts.source_version) == ("bf16", "v2")


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


def test_file_whose_content_was_replaced_meanwhile_is_encoded_again(
    hash_pool: EncoderPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = wide_rows(3, 100)
    finish(embed(hash_pool, tmp_path, rows, "v1"))
    store = RacingStore(tmp_path, content_digest="0" * 32, desired_version="1" * 32)
    run = make_run(hash_pool, [partition_of("wide", rows, version="v2")], store)
    [receipt] = receipts(finish(run), "encoded")
    assert "it was replaced by a file with other content" in caplog.text
    assert receipt.source_version == "v2"
    facts = assert_embedded(tmp_path, run.space.name, "wide", rows)
    assert (facts.precision, facts.content_digest) == (hash_pool.precision, receipt.content_digest)
