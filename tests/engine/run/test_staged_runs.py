"""Split partitions survive: a run that ends early leaves its segments staged, and the next one
encodes the others.

Runs end early here in the gentlest way, a source that does not answer; `test_histories.py` kills
them.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from tests.engine.runs import completed, failures, finish, make_run
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, partition_of, published_files

ROOT = Path(__file__).parents[3]
BIG = numbered_rows("big", 450)


def cut_off(key: str, rows: Rows, at: int, *, version: str = "v1") -> Partition:
    """A partition whose storage stops to answer at a row."""

    def read() -> Iterator[RowBatch]:
        yield from partition_of(key, rows[:at], version=version, batch_rows=7).read()
        raise OSError("the storage does not answer")

    return Partition(key, version, read, lambda: version)


def leave_staged(
    pool: EncoderPool, output: Path, rows: Rows, at: int, b_max: int = 100
) -> list[tuple[int, int]]:
    """Run until the partition's storage stops to answer; gives the rows that are staged then."""
    run = make_run(pool, [cut_off("big", rows, at)], output, Thresholds(1, b_max))
    [failure] = failures(finish(run))
    assert failure.transient
    return sorted(staged(output))


def staged(output: Path) -> dict[tuple[int, int], Path]:
    """Paths of the staged segments of the one partition, by their rows."""
    paths = (output / STAGING).glob("*/big/*/*.parquet")
    return {(int(path.stem.split("-")[0]), int(path.stem.split("-")[1])): path for path in paths}


def resume(pool: EncoderPool, output: Path, rows: Rows = BIG, **options: Any) -> EmbeddingRun:
    """A run to the end, after which the partition is there and nothing is staged."""
    run = make_run(pool, [partition_of("big", rows)], output, **options)
    events = finish(run)
    assert failures(events) == []
    assert_embedded(output, run.space.name, "big", rows)
    assert not (output / STAGING).exists()
    assert run.report.texts_encoded + run.report.texts_reused == len(rows)
    return run


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    output = tmp_path_factory.mktemp("any")
    for at, earlier in ends:
        leave_staged(hash_pool, output, BIG, at, earlier)
    for path in staged(output).values():
        if removed.random() < 0.3:
            path.unlink()
    left = sum(stop - start for start, stop in staged(output))
    run = completed(make_run(hash_pool, [partition_of("big", BIG)], output, Thresholds(1, b_max)))
    assert_embedded(output, run.space.name, "big", BIG)
    assert run.report.texts_reused == left
    assert run.report.texts_encoded == 450 - left
    assert not (output / STAGING).exists()


def test_empty_last_segment_beside_a_staged_one_does_not_take_its_rows(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    # All rows of "first" are staged, so it ends with an empty segment; that of "second" begins at
    # the same place.
    rows = {key: numbered_rows(key, 250) for key in ("first", "second")}
    partitions = [partition_of(key, rows[key]) for key in rows]
    assert (
        len(
            failures(
                finish(make_run(hash_pool, partitions, FullStore(tmp_path), Thresholds(1, 100)))
            )
        )
        == 2
    )
    [last] = (tmp_path / STAGING).glob("*/second/*/200-250.parquet")
    last.unlink()
    run = make_run(hash_pool, partitions, tmp_path, Thresholds(1, 100))
    assert failures(finish(run)) == []
    assert run.report.texts_encoded == 50
    for key in rows:
        assert_embedded(tmp_path, run.space.name, key, rows[key])


def test_force_encodes_staged_rows_again(hash_pool: EncoderPool, tmp_path: Path) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)
    assert resume(hash_pool, tmp_path, force=True).report.texts_reused == 0


def test_encoded_segments_of_a_stopped_run_stay_staged(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    out = threading.Event()

    def read() -> Iterator[RowBatch]:
        for row, batch in enumerate(partition_of("big", BIG, batch_rows=1).read()):
            if row == 350:
                assert out.wait(60)
                run.stop()
            yield batch

    run = make_run(hash_pool, [Partition("big", "v1", read, lambda: "v1")], tmp_path)
    for event in run.events():
        if isinstance(event, SuperBatchReport) and event.index == 1:
            out.set()
    left = sum(stop - start for start, stop in staged(tmp_path))
    assert left >= 200
    assert published_files(tmp_path, run.space.name) == set()
    assert resume(hash_pool, tmp_path).report.texts_encoded == 450 - left


class FullStore(LocalStore):
    """A disk that takes segments, and no file."""

    def create(self, name: str) -> LocalUpload:
        if name.endswith(("/big.parquet", "/first.parquet", "/second.parquet")):
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
    hash_pool: EncoderPool, tmp_path: Path, rows: Rows, reason: str
) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)

    [failure] = failures(finish(make_run(hash_pool, [partition_of("big", rows)], tmp_path)))

    assert failure.transient
    assert reason in failure.reason
    assert resume(hash_pool, tmp_path, rows).report.texts_reused == 0


@pytest.mark.parametrize("cut", [1, 1000], ids=["the end", "much"])
def test_segment_without_its_end_is_encoded_again(
    hash_pool: EncoderPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)
    path = staged(tmp_path)[100, 200]
    path.write_bytes(path.read_bytes()[:-cut])

    run = resume(hash_pool, tmp_path)

    assert run.report.texts_encoded == 350
    assert run.report.texts_reused == 100
    warning = f"staged rows of partition 'big' are encoded again: {str(path)!r} cannot be read"
    assert warning in caplog.text


def test_segment_with_a_damaged_page_is_encoded_by_the_next_run(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)
    path = staged(tmp_path)[100, 200]
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)

    [failure] = failures(finish(make_run(hash_pool, [partition_of("big", BIG)], tmp_path)))

    assert failure.transient
    assert "its staged rows 100 to 200 cannot be used and were removed: " in failure.reason
    assert resume(hash_pool, tmp_path).report.texts_encoded == 100


def test_renamed_segment_is_not_used(
    hash_pool: EncoderPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)
    path = staged(tmp_path)[100, 200]
    path.rename(path.with_name("150-250.parquet"))
    (path.parent / "notes.parquet").touch()
    assert resume(hash_pool, tmp_path).report.texts_reused == 100
    assert re.search(r"it was written as '.*/100-200.parquet' in fp32", caplog.text)


def test_segment_damaged_after_the_listing_is_encoded_again(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    leave_staged(hash_pool, tmp_path, BIG, 270)
    path = staged(tmp_path)[100, 200]

    def read() -> Iterator[RowBatch]:
        os.truncate(path, 1000)
        yield from partition_of("big", BIG).read()

    run = make_run(hash_pool, [Partition("big", "v1", read, lambda: "v1")], tmp_path)
    [failure] = failures(finish(run))
    assert failure.transient
    assert "its staged rows 100 to 200 cannot be used and were removed: " in failure.reason
    assert "cannot be read because" in failure.reason
    assert published_files(tmp_path, run.space.name) == set()
    assert resume(hash_pool, tmp_path).report.texts_encoded == 100
