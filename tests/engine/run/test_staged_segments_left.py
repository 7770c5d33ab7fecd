"""Staged segments that no run needs any more, on a full disk, and in two runs of one output."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.run.test_staged_runs import BIG, leave_staged, staged
from tests.engine.runs import (
    SMALL,
    UnstartedPool,
    assert_nothing_is_held,
    completed,
    failures,
    finish,
    finish_receipts,
    make_run,
    of_kind,
    receipts,
)
from tests.small_catalogs import (
    assert_embedded,
    numbered_rows,
    partition_of,
    write_catalog,
)


def test_run_without_work_removes_staged_rows_of_fresh_partitions(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    """As after a kill between the file of a split partition and the removal of its segments."""
    source = open_source(write_catalog(tmp_path / "c", {"big": BIG}))
    output = tmp_path / "o"
    leave_staged(hash_pool, output, BIG, 270)
    shutil.copytree(output / STAGING, tmp_path / "kept")
    run = completed(make_run(hash_pool, source, output))
    (tmp_path / "kept").rename(output / STAGING)
    other = output / STAGING / run.space.name / "other" / "v" / "0-1.parquet"
    other.parent.mkdir(parents=True)
    other.touch()
    found = of_kind(verify(source, LocalStore(output), run.space), Violation)
    warned = [violation.key for violation in found if violation.is_warning]
    assert warned == [f"{STAGING}/{run.space.name}/{key}" for key in ("big", "other")]
    assert finish_receipts(make_run(UnstartedPool(hash_pool), source, output), "fresh")
    assert staged(output) == {}
    assert other.exists(), "its partition may come back"


def test_run_without_work_removes_segments_whose_removal_failed(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    class KeepingStore(LocalStore):
        def delete(self, name: str) -> None:
            raise PermissionError(errno.EACCES, "", name)

    source = open_source(write_catalog(tmp_path / "c", {"big": BIG}))
    output = tmp_path / "o"
    assert failures(finish(make_run(hash_pool, source, KeepingStore(output), SMALL))) == []
    assert staged(output)
    assert finish_receipts(make_run(UnstartedPool(hash_pool), source, output), "fresh")
    assert staged(output) == {}


def test_segments_of_partitions_outside_the_run_are_kept(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)
    finish(make_run(hash_pool, [partition_of("other", numbered_rows("other", 250))], tmp_path))
    assert sorted(staged(tmp_path)) == [(0, 100), (100, 200)]
    assert not (tmp_path / STAGING / hash_pool.space.name / "other").exists()


def test_verify_reports_no_staged_rows_that_a_run_will_use(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    leave_staged(hash_pool, tmp_path / "o", BIG, 270)
    source = open_source(write_catalog(tmp_path / "c", {"big": BIG[:0]}))

    found = of_kind(verify(source, LocalStore(tmp_path / "o"), hash_pool.space), Violation)

    assert not [violation for violation in found if violation.is_warning]


class OvertakenStore(LocalStore):
    """Before the file of the partition is written, another run publishes it."""

    def __init__(self, root: Path, pool: EncoderPool) -> None:
        super().__init__(root)
        self._pool = pool

    def create(self, name: str) -> LocalUpload:
        if name.endswith("/big.parquet"):
            other = make_run(self._pool, [partition_of("big", BIG)], Path(self.root))
            assert failures(list(other.events())) == []
        return super().create(name)


def test_split_partition_that_another_run_published_fails_for_now(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    store = OvertakenStore(tmp_path, hash_pool)

    run = make_run(hash_pool, [partition_of("big", BIG)], store)
    [failure] = failures(finish(run))

    assert failure.transient
    assert "another run may have published the partition" in failure.reason
    assert_embedded(tmp_path, run.space.name, "big", BIG)
    assert finish_receipts(make_run(hash_pool, [partition_of("big", BIG)], tmp_path), "fresh")


def test_two_concurrent_runs_may_stage_the_same_segments(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    runs = [make_run(hash_pool, [partition_of("big", BIG)], tmp_path, SMALL) for _ in range(2)]
    found: list[list[Any]] = [[], []]
    threads = [
        threading.Thread(target=lambda n=n: found[n].extend(runs[n].events()), name=f"run-{n}")
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert receipts([*found[0], *found[1]], "encoded")
    for failure in failures([*found[0], *found[1]]):  # the faster one removes what is staged
        assert failure.transient
    assert_embedded(tmp_path, runs[0].space.name, "big", BIG)
    for run in runs:
        assert_nothing_is_held(run)
    finish(make_run(hash_pool, [partition_of("big", BIG)], tmp_path))
    assert not (tmp_path / STAGING).exists()
