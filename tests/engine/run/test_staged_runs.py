"""Split partitions survive: a run that ends early leaves its segments staged, and the next one
encodes the others. What no run needs any more is removed.

Runs end early here in the gentlest way, a source that does not answer; `test_histories.py` kills
them.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation
from tests.engine.runs import (
    Output,
    UnstartedPool,
    assert_nothing_is_held,
    failures,
    finish,
    in_memory,
    make_run,
    receipts,
)
from tests.small_catalogs import (
    Rows,
    keys_of,
    numbered_rows,
    partition_of,
    write_catalog,
)

BIG = numbered_rows("big", 450)


def cut_off(key: str, rows: Rows, at: int, *, version: str = "v1") -> Partition:
    """A partition whose storage stops to answer at a row."""

    def read() -> Iterator[RowBatch]:
        yield from partition_of(key, rows[:at], version=version, batch_rows=7).read()
        raise OSError("the storage does not answer")

    return Partition(key, version, read, lambda: version)


def leave_staged(output: Output, at: int, b_max: int = 100) -> None:
    """Run until the partition's storage stops to answer."""
    assert output.failure([cut_off("big", BIG, at)], Thresholds(1, b_max)).transient


def staged(output: Output) -> dict[tuple[int, int], Path]:
    """Paths of the staged segments of the one partition, by their rows."""
    paths = (output.root / STAGING).glob("*/big/*/*.parquet")
    found: dict[tuple[int, int], Path] = {}
    for path in paths:
        start, stop = path.stem.split("-")
        found[int(start), int(stop)] = path
    return found


def staged_rows(output: Output) -> int:
    return sum(stop - start for start, stop in staged(output))


def resume(output: Output, rows: Rows = BIG, **options: Any) -> EmbeddingRun:
    """A run to the end, after which the partition is there and nothing is staged."""
    run = output.embed([partition_of("big", rows)], **options)
    output.check("big", rows)
    assert not (output.root / STAGING).exists()
    assert run.report.texts_encoded + run.report.texts_reused == len(rows)
    return run


@settings(max_examples=12)
@given(
    ends=st.lists(st.tuples(st.integers(0, 449), st.integers(20, 200)), max_size=3),
    removed=st.randoms(use_true_random=False),
    b_max=st.integers(20, 600),
)
def test_file_does_not_depend_on_the_thresholds_of_earlier_runs(
    hash_pool: EncoderPool,
    tmp_path_factory: pytest.TempPathFactory,
    ends: list[tuple[int, int]],
    removed: random.Random,
    b_max: int,
) -> None:
    output = Output(hash_pool, tmp_path_factory.mktemp("any"))
    for at, earlier in ends:
        leave_staged(output, at, earlier)
    for path in staged(output).values():
        if removed.random() < 0.3:
            path.unlink()
    left = staged_rows(output)
    run = resume(output, thresholds=Thresholds(1, b_max))
    assert run.report.texts_reused == left


def test_empty_last_segment_beside_a_staged_one_does_not_take_its_rows(output: Output) -> None:
    # All rows of "first" are staged, so it ends with an empty segment; that of "second" begins at
    # the same place.
    catalog = {"first": numbered_rows("first", 250), "second": numbered_rows("second", 250)}
    full = FullStore(output.root)
    events = output.events(in_memory(catalog), Thresholds(1, 100), store=full)
    assert keys_of(failures(events)) == ["first", "second"]
    [last] = (output.root / STAGING).glob("*/second/*/200-250.parquet")
    last.unlink()
    run = output.embed(in_memory(catalog), Thresholds(1, 100))
    assert run.report.texts_encoded == 50
    output.check_all(catalog)


def test_force_encodes_staged_rows_again(output: Output) -> None:
    leave_staged(output, 270)
    assert resume(output, force=True).report.texts_reused == 0


def test_partition_that_is_whole_now_leaves_nothing_staged(output: Output) -> None:
    leave_staged(output, 270)

    output.embed([partition_of("big", BIG[:30], version="v2")])

    output.check("big", BIG[:30])
    assert not (output.root / STAGING).exists()


def test_encoded_segments_of_a_stopped_run_stay_staged(output: Output) -> None:
    out = threading.Event()

    def read() -> Iterator[RowBatch]:
        for row, batch in enumerate(partition_of("big", BIG, batch_rows=1).read()):
            if row == 350:
                assert out.wait(60)
                run.stop()
            yield batch

    run = output.run([Partition("big", "v1", read, lambda: "v1")])
    for event in run.events():
        if isinstance(event, SuperBatchReport) and event.index == 1:
            out.set()
    left = staged_rows(output)
    assert left >= 200
    assert output.keys() == set()
    assert resume(output).report.texts_encoded == 450 - left


class FullStore(LocalStore):
    """A disk that takes segments, and no file."""

    def create(self, name: str) -> LocalUpload:
        if name.endswith(("/first.parquet", "/second.parquet")):
            raise TransientError("no room for a large file")
        return super().create(name)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [*BIG[:150], ("id-150", "another text"), *BIG[151:]],
            "its rows 100 to 200 are not those that were staged",
        ),
        (BIG[:190], "it has 190 rows, and 200 were there when it was staged"),
    ],
    ids=["changed", "fewer"],
)
def test_segments_of_rows_that_changed_under_the_same_version_are_removed(
    output: Output, rows: Rows, reason: str
) -> None:
    leave_staged(output, 270)

    failure = output.failure([partition_of("big", rows)])

    assert failure.transient
    assert reason in failure.reason
    assert resume(output, rows).report.texts_reused == 0


@pytest.mark.parametrize("cut", [1, 1000], ids=["the end", "much"])
def test_segment_without_its_end_is_encoded_again(
    output: Output, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    leave_staged(output, 270)
    path = staged(output)[100, 200]
    path.write_bytes(path.read_bytes()[:-cut])

    run = resume(output)

    assert run.report.texts_encoded == 350
    assert run.report.texts_reused == 100
    warning = f"staged rows of partition 'big' are encoded again: {str(path)!r} cannot be read"
    assert warning in caplog.text


def test_segment_with_a_damaged_page_is_encoded_by_the_next_run(output: Output) -> None:
    leave_staged(output, 270)
    path = staged(output)[100, 200]
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)

    failure = output.failure([partition_of("big", BIG)])

    assert failure.transient
    assert "its staged rows 100 to 200 cannot be used and were removed: " in failure.reason
    assert resume(output).report.texts_encoded == 100


def test_renamed_segment_is_not_used(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    leave_staged(output, 270)
    path = staged(output)[100, 200]
    path.rename(path.with_name("150-250.parquet"))
    (path.parent / "notes.parquet").touch()
    assert resume(output).report.texts_reused == 100
    assert re.search(r"it was written as '.*/100-200.parquet' in fp32", caplog.text)


def test_segment_damaged_after_the_listing_is_encoded_again(output: Output) -> None:
    leave_staged(output, 270)
    path = staged(output)[100, 200]

    def read() -> Iterator[RowBatch]:
        os.truncate(path, 1000)
        yield from partition_of("big", BIG).read()

    failure = output.failure([Partition("big", "v1", read, lambda: "v1")])
    assert failure.transient
    assert "its staged rows 100 to 200 cannot be used and were removed: " in failure.reason
    assert "cannot be read because" in failure.reason
    assert output.keys() == set()
    assert resume(output).report.texts_encoded == 100


def warnings(found: list[Violation]) -> list[Violation]:
    return [violation for violation in found if violation.is_warning]


def test_run_without_work_removes_staged_rows_of_fresh_partitions(
    output: Output, tmp_path: Path
) -> None:
    """As after a kill between the file of a split partition and the removal of its segments."""
    source = open_source(write_catalog(tmp_path / "c", {"big": BIG}))
    leave_staged(output, 270)
    shutil.copytree(output.root / STAGING, tmp_path / "kept")
    output.embed(source)
    (tmp_path / "kept").rename(output.root / STAGING)
    other = output.root / STAGING / output.space / "other" / "v" / "0-1.parquet"
    other.parent.mkdir(parents=True)
    other.touch()
    found = output.violations(source)
    folder = f"{STAGING}/{output.space}"
    assert keys_of(warnings(found)) == [f"{folder}/big", f"{folder}/other"]
    assert receipts(output.events(source, pool=UnstartedPool(output.pool)), "fresh")
    assert staged(output) == {}
    assert other.exists(), "its partition may come back"


def test_run_without_work_removes_segments_whose_removal_failed(
    output: Output, tmp_path: Path
) -> None:
    class KeepingStore(LocalStore):
        def delete(self, name: str) -> None:
            raise PermissionError(errno.EACCES, "", name)

    source = open_source(write_catalog(tmp_path / "c", {"big": BIG}))
    assert failures(output.events(source, store=KeepingStore(output.root))) == []
    assert staged(output)
    assert receipts(output.events(source, pool=UnstartedPool(output.pool)), "fresh")
    assert staged(output) == {}


def test_segments_of_partitions_outside_the_run_are_kept(output: Output) -> None:
    leave_staged(output, 270)
    output.events([partition_of("other", numbered_rows("other", 250))])
    assert sorted(staged(output)) == [(0, 100), (100, 200)]
    assert not (output.root / STAGING / output.space / "other").exists()


def test_verify_reports_no_staged_rows_that_a_run_will_use(output: Output, tmp_path: Path) -> None:
    leave_staged(output, 270)
    source = open_source(write_catalog(tmp_path / "c", {"big": BIG[:0]}))

    found = output.violations(source)

    assert warnings(found) == []


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


def test_split_partition_that_another_run_published_fails_for_now(output: Output) -> None:
    store = OvertakenStore(output.root, output.pool)

    run = output.run([partition_of("big", BIG)], store=store)
    [failure] = failures(finish(run))

    assert failure.transient
    assert "another run may have published the partition" in failure.reason
    output.check("big", BIG)
    assert receipts(output.events([partition_of("big", BIG)]), "fresh")


def test_two_concurrent_runs_may_stage_the_same_segments(output: Output) -> None:
    runs = [output.run([partition_of("big", BIG)]), output.run([partition_of("big", BIG)])]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda run: list(run.events()), runs)
    assert receipts(first + second, "encoded")
    for failure in failures(first + second):  # the faster one removes what is staged
        assert failure.transient
    output.check("big", BIG)
    for run in runs:
        assert_nothing_is_held(run)
    output.events([partition_of("big", BIG)])
    assert not (output.root / STAGING).exists()
